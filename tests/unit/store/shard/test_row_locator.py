"""The positions of rows: live rows by rank, blocks by row, over many shards at once; what damage of the sidecars gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucketline.errors import CorruptError, StoreError
from bucketline.store import Store
from bucketline.store.format.hashing import bytes_digest, sample_digest
from bucketline.store.format.layout import shard_paths
from bucketline.store.format.manifest import DroppedEntry, ShardEntry
from bucketline.store.shard.row_locator import DROPPED_FORMAT, BlockTable, _first_false
from bucketline.store.shard.sidecar import encode_paged
from bucketline.store.write.publish import publish
from tests.kit import flip_bit, make_store, samples_of

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
    dropped = [sample_digest(sample.id) for sample in samples[5:9]]
    manifest = publish(tmp_path, store.manifest, [], dropped)
    path = store.shards[0].paths.dropped(manifest.generation)
    flip_bit(path, 8 * path.stat().st_size - 5)
    with pytest.raises(CorruptError, match=r"dropped-2 is not the file that the manifest lists"):
        Store.open(tmp_path).bucket(BUCKET).locate(np.arange(3))


def test_extents_of_another_shard_are_refused_by_name(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_store(tmp_path / name, samples_of({BUCKET: 9}))
    theirs, ours = (tmp_path / name / "shards" / "g0.extents" for name in ("b", "a"))
    assert theirs.stat().st_size == ours.stat().st_size
    ours.write_bytes(theirs.read_bytes())
    with pytest.raises(CorruptError, match=r"g0.extents belongs to another shard: it has the id .* restore the file"):
        Store.open(tmp_path / "a").bucket(BUCKET).locate(np.array([0]))


@pytest.mark.parametrize("kind", ["lmdb", "index"])
def test_a_shard_file_or_index_of_another_store_is_refused_by_name(tmp_path: Path, kind: str) -> None:
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
