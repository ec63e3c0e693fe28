"""A caption that changed: its text is encoded, the image's latents are those that were stored, byte for byte."""

from __future__ import annotations

import os
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest

from bucketline.ingest.encoders.latents import LatentColumns
from bucketline.ingest.pipeline import image_reader
from bucketline.store import Store
from tests.commands import Ran, call
from tests.kit import by_id, flip_bit
from tests.models import SMALL, png


def pack(source: Path, store: Path, model: Path, *more: object) -> Ran:
    return call("ingest", "pack", source, store, "--model", model, *SMALL, "--json", *more)


def rows_of(store: Path) -> dict[str, tuple[tuple[object, ...], dict[str, bytes]]]:
    """Return every sample's record and row, without what its captions, its time and its place in the store decide."""
    fields = attrgetter("bucket", "split", "content", "original_size", "resized", "crop")
    return {name: (fields(held.record), held.columns) for name, held in by_id(Store.open(store)).items()}


def forbid_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_reader, "decode_image", lambda *_: pytest.fail("an image was decoded"))
    monkeypatch.setattr(LatentColumns, "encode", lambda *_: pytest.fail("an image was encoded"))


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--latents", "moments", "--flip"),
        ("--latents", "sample", "--flip", "--crop", "random", "--val-fraction", "0.3"),
        ("--dtype", "BF16", "--crop", "random"),
        ("--check", "content"),
    ],
)
def test_latents_are_kept_where_only_captions_changed(
    options: tuple[str, ...], source: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = pack(source, tmp_path / "s", model, *options).json
    before = rows_of(tmp_path / "s")
    for path in sorted(source.rglob("*.png")):
        path.with_suffix(".txt").write_text(f"the house\na {path.stem} dog\n", encoding="ascii")
    with monkeypatch.context() as patched:
        forbid_encoding(patched)
        report = pack(source, tmp_path / "s", model, *options).json
    assert (report["packed"], report["latents_kept"], report["unchanged"], report["rejected"]) == (14, 14, 0, 0)
    assert (report["crop_loss"], report["enlarged"]) == (first["crop_loss"], first["enlarged"])
    assert rows_of(tmp_path / "s") == before
    store = Store.open(tmp_path / "s")
    shard, record = store.sample("a/000.png")
    assert record.captions == ("the house", "a 000 dog")
    assert pack(source, tmp_path / "t", model, *options).code == 0
    anew = Store.open(tmp_path / "t")
    other, same = anew.sample("a/000.png")
    assert (
        store.caption(store.shards.index(shard), record.caption_rows[0]).digest
        == anew.caption(anew.shards.index(other), same.caption_rows[0]).digest
    )
    assert call("store", "verify", tmp_path / "s").code == 0
    assert pack(source, tmp_path / "s", model, *options).json["unchanged"] == 14


def test_a_touched_file_of_the_same_content_keeps_its_latents_and_a_changed_one_does_not(
    source: Path, tmp_path: Path, model: Path
) -> None:
    assert pack(source, tmp_path / "s", model).code == 0
    before = rows_of(tmp_path / "s")
    os.utime(source / "a" / "000.png", ns=(1, 1))
    (source / "a" / "002.png").write_bytes(png(20, 30, 99))
    (source / "a" / "002.txt").write_text("red\n", encoding="ascii")
    (source / "b" / "001.txt").write_text("blue\n", encoding="ascii")
    report = pack(source, tmp_path / "s", model).json  # in one batch with one that is encoded
    assert (report["packed"], report["latents_kept"], report["unchanged"]) == (3, 2, 11)
    after = rows_of(tmp_path / "s")
    assert [sample_id for sample_id in before if before[sample_id] != after[sample_id]] == ["a/002.png"]
    assert pack(source, tmp_path / "s", model).json["unchanged"] == 14


def test_a_damaged_row_is_not_copied_but_encoded(source: Path, tmp_path: Path, model: Path) -> None:
    assert pack(source, tmp_path / "s", model).code == 0
    before = rows_of(tmp_path / "s")
    store = Store.open(tmp_path / "s")
    shard, record = store.sample("b/001.png")
    bucket = store.bucket(record.bucket)
    located = bucket.locate(np.array([bucket.sample_ids(np.arange(bucket.num_rows)).index("b/001.png")]))
    flip_bit(shard.paths.lmdb, 8 * int(located.offsets(bucket.spec, "latent")[0]))
    (source / "b" / "001.txt").write_text("blue\n", encoding="ascii")
    report = pack(source, tmp_path / "s", model).json
    assert (report["packed"], report["latents_kept"]) == (1, 0)
    (fields, row), (fields_before, row_before) = rows_of(tmp_path / "s")["b/001.png"], before["b/001.png"]
    assert fields == fields_before
    np.testing.assert_allclose(
        np.frombuffer(row["latent"], "<f2").astype(float), np.frombuffer(row_before["latent"], "<f2").astype(float), atol=4e-3
    )
