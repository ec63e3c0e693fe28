"""The reader gives back what was written, by row and by id, without LMDB; so do the map and the batches copied out of it."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bucketline.errors import CorruptError, StoreError
from bucketline.loader import Loader, LoaderConfig
from bucketline.loader.prefetch.readahead import ColdDetector
from bucketline.store import Store
from bucketline.store.folder import LocalFolder
from bucketline.store.format.hashing import sample_digest
from bucketline.store.format.text_block import EMPTY_CAPTION_ROW
from bucketline.store.read.lost_files import lost_shards, refuse_lost_shards
from bucketline.store.shard.address_range import ZERO_BYTES, AddressRange
from tests.commands import call
from tests.kit import IMAGES, Sample, embedding, make_sample, make_store, samples_of, tree
from tests.loading import check_batch, loaders_of
from tests.models import SMALL, write_images

BUCKET = "train/64x64"


def test_every_row_of_every_bucket_is_what_was_written(store: Store, samples: list[list[Sample]]) -> None:
    written = [sample for shard in samples for sample in shard]
    IMAGES.expect(store, written)
    for bucket in store.buckets():
        own = [sample for sample in written if sample.bucket == bucket.name]
        rows = np.arange(bucket.num_rows)
        assert bucket.sample_ids(rows) == [sample.id for sample in own]
        assert bucket.read(rows, "original_size").tolist() == [list(sample.record.original_size) for sample in own]
        assert bucket.read(rows, "crop").tolist() == [list(sample.record.crop[:2]) for sample in own]
        assert [bytes(row) for row in bucket.read(rows, "id")] == [sample_digest(sample.id) for sample in own]


def test_rows_come_in_the_order_asked_for_as_often_as_asked_for(store: Store) -> None:
    bucket = store.bucket(BUCKET)
    ids = bucket.sample_ids(np.arange(bucket.num_rows))
    rows = np.random.default_rng(0).integers(0, bucket.num_rows, 100)
    assert bucket.sample_ids(rows) == [ids[row] for row in rows]
    assert len(bucket.read(np.array([], dtype=np.int64), "latent")) == 0


def test_every_shard_begins_its_captions_with_the_empty_one(store: Store) -> None:
    for ordinal in range(len(store.shards)):
        assert np.array_equal(store.read_caption(ordinal, EMPTY_CAPTION_ROW)["tokens"], embedding(""))


ODD_IDS = [
    *("a b/ü ß.png", "日本語/写真.jpg", "x" * 10_240 + ".png", "quote\"'`$(rm -rf ~).png", "new\nline.png"),
    *(os.fsdecode(b"latin-1 \xe9\xff.png"), " ", ".png", "a/../b.png", "\0.png", "%s{0}.png", "A.PNG", "a.png"),
]


def test_ids_of_any_kind_and_length_are_kept(tmp_path: Path) -> None:
    store = make_store(tmp_path, [make_sample(name, BUCKET, (f"caption of {name}",)) for name in ODD_IDS])
    bucket = store.bucket(BUCKET)
    assert bucket.sample_ids(np.arange(len(ODD_IDS))) == ODD_IDS
    for name in ODD_IDS:
        assert store.sample(name)[1].captions == (f"caption of {name}",)


def test_what_is_not_there_is_named_with_what_is(store: Store) -> None:
    with pytest.raises(StoreError, match=r"has no sample 'nothing.png'; ids are paths in the source"):
        store.sample("nothing.png")
    with pytest.raises(StoreError, match="has no bucket 'train/8x8'; it has train/64x128, train/64x64"):
        store.bucket("train/8x8")
    assert [bucket.name for bucket in store.buckets("val")] == ["val/64x64"]
    assert store.buckets("test") == []
    for rows in ([-1], [35], [0, 35], [1 << 40]):
        with pytest.raises(StoreError, match="train/64x64 has the rows 0 to 34, requested"):
            store.bucket(BUCKET).locate(np.array(rows))


def test_opening_reads_the_manifest_and_nothing_else(store: Store, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes((store.path / "manifest.json").read_bytes())
    opened = Store.open(tmp_path)
    assert opened.bucket(BUCKET).num_rows == 35
    with pytest.raises(StoreError, match=r"g0.extents is missing, the manifest lists it; restore it"):
        opened.bucket(BUCKET).read(np.array([0]), "latent")


@pytest.mark.parametrize("suffix", ["lmdb", "extents", "index"])
def test_a_file_that_is_missing_or_of_another_length_is_an_error_that_names_it(
    store: Store, tmp_path: Path, suffix: str
) -> None:
    shutil.copytree(store.path, tmp_path / "s")
    path = tmp_path / "s" / "shards" / f"g1.{suffix}"
    data = path.read_bytes()
    last = store.bucket(BUCKET).num_rows - 1
    path.write_bytes(data[:-1])
    with pytest.raises(CorruptError, match=rf"g1.{suffix} has \d+ bytes, the manifest says {len(data)}"):
        Store.open(tmp_path / "s").bucket(BUCKET).sample_ids(np.array([last]))
    path.unlink()
    with pytest.raises(StoreError, match=rf"g1.{suffix} is missing"):
        Store.open(tmp_path / "s").bucket(BUCKET).sample_ids(np.array([last]))
    assert Store.open(tmp_path / "s").bucket(BUCKET).sample_ids(np.array([0])) == [f"first/{BUCKET}/0.png"]


def test_a_file_that_shrinks_while_it_is_read_is_an_error_of_the_plain_reader(store: Store, tmp_path: Path) -> None:
    shutil.copytree(store.path, tmp_path / "s")
    opened = Store.open(tmp_path / "s")
    opened.bucket(BUCKET).read(np.array([0]), "latent")
    os.truncate(tmp_path / "s" / "shards" / "g0.lmdb", 4096)
    with pytest.raises(CorruptError, match=r"g0.lmdb has 4096 bytes, the manifest says"):
        opened.bucket(BUCKET).read(np.arange(23), "latent")


@pytest.mark.parametrize("plain_reads", [False, True])
@pytest.mark.parametrize("cold", [False, True])
def test_batches_hold_what_plain_reads_give_over_all_shards_with_captions_padded_by_zeros(
    store: Store, monkeypatch: pytest.MonkeyPatch, *, cold: bool, plain_reads: bool
) -> None:
    monkeypatch.setattr(ColdDetector, "is_cold", property(lambda _: cold))
    shards: set[int] = set()
    options = {
        "remainder": "carry",
        "rewind": False,
        "epochs": 4,
        "batch_size": 20,
        "plain_reads": plain_reads,
    }
    for loader in loaders_of(store, pad_to=store.max_tokens + 2, **options):
        for batch in loader.forever():
            rows = loader.plan.at(batch.step).rows
            check_batch(store, rows, batch)
            shards.update(store.bucket(batch.bucket).locate(rows).shard.tolist())
    assert shards == {0, 1}


@pytest.mark.parametrize("plain_reads", [False, True])
def test_blocks_so_small_that_lmdb_keeps_them_inside_a_page_are_copied_too(tmp_path: Path, *, plain_reads: bool) -> None:
    """Such values are aligned to two bytes only, where a column's items may have eight."""
    store = make_store(tmp_path, [make_sample("a.png", "train/8x8")], [make_sample("bc.png", "train/8x8", ("x",))])
    assert any(int(store.bucket("train/8x8").locate(np.arange(2)).data[n]) % 8 for n in range(2))
    (loader,) = loaders_of(store, batch_size=2, plain_reads=plain_reads)
    (batch,) = loader
    check_batch(store, np.arange(2), batch)
    assert np.array_equal(batch.tokens[1].numpy(), embedding("x"))


def range_over(store: Store) -> AddressRange:
    return AddressRange([shard.entry.lmdb.num_bytes for shard in store.shards], lambda ordinal: store.shards[ordinal].opened())


def test_the_range_begins_with_zeros_and_has_every_shard_byte_for_byte(store: Store) -> None:
    whole = range_over(store)
    whole.map(np.array([1, 0, 1]))
    view = whole.bytes_view()
    assert not view[:ZERO_BYTES].any()
    for ordinal, shard in enumerate(store.shards):
        data = np.frombuffer(shard.paths.lmdb.read_bytes(), "u1")
        begin = int(whole.first_byte[ordinal])
        assert np.array_equal(view[begin : begin + len(data)], data)


def test_a_shard_is_mapped_when_it_is_first_needed_and_its_file_closed(store: Store) -> None:
    opened = Store.open(store.path)
    whole = range_over(opened)
    before = len(list(Path("/proc/self/fd").iterdir()))
    whole.map(np.array([1]))
    assert whole.is_mapped.tolist() == [False, True]
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize("plain_reads", [False, True])
def test_impossible_starts_are_an_error_of_the_loader_not_a_read_beyond_the_block(
    store: Store, tmp_path: Path, *, plain_reads: bool
) -> None:
    shutil.copytree(store.path, tmp_path / "s")
    opened = Store.open(tmp_path / "s")
    located = opened.locate_captions(np.array([0]), np.array([2]))
    path = opened.shards[0].paths.lmdb
    for value in (1 << 40, -5):
        data = bytearray(path.read_bytes())
        at = int(located.starts_offsets()[0]) + 8
        data[at : at + 8] = value.to_bytes(8, "little", signed=True)
        path.write_bytes(data)
        fresh = Store.open(tmp_path / "s")
        config = LoaderConfig(batch_size=5, epochs=9, plain_reads=plain_reads)  # one of them draws this caption or the next one
        with (
            Loader(fresh, config) as loader,
            pytest.raises(CorruptError, match=r"caption [23] has the `starts` .* run `store verify`"),
        ):
            list(loader.forever())
        with pytest.raises(CorruptError, match=r"caption 2 has the `starts`"):
            fresh.read_caption(0, 2)


def test_open_stores_do_not_use_up_the_open_files(store: Store) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    held = [Store.open(store.path) for _ in range(50)]
    for opened in held:
        opened.bucket(BUCKET).read(np.arange(35), "latent")
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 4


def test_maps_of_sidecars_are_given_back_when_the_store_is_gone(store: Store) -> None:
    def maps() -> int:  # of this store only: what another test's thread still holds may go at any time
        lines = Path("/proc/self/maps").read_text().splitlines()
        return sum(str(store.path) in line and "g0.extents" in line for line in lines)

    gc.collect()
    before = maps()
    opened = Store.open(store.path)
    rows = opened.shards[0].extents.column("rows")
    opened.bucket(BUCKET).read(np.arange(35), "latent")
    assert maps() == before + 1  # that in the range over all shards is the shard's own
    del opened
    gc.collect()
    assert rows.sum() > 0  # a view outlives its file object
    assert maps() == before + 1
    del rows
    gc.collect()
    assert maps() == before


# A shard that is gone or cut short is seen before any work: by pack, by `store info`, and when a loader opens the store.

PARTS = ("lmdb", "extents", "index")


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """A folder with photos and their store."""
    folder = tmp_path_factory.mktemp("lost")
    write_images(folder / "photos", 10)
    call("ingest", "pack", folder / "photos", folder / "s", "--model", model, *SMALL).done()
    return folder


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("damage", [Path.unlink, cut])
def test_pack_refuses_a_store_that_lost_a_file_before_it_does_anything(
    packed: Path, tmp_path: Path, model: Path, part: str, damage: Callable[[Path], None]
) -> None:
    shutil.copytree(packed / "s", tmp_path / "s")
    (path,) = (tmp_path / "s" / "shards").glob(f"*.{part}")
    damage(path)
    before = tree(tmp_path / "s")
    ran = call("ingest", "pack", packed / "photos", tmp_path / "s", "--model", model, *SMALL)
    assert (ran.code, ran.out) == (1, "")
    (line,) = ran.err.splitlines()
    assert f"{tmp_path / 's'} has lost files of 1 shard with 10 samples: shard {path.stem} (10 samples): {path.name} " in line
    assert f"run `store repair {tmp_path / 's'}`" in line
    assert tree(tmp_path / "s") == before


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("damage", [Path.unlink, cut])
def test_info_names_what_is_lost_and_ends_with_one(
    store: Store, tmp_path: Path, part: str, damage: Callable[[Path], None]
) -> None:
    shutil.copytree(store.path, tmp_path / "s")
    path = tmp_path / "s" / "shards" / f"g1.{part}"
    expected = path.stat().st_size
    damage(path)
    ran = call("store", "info", tmp_path / "s", "--json")
    assert ran.code == 1
    how = f"has {expected // 2} bytes instead of {expected}" if path.exists() else "is missing"
    lost = f"{path.name} {how}"
    assert ran.json["lost_shards"] == [{"shard": "g1", "samples": 14, "files": [lost]}]
    assert ran.json["samples"] == 53
    ran = call("store", "info", tmp_path / "s")
    assert ran.code == 1
    assert "53 samples" in ran.out
    assert f"shard g1 (14 samples): {path.name} " in ran.err
    assert f"`store repair {tmp_path / 's'}`" in ran.err


def test_a_store_that_lost_nothing_is_said_to_have_lost_nothing(store: Store) -> None:
    ran = call("store", "info", store.path, "--json")
    assert (ran.code, ran.json["lost_shards"]) == (0, [])
    assert lost_shards(LocalFolder(store.path), store.manifest.shards) == ()


def test_a_lost_list_of_dropped_rows_is_seen(tmp_path: Path) -> None:
    samples = samples_of({BUCKET: 9})
    store = make_store(tmp_path, samples, samples[:3])
    (path,) = (tmp_path / "shards").glob("g0.dropped-*")
    path.unlink()
    (lost,) = lost_shards(LocalFolder(tmp_path), store.manifest.shards)
    assert (lost.shard, lost.samples, lost.files) == ("g0", 6, (f"{path.name} is missing",))


def test_many_lost_shards_are_counted_and_the_first_are_named(tmp_path: Path) -> None:
    store = make_store(tmp_path, *(samples_of({BUCKET: 2}, f"{n}/") for n in range(5)))
    for path in (tmp_path / "shards").glob("*.lmdb"):
        path.unlink()
    with pytest.raises(CorruptError, match=r"5 shards with 10 samples: .*g0.*; shard g1.*; shard g2.*, and 2 shards more; "):
        refuse_lost_shards(LocalFolder(tmp_path), store.manifest)


def test_a_file_that_may_not_be_looked_at_is_not_taken_for_a_lost_one(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", samples_of({BUCKET: 2}))
    (tmp_path / "s" / "shards").rename(tmp_path / "moved")
    (tmp_path / "s" / "shards").symlink_to("shards")
    with pytest.raises(StoreError, match=r"cannot look up .*: Too many levels of symbolic links"):
        lost_shards(LocalFolder(tmp_path / "s"), store.manifest.shards)


@pytest.mark.parametrize("damage", [Path.unlink, cut])
def test_a_loader_refuses_to_open_what_it_could_not_read_to_the_end(
    store: Store, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    shutil.copytree(store.path, tmp_path / "s")
    damage(tmp_path / "s" / "shards" / "g1.lmdb")
    with pytest.raises(CorruptError, match=r"has lost files of 1 shard with 14 samples: .*store repair"):
        Loader(tmp_path / "s", LoaderConfig(batch_size=2))
    assert call("loader", "plan", tmp_path / "s", "--batch", 2).code == 1


def test_an_older_generation_that_cannot_be_read_is_said_to_be_old(tmp_path: Path) -> None:
    make_store(tmp_path, samples_of({BUCKET: 2}, "a/"), samples_of({BUCKET: 2}, "b/"))
    (tmp_path / "shards" / "g0.lmdb").unlink()
    with pytest.raises(CorruptError, match="generation 1 cannot be read completely; restore the files, or open generation 2"):
        refuse_lost_shards(LocalFolder(tmp_path), Store.open(tmp_path, 1).manifest)
