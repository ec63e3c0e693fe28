from __future__ import annotations

from pathlib import Path

import pytest

from bucketline.errors import CorruptError
from bucketline.ingest.pipeline.packed_index import PackedIndex
from bucketline.store import Store
from bucketline.store.change.drop import drop
from bucketline.store.format.hashing import sample_digest
from bucketline.store.format.sample_record import captions_checksum
from tests.kit import flip_bit, make_sample, make_store, samples_of

BUCKETS = {"train/64x64": 9, "val/64x64": 3, "train/64x96": 5}


def test_what_is_found_is_what_a_look_up_shard_by_shard_finds(tmp_path: Path) -> None:
    first, second = samples_of(BUCKETS), samples_of({"train/64x96": 4, "train/32x32": 6}, "new/")
    again = [make_sample(sample.id, "train/32x32", ("changed",), version=1) for sample in first[::4]]
    store = make_store(tmp_path / "s", first, second, again)  # the last shard supersedes rows of the first
    gone = [second[0].id, first[1].id, again[0].id]
    drop(store.path, gone)
    store = Store.open(store.path)
    known = PackedIndex(store)
    ids = {sample.id for sample in (*first, *second)}
    for sample_id in (*ids, "never packed"):
        digest = sample_digest(sample_id)
        entry = next((found for shard in store.shards if (found := shard.find(digest)) is not None), None)
        sample = known.find(sample_id)
        assert (sample is None) == (entry is None), sample_id
        if entry is not None and sample is not None:
            named = (sample.source_bytes, sample.source_mtime_ns, sample.captions, sample.content)
            assert named == (entry.source_bytes, entry.source_mtime_ns, entry.captions, entry.content)
    assert {sample_id for sample_id in ids if known.find(sample_id)} == ids - set(gone)
    changed = known.find(again[1].id)
    assert changed is not None
    assert (changed.content, changed.captions) == (again[1].record.content, captions_checksum(("changed",)))


def test_a_store_without_a_sample_has_none(tmp_path: Path) -> None:
    assert PackedIndex(make_store(tmp_path / "s")).find("a.png") is None
    store = make_store(tmp_path / "t", samples_of({"train/64x64": 2}))
    drop(store.path, [sample.id for sample in samples_of({"train/64x64": 2})])
    assert PackedIndex(Store.open(store.path)).find("train/64x64/0.png") is None


def test_a_damaged_index_is_an_error_before_anything_is_packed(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", samples_of(BUCKETS))
    index = store.shards[0].paths.index
    flip_bit(index, 8 * (index.stat().st_size - 9))
    with pytest.raises(CorruptError):
        PackedIndex(Store.open(store.path))
