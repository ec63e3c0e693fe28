"""The positions of rows in a shard's sidecars: damage is seen when a value is used, and another shard's file is refused."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucketline.errors import CorruptError, StoreError
from bucketline.loader import Loader, LoaderConfig
from bucketline.store import Store
from bucketline.store.change.drop import drop
from bucketline.store.change.merge import merge
from bucketline.store.format.hashing import bytes_digest
from bucketline.store.format.layout import shard_paths
from bucketline.store.format.manifest import DroppedEntry, ShardEntry, read_manifest
from bucketline.store.shard.row_locator import DROPPED_FORMAT, BlockTable, _first_false
from bucketline.store.shard.sidecar import PAGE_BYTES, PagedFile, encode_paged
from tests.kit import flip_bit, ids_of, make_store, replace_file, samples_of

KIND = "bucketline.test/1"
LARGE = np.arange(3000, dtype="<u8") * 7
SMALL = np.arange(999 * 3, dtype="u1").reshape(999, 3)


def written(path: Path) -> Path:
    data = encode_paged([("large", "U64", LARGE), ("small", "U8", SMALL)], {"format": KIND, "groups": {"a": 1}})
    path.write_bytes(data)
    return path


def opened(path: Path) -> PagedFile:
    return PagedFile(path, path.stat().st_size, KIND)


def body_bytes() -> int:
    return LARGE.nbytes + SMALL.nbytes


def test_what_was_written_is_read_entry_by_entry_and_in_ranges(tmp_path: Path) -> None:
    file = opened(written(tmp_path / "x"))
    assert file.metadata == {"format": KIND, "groups": {"a": 1}}
    at = np.array([2999, 0, 511, 512, 512, 1500])
    assert np.array_equal(file.take("large", at), LARGE[at])
    assert np.array_equal(file.take("small", at % 999), SMALL[at % 999])
    assert np.array_equal(file.slice("small", 900, 999), SMALL[900:])
    assert len(file.take("large", np.array([], dtype=np.int64))) == 0
    assert len(file.slice("large", 5, 5)) == 0


@pytest.mark.parametrize("page", range(-(-body_bytes() // PAGE_BYTES)))
def test_a_damaged_page_is_noticed_at_its_first_touch_and_no_other_page_is_blamed(tmp_path: Path, page: int) -> None:
    path = written(tmp_path / "x")
    flip_bit(path, 8 * (path.stat().st_size - (body_bytes() - page * PAGE_BYTES - 5)))
    file = opened(path)
    for at in range(0, 3000, 50):
        touched = at * 8 // PAGE_BYTES
        if touched == page:
            with pytest.raises(CorruptError, match=rf"x: page {page} does not match its checksum; run `store verify`"):
                file.take("large", np.array([at]))
        else:
            assert file.take("large", np.array([at]))[0] == LARGE[at]


def test_an_entry_that_lies_across_two_pages_has_both_compared(tmp_path: Path) -> None:
    values = np.arange(4096, dtype="u1").repeat(3).reshape(4096, 3)  # entry 1365 spans bytes 4095 to 4097
    path = tmp_path / "x"
    path.write_bytes(encode_paged([("values", "U8", values)], {"format": KIND}))
    flip_bit(path, 8 * (path.stat().st_size - (values.nbytes - PAGE_BYTES - 9)))
    with pytest.raises(CorruptError, match=r"page 1"):
        opened(path).take("values", np.array([1365]))


def test_a_damaged_page_checksum_is_noticed_too(tmp_path: Path) -> None:
    path = written(tmp_path / "x")
    flip_bit(path, 8 * (path.stat().st_size - (body_bytes() + 1)))
    last = len(LARGE) - 1
    assert opened(path).take("large", np.array([0]))[0] == 0
    assert opened(path).take("large", np.array([last]))[0] == LARGE[last]
    with pytest.raises(CorruptError, match=r"does not match its checksum"):
        opened(path).slice("small", 0, 999)


def test_opening_compares_no_page_but_the_length(tmp_path: Path) -> None:
    path = written(tmp_path / "x")
    flip_bit(path, 8 * (path.stat().st_size - 1))
    assert opened(path).metadata["groups"] == {"a": 1}
    with pytest.raises(CorruptError, match=r"has \d+ bytes, the manifest says 17"):
        PagedFile(path, 17, KIND)
    with pytest.raises(StoreError, match=r"nothing is missing, the manifest lists it; restore it"):
        PagedFile(tmp_path / "nothing", 1, KIND)
    with pytest.raises(CorruptError, match=r"is not a bucketline.index/1 file"):
        PagedFile(path, path.stat().st_size, "bucketline.index/1")
    with pytest.raises(CorruptError, match=r"lacks the tensor 'middle'"):
        opened(path).take("middle", np.array([0]))


@pytest.mark.parametrize("content", [b"", b"x", b"\x02\0\0\0\0\0\0\0{}", bytes(1000)])
def test_a_file_that_is_none_of_ours_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(CorruptError):
        opened(path)


BUCKET = "train/64x64"


@given(lists=st.lists(st.lists(st.integers(-5, 5), max_size=40), min_size=1, max_size=5), wanted=st.integers(-6, 6))
def test_the_search_finds_in_each_sequence_what_counting_finds(lists: list[list[int]], wanted: int) -> None:
    ordered = [sorted(values) for values in lists]
    padded = np.array([values + [99] * (41 - len(values)) for values in ordered])
    count = np.array([len(values) for values in ordered])
    found = _first_false(lambda at: padded[np.arange(len(padded)), at] <= wanted, count)
    assert found.tolist() == [sum(value <= wanted for value in values) for values in ordered]


def with_dropped(store: Store, generation: int, rows: list[int]) -> ShardEntry:
    """Return the first shard's entry as it would be without some rows, their list written next to it."""
    entry = store.shards[0].entry
    listed = {BUCKET: {"first": 0, "count": len(rows)}}
    about = {"format": DROPPED_FORMAT, "groups": listed, "shard_id": entry.shard_id}
    data = encode_paged([("rows", "U32", np.array(rows, "<u4"))], about)
    shard_paths(store.path, entry.name).dropped(generation).write_bytes(data)
    groups = {**entry.groups, BUCKET: entry.groups[BUCKET]._replace(dropped=len(rows))}
    dropped = DroppedEntry(generation=generation, num_bytes=len(data), digest=bytes_digest(data))
    return replace(entry, groups=groups, dropped=dropped)


@given(data=st.data())
def test_the_nth_live_row_is_the_one_that_counting_finds(store: Store, data: st.DataObject) -> None:
    total = store.shards[0].entry.groups[BUCKET].rows
    dropped = sorted(data.draw(st.sets(st.integers(0, total - 1), max_size=total)))
    live = [row for row in range(total) if row not in dropped]
    entry = with_dropped(store, 7, dropped) if dropped else store.shards[0].entry
    table = BlockTable([entry, entry], [store.shards[0].paths] * 2)
    ranks = np.arange(len(live))
    assert table.live_rows(BUCKET, ranks % 2, ranks).tolist() == live
    store.shards[0].paths.dropped(7).unlink(missing_ok=True)


def test_rows_of_many_shards_are_found_as_they_are_one_by_one(store: Store) -> None:
    rows = np.random.default_rng(0).permutation(35)
    bucket = store.bucket(BUCKET)
    together = bucket.locate(rows)
    for n, row in enumerate(rows):
        alone = Store.open(store.path).bucket(BUCKET).locate(np.array([row]))
        for field in ("shard", "row", "data", "rows", "row_in_block"):
            assert getattr(together, field)[n] == getattr(alone, field)[0]
    part = together.part(3, 9)
    assert part.row.tolist() == together.row[3:9].tolist()
    assert part.bucket == BUCKET


def test_damage_of_a_list_of_dropped_rows_is_noticed_when_it_is_used(tmp_path: Path) -> None:
    samples = samples_of({BUCKET: 30})
    store = make_store(tmp_path, samples)
    done = drop(tmp_path, [sample.id for sample in samples[5:9]])
    path = store.shards[0].paths.dropped(done.generation)
    flip_bit(path, 8 * path.stat().st_size - 5)
    with pytest.raises(CorruptError, match=r"dropped-2 is not the file that the manifest lists"):
        Store.open(tmp_path).bucket(BUCKET).locate(np.arange(3))


@pytest.mark.parametrize("kind", ["lmdb", "index", "extents"])
def test_a_file_of_another_store_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    for name in ("a", "b"):
        make_store(tmp_path / name, samples_of({BUCKET: 9}))
    theirs, ours = (tmp_path / name / "shards" / f"g0.{kind}" for name in ("b", "a"))
    assert theirs.stat().st_size == ours.stat().st_size
    ours.write_bytes(theirs.read_bytes())
    bucket = Store.open(tmp_path / "a").bucket(BUCKET)
    with pytest.raises(CorruptError, match=rf"g0.{kind} belongs to another shard: it has the id .* restore the file"):
        bucket.sample_ids(np.array([0]))


def test_extents_that_list_fewer_blocks_than_the_manifest_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples_of({BUCKET: 40}))
    shard = store.shards[0]
    tensors = [(name, "U64", shard.extents.column(name)[:2]) for name in ("offset", "length", "first_row", "rows")]
    short = encode_paged(tensors, {**shard.extents.metadata, "padding": "x" * 1000})
    num_bytes = shard.entry.extents.num_bytes
    shard.paths.extents.write_bytes(short[:num_bytes].ljust(num_bytes, b"\0"))
    with pytest.raises((CorruptError, StoreError)):
        Store.open(tmp_path).bucket(BUCKET).locate(np.array([0]))


IDS = [sample.id for sample in samples_of({BUCKET: 6})]


def list_of(store: Path) -> Path:
    (path,) = (store / "shards").glob("*.dropped-*")
    return path


def metadata_of(store: Path) -> dict[str, object]:
    path = list_of(store)
    return PagedFile(path, path.stat().st_size, DROPPED_FORMAT).metadata


def test_the_list_of_another_copy_is_refused_before_a_dropped_sample_is_given_out(tmp_path: Path) -> None:
    one, other = make_store(tmp_path / "one", samples_of({BUCKET: 6})).path, tmp_path / "other"
    shutil.copytree(one, other)
    drop(one, [IDS[1]])
    drop(other, [IDS[4]])
    assert list_of(one).stat().st_size == list_of(other).stat().st_size
    shutil.copy(list_of(other), list_of(one))
    with Loader(one, LoaderConfig(batch_size=1, verify=True)) as loader, pytest.raises(CorruptError, match="dropped-2 is not"):
        next(loader.forever())
    with pytest.raises(CorruptError, match=r"dropped-2 is not the file that the manifest lists.*restore the file"):
        ids_of(one)


def test_a_list_names_its_shard_and_another_shards_is_refused_whatever_the_manifest_says(tmp_path: Path) -> None:
    one = make_store(tmp_path / "one", samples_of({BUCKET: 6})).path
    drop(one, [IDS[1]])
    assert metadata_of(one)["shard_id"] == read_manifest(one).shards[0].shard_id
    other = make_store(tmp_path / "other", samples_of({BUCKET: 6})).path
    drop(other, [IDS[4]])
    replace_file(one, "dropped", list_of(other).read_bytes())
    with pytest.raises(CorruptError, match="belongs to another shard"):
        ids_of(one)


def test_a_merged_stores_list_names_its_shard(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", samples_of({BUCKET: 6})).path
    drop(store, [IDS[1]])
    merge(tmp_path / "merged", [store])
    assert metadata_of(tmp_path / "merged")["shard_id"] == read_manifest(store).shards[0].shard_id
    assert ids_of(tmp_path / "merged") == ids_of(store)
