"""Failures that other caches are known for: images and cache in one folder, files of whole batches, shapes that differ."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from bucketline.errors import UsageError
from bucketline.files.paths import refuse_overlap
from bucketline.ingest.encoders.vae import VaeEncoder
from bucketline.ingest.sources.folder import FolderSource, list_folder
from bucketline.loader import Loader, LoaderConfig, Remainder
from bucketline.store import BlockSpec, Store
from bucketline.store.format.block import CHECKSUM, Column, Row, caption_digest, encode_block, fixed_columns, make_row
from bucketline.store.read.samples import info
from bucketline.store.write import shard_writer
from bucketline.store.write.publish import lock_store, publish
from bucketline.store.write.seal import seal
from tests.commands import Ran, call
from tests.kit import MAX_CAPTIONS, empty_store, make_sample, open_writer, samples_of, spec_of, tree, untouched
from tests.models import SMALL, png, write_images

# Cached files lay among the images and were taken for images, and mixed shapes met in one batch. Here source and store are
# compared after links, `..` and by inode; equal, or one in the other, is refused before anything is read or written.


def pack(source: Path, store: Path, model: Path) -> Ran:
    return call("ingest", "pack", source, store, "--model", model, *SMALL, "--json")


def linked(photos: Path) -> tuple[Path, Path]:
    link = photos.parent / "link"
    link.symlink_to(photos)
    return photos, link


def inside_a_linked_folder(photos: Path) -> tuple[Path, Path]:
    link = photos.parent / "link"
    link.symlink_to(photos / "a")
    return photos, link / "cache"


def source_behind_a_link(photos: Path) -> tuple[Path, Path]:
    link = photos.parent / "link"
    link.symlink_to(photos.parent)
    return link / "photos", photos / "new" / "cache"


OVERLAPS: dict[str, Callable[[Path], tuple[Path, Path]]] = {
    "the same": lambda photos: (photos, photos),
    "the same, by two dots": lambda photos: (photos, photos / "a" / ".." / ".." / photos.name),
    "the same, by a link": linked,
    "the store inside": lambda photos: (photos, photos / "cache"),
    "the store deep inside": lambda photos: (photos, photos / "a" / "new" / "cache"),
    "the source inside": lambda photos: (photos, photos.parent),
    "the source deep inside": lambda photos: (photos / "a", photos.parent),
    "the store inside, by a link": inside_a_linked_folder,
    "the store inside a source behind a link": source_behind_a_link,
    "the same, a slash more": lambda photos: (photos, Path(f"{photos}//.")),
}


@pytest.mark.parametrize("case", OVERLAPS)
def test_a_store_that_lies_where_the_images_lie_is_refused_before_anything_is_read_or_written(
    case: str, source: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = OVERLAPS[case](source)
    with untouched(source.parent):
        monkeypatch.setattr(FolderSource, "listing", lambda _: pytest.fail("the source was read"))
        pack(one, other, model).fails(str(other), "choose a store outside the folder of images", code=2)


def test_relative_paths_are_compared_from_the_present_folder(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(source)
    with pytest.raises(UsageError, match="is inside the source"):
        refuse_overlap(Path("../photos"), Path("cache"))
    with pytest.raises(UsageError, match="the same folder"):
        refuse_overlap(source, Path())


def test_a_folder_that_merely_begins_with_the_same_name_is_another(source: Path) -> None:
    refuse_overlap(source, Path(f"{source}.store"))
    refuse_overlap(source, source.parent / "photo")


def test_a_name_in_other_case_that_does_not_exist_yet_is_taken_for_the_same(tmp_path: Path) -> None:
    """On a file system that does not tell case apart, such a store would end up in the source."""
    with pytest.raises(UsageError, match="the same folder"):
        refuse_overlap(tmp_path / "Photos", tmp_path / "photos")


def test_a_folder_that_has_two_names_is_found_by_its_inode(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under a bind mount, where no link gives it away: `realpath` is made blind here."""
    (source.parent / "mount").symlink_to(source)
    monkeypatch.setattr(os.path, "realpath", os.path.abspath)
    with pytest.raises(UsageError, match="is inside"):
        refuse_overlap(source, source.parent / "mount" / "cache")


def test_nothing_that_a_store_is_made_of_is_listed_as_an_image(store: Store, tmp_path: Path) -> None:
    write_images(tmp_path, 1)
    for name in tree(store.path):
        if not name.endswith("/"):
            (tmp_path / "s" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "s" / name).write_bytes(b"")
    assert [item.id for item in list_folder(tmp_path).items] == ["a/000.png"]


# Rows of an encoded batch were saved as views, so that every file carried the whole batch. Here rows are cloned out of the
# batch, and a block's length must be the sum of its rows and its header before it is written.


BUCKET = "train/64x64"


def values_of(latent: NDArray[Any]) -> dict[str, NDArray[Any]]:
    return {
        "latent": latent,
        "captions": np.zeros(MAX_CAPTIONS, "<i4"),
        "original_size": np.zeros(2, "<i4"),
        "crop": np.zeros(2, "<i4"),
        "id": np.zeros(2, "<u8"),
    }


def test_a_row_cloned_out_of_a_batch_has_its_own_bytes_alone() -> None:
    spec = spec_of(BUCKET)
    strided = np.arange(7 * 2 * 8 * 8, dtype="<f2").reshape(7, 8, 8, 2).transpose(0, 3, 1, 2)
    expected, batch = [one.tobytes() for one in strided], strided.copy()
    for given in (strided, batch):
        rows = [make_row(spec, values_of(given[n])) for n in range(7)]
        batch[:] = 0  # a row does not change with the batch that it was cloned from
        for row, own in zip(rows, expected, strict=True):
            assert row["latent"] == own
            assert sum(map(len, row.values())) == spec.row_bytes - spec.column(CHECKSUM).row_bytes
        batch[:] = strided
        assert len(encode_block(spec, rows, 0)) == spec.header_bytes + 7 * spec.row_bytes


def test_rows_that_carry_their_whole_batch_are_refused_before_the_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: `make_row` keeps what a view is a view of, as `torch.save` of a view does."""

    def with_the_batch(spec: BlockSpec, values: Mapping[str, NDArray[Any]]) -> Row:
        row = make_row(spec, values)
        base = values["latent"].base
        return {**row, "latent": row["latent"] if base is None else base.tobytes()}

    monkeypatch.setattr(shard_writer, "make_row", with_the_batch)
    empty_store(tmp_path)
    writer = open_writer(tmp_path, "a")
    batch = np.zeros((7, 2, 8, 8), "<f2")
    for n in range(7):
        record = make_sample(f"{n}.png", BUCKET).record
        writer.add(spec=spec_of(BUCKET), latents={"latent": batch[n]}, record=record, captions=[caption_digest("")])
    with pytest.raises(AssertionError, match=r"a block of 7 rows of train/64x64 has \d+ bytes, expected"):
        writer.commit()
    writer.close()
    assert not seal(tmp_path, "a")  # nothing of it was written


def test_a_store_takes_little_more_on_the_disk_than_its_rows(tmp_path: Path) -> None:
    """Rows of 8 KiB, 1,000 of them: LMDB by itself would round each up to 12 KiB, the failure would make them 64."""
    spec = BlockSpec(bucket="train/256x256", columns=(*fixed_columns(8), Column(name="latent", dtype="F16", shape=(4, 32, 32))))
    manifest = empty_store(tmp_path)
    from dataclasses import replace

    manifest = replace(manifest, max_captions=8)
    writer = open_writer(tmp_path, "a")
    batch = np.random.default_rng(0).normal(size=(8, 4, 32, 32)).astype("<f2")
    for n in range(1000):
        record = make_sample(f"{n}.png", "train/256x256").record
        writer.add(spec=spec, latents={"latent": batch[n % 8]}, record=record, captions=[caption_digest("")])
    writer.commit()
    writer.close()
    seal(tmp_path, "a")
    with lock_store(tmp_path):
        publish(tmp_path, manifest, ["a"], [])
    report = info(Store.open(tmp_path))
    assert report["samples"] == 1000
    assert 8192 * 1000 < report["payload_bytes"] < 8192 * 1000 * 1.06
    assert report["disk_bytes"] < report["payload_bytes"] * 1.03


def test_payload_is_the_rows_the_captions_and_the_records_and_nothing_else(tmp_path: Path) -> None:
    from tests.kit import embedding, make_store

    samples = samples_of({BUCKET: 20})
    store = make_store(tmp_path, samples)
    texts = {text for sample in samples for text in sample.captions} | {""}
    shard = store.shards[0]
    records = int(shard.index["record_bytes"].sum())
    expected = 20 * spec_of(BUCKET).row_bytes + sum(embedding(text).nbytes for text in texts) + records
    assert store.manifest.payload_bytes == expected


# `[16, 88, 136] != [16, 88, 144]` at a random step, because packing and training each computed the size. Here a row enters a
# bucket only if the encoded tensor's own shape is the bucket's, and a loader reads shapes only from the manifest.


def test_every_batch_over_images_of_awkward_sizes_has_the_shape_of_its_bucket(tmp_path: Path, model: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    for n, (height, width) in enumerate(
        [(44, 68), (44, 72), (43, 67), (45, 69), (17, 25), (25, 17), (16, 24), (31, 31), (99, 64)]
    ):
        (photos / f"{n}.png").write_bytes(png(height, width, n))
    grid = "16x22,18x24,24x18,22x16,20x20"
    assert call("ingest", "pack", photos, tmp_path / "s", "--model", model, "--grid", grid, "--min-size-px", "8").code == 0
    store = Store.open(tmp_path / "s")
    assert len(store.buckets()) > 2
    with Loader(store, LoaderConfig(batch_size=2, epochs=3, remainder=Remainder.PARTIAL)) as loader:
        for batch in loader.forever():
            bucket = store.bucket(batch.bucket)
            assert batch.latents.shape == (2, 4, bucket.height_px // 2, bucket.width_px // 2)


def test_an_encoder_that_rounds_otherwise_is_refused_while_packing_not_at_a_random_step(
    source: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = VaeEncoder.encode

    def rounded_up(self: VaeEncoder, pixels: NDArray[np.uint8], seeds: Sequence[int] = ()) -> tuple[torch.Tensor, torch.Tensor]:
        latents, is_finite = encode(self, pixels, seeds)
        return torch.nn.functional.pad(latents, (0, latents.shape[-1] % 8 and 8 - latents.shape[-1] % 8)), is_finite

    monkeypatch.setattr(VaeEncoder, "encode", rounded_up)
    call("ingest", "pack", source, tmp_path / "s", "--model", model, *SMALL, "--json").fails(
        "does not fit its bucket", "F16 [4, 8, 12], got float16 [4, 8, 16]"
    )
    assert Store.open(tmp_path / "s").manifest.samples == 0


@pytest.mark.parametrize("shape", [(2, 8, 9), (2, 9, 8), (2, 8), (1, 2, 8, 8), (2, 64), (128,)])
def test_a_row_of_another_shape_never_enters_a_bucket(tmp_path: Path, shape: tuple[int, ...]) -> None:
    empty_store(tmp_path)
    writer = open_writer(tmp_path, "a")
    sample = make_sample("a.png", "train/64x64")
    with pytest.raises(ValueError, match=r"column 'latent' of bucket train/64x64 takes F16 \[2, 8, 8\], got float16"):
        writer.add(spec=spec_of(sample.bucket), latents={"latent": np.zeros(shape, "<f2")}, record=sample.record, captions=[])
    writer.close()
