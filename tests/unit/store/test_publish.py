"""Sealing, adopting, publishing: what is there afterwards, what was superseded, what an interruption leaves."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from bucketline.errors import CorruptError, LockedError, StoreError
from bucketline.store import BlockSpec, Store
from bucketline.store.digests import sample_digest
from bucketline.store.locks import FileLock
from bucketline.store.manifest import bucket_entry
from bucketline.store.publish import adopt, lock_store, prepare_store, publish
from bucketline.store.seal import seal
from bucketline.store.verify import verify
from tests.building import (
    Sample,
    add,
    empty_store,
    make_sample,
    make_store,
    open_writer,
    samples_of,
    spec_of,
    tree,
    write_shard,
)

if TYPE_CHECKING:
    from pathlib import Path

BUCKET = "train/64x64"


def ids_of(store: Store) -> list[str]:
    return [i for bucket in store.buckets() for i in bucket.sample_ids(np.arange(bucket.num_rows))]


def clean(store: Store) -> bool:
    return verify(store, lambda _: None).corrupt == ()


def test_a_shard_without_samples_is_removed_not_published(tmp_path: Path) -> None:
    empty_store(tmp_path)
    writer = open_writer(tmp_path, "a")
    writer.commit()
    writer.close()
    assert not seal(tmp_path, "a")
    assert tree(tmp_path / "shards") == {}
    assert tree(tmp_path / "pending") == {}


def test_what_was_not_committed_is_not_in_the_shard(tmp_path: Path) -> None:
    manifest = empty_store(tmp_path)
    writer = open_writer(tmp_path, "a")
    add(writer, make_sample("one.png", BUCKET))
    writer.commit()
    add(writer, make_sample("two.png", BUCKET))
    writer.close()
    seal(tmp_path, "a")
    with lock_store(tmp_path):
        publish(tmp_path, manifest, ["a"], [])
    assert ids_of(Store.open(tmp_path)) == ["one.png"]


def test_the_next_run_adopts_a_pending_shard(tmp_path: Path) -> None:
    manifest = empty_store(tmp_path)
    writer = open_writer(tmp_path, "a")
    for sample in samples_of({BUCKET: 5}):
        add(writer, sample)
    writer.commit()
    writer._env.close()  # as a killed process leaves it: no seal, and the lock's file still there
    writer._lock.release()
    with lock_store(tmp_path):
        assert adopt(tmp_path, manifest) == ["a"]
        publish(tmp_path, manifest, ["a"], [])
        assert adopt(tmp_path, Store.open(tmp_path).manifest) == []
    store = Store.open(tmp_path)
    assert ids_of(store) == [sample.id for sample in samples_of({BUCKET: 5})]
    assert clean(store)
    assert [name for name in tree(tmp_path / "pending") if name != "writer.lock"] == []


def test_a_pending_shard_whose_writer_is_at_work_is_not_adopted_and_the_writer_is_named(tmp_path: Path) -> None:
    """A rank of a run whose rank 0, which held the store's lock, is gone."""
    manifest = empty_store(tmp_path)
    writer = open_writer(tmp_path, "a")
    add(writer, make_sample("one.png", BUCKET))
    writer.commit()
    with lock_store(tmp_path), pytest.raises(LockedError, match=rf'is being written by .*"pid": {os.getpid()},.*wait until'):
        adopt(tmp_path, manifest)
    add(writer, make_sample("two.png", BUCKET))
    writer.seal()
    with lock_store(tmp_path):
        publish(tmp_path, manifest, adopt(tmp_path, manifest), [])
    assert sorted(ids_of(Store.open(tmp_path))) == ["one.png", "two.png"]


def test_a_pending_shard_that_was_only_just_begun_is_not_removed_under_its_writer(tmp_path: Path) -> None:
    manifest = empty_store(tmp_path)
    path = tmp_path / "pending" / "a.lmdb"
    with FileLock(path.with_suffix(".lock")):
        path.touch()
        with pytest.raises(LockedError):
            adopt(tmp_path, manifest)
    assert path.exists()
    assert adopt(tmp_path, manifest) == []
    assert tree(tmp_path / "pending") == {}


def test_the_next_run_adopts_a_shard_that_was_moved_and_not_listed(tmp_path: Path) -> None:
    manifest = empty_store(tmp_path)
    write_shard(tmp_path, "a", samples_of({BUCKET: 5}))
    with lock_store(tmp_path):
        assert adopt(tmp_path, manifest) == ["a"]


def test_a_pending_shard_that_is_no_lmdb_file_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    manifest = empty_store(tmp_path)
    (tmp_path / "pending" / "a.lmdb").write_bytes(b"nonsense" * 1024)
    with pytest.raises(StoreError, match=r"a.lmdb, left by an interrupted run, cannot be sealed: .*move that file away"):
        adopt(tmp_path, manifest)
    assert (tmp_path / "pending" / "a.lmdb").exists()


def test_a_sample_that_is_packed_again_supersedes_its_older_row(tmp_path: Path) -> None:
    first = samples_of({BUCKET: 9, "train/96x64": 2})
    changed = [make_sample(first[2].id, BUCKET, ("new",), version=1), make_sample(first[4].id, "train/96x64", version=1)]
    store = make_store(tmp_path, first, changed)
    assert sorted(ids_of(store)) == sorted(sample.id for sample in first)
    assert {bucket.name: bucket.num_rows for bucket in store.buckets()} == {BUCKET: 8, "train/96x64": 3}
    shard, record = store.sample(first[2].id)
    assert (shard.name, record.captions) == ("g1", ("new",))
    assert store.sample(first[4].id)[1].bucket == "train/96x64"
    bucket = store.bucket(BUCKET)
    row = ids_of(store).index(first[2].id)
    assert np.array_equal(bucket.read(np.array([row]), "latent")[0], changed[0].latent)
    assert clean(store)
    old = Store.open(tmp_path, 1)
    assert ids_of(old) == [sample.id for sample in first]
    assert old.sample(first[2].id)[1].captions == first[2].captions


def test_a_sample_superseded_again_and_again_is_there_once(tmp_path: Path) -> None:
    store = make_store(tmp_path, *([make_sample("a.png", BUCKET, version=n)] for n in range(4)))
    assert ids_of(store) == ["a.png"]
    assert store.sample("a.png")[0].name == "g3"
    assert clean(store)


def test_dropped_samples_are_gone_and_their_payload_with_them(tmp_path: Path) -> None:
    samples = samples_of({BUCKET: 12})
    store = make_store(tmp_path, samples)
    gone = [samples[n].id for n in (0, 5, 6, 11)]
    with lock_store(tmp_path):
        manifest = publish(tmp_path, store.manifest, [], [sample_digest(i) for i in [*gone, "never there"]])
    after = Store(tmp_path, manifest)
    assert ids_of(after) == [sample.id for sample in samples if sample.id not in gone]
    spec = after.bucket(BUCKET).spec
    entries = [store.shards[0].find(sample_digest(i)) for i in gone]
    records = sum(entry.record_bytes for entry in entries if entry is not None)
    assert store.manifest.payload_bytes - manifest.payload_bytes == 4 * spec.row_bytes + records
    with pytest.raises(StoreError, match="has no sample"):
        after.sample(gone[0])
    assert after.sample(samples[1].id)
    assert clean(after)
    with lock_store(tmp_path):
        again = publish(tmp_path, manifest, [], [sample_digest(gone[0])])
    assert again is manifest


def test_publishing_nothing_new_writes_nothing(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples_of({BUCKET: 3}))
    before = tree(tmp_path)
    with lock_store(tmp_path):
        assert publish(tmp_path, store.manifest, [], []) is store.manifest
    assert tree(tmp_path) == before


def test_a_shard_with_other_columns_is_refused(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples_of({BUCKET: 3}))
    write_shard(tmp_path, "other", [make_sample("x.png", BUCKET, dtype="F32")], dtype="F32")
    with lock_store(tmp_path), pytest.raises(StoreError, match=f"shard other has other columns in {BUCKET}"):
        publish(tmp_path, store.manifest, ["other"], [])


def test_a_sample_twice_in_one_shard_is_refused(tmp_path: Path) -> None:
    empty_store(tmp_path)
    writer = open_writer(tmp_path, "a")
    add(writer, make_sample("a.png", BUCKET))
    writer.commit()
    add(writer, make_sample("a.png", BUCKET))
    with pytest.raises(StoreError, match=r"sample 'a.png' is in shard a twice; ids must be unique"):
        writer.commit()
    writer.close()


def test_rows_are_numbered_over_blocks_and_buckets_as_they_came(tmp_path: Path) -> None:
    mixed: list[Sample] = []
    for pair in zip(samples_of({BUCKET: 20}), samples_of({"train/96x64": 20}), strict=True):
        mixed += pair
    store = make_store(tmp_path, mixed)
    assert [group.blocks for group in store.shards[0].entry.groups.values() if group.rows == 20] == [6, 6]
    assert ids_of(store) == [f"{name}/{n}.png" for name in (BUCKET, "train/96x64") for n in range(20)]


def test_a_full_disk_is_an_error_that_says_so_and_keeps_what_was_committed(tmp_path: Path) -> None:
    empty_store(tmp_path)
    writer = open_writer(tmp_path, "a")
    add(writer, make_sample("a.png", BUCKET))
    writer.commit()
    writer._env.set_mapsize(1 << 16)  # what the file system would do, by LMDB's own means
    for n in range(200):
        add(writer, make_sample(f"{n}.png", BUCKET))
    with pytest.raises(StoreError, match=r"pending/a.lmdb cannot be written: .*MDB_MAP_FULL"):
        writer.commit()
    writer.close()
    assert seal(tmp_path, "a")


def test_a_store_at_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s").write_bytes(b"")
    with pytest.raises(StoreError, match="cannot be made a store"):
        prepare_store(tmp_path / "s")


@pytest.mark.parametrize("name", ["train", "train/64", "test/64x64", "train/064x64", "train/64x0", "../../64x64", "text"])
def test_a_bucket_without_a_proper_name_never_reaches_a_manifest(name: str) -> None:
    with pytest.raises(StoreError, match=r"is no bucket name; expected something like 'train/256x192'"):
        bucket_entry(BlockSpec(bucket=name, columns=spec_of(BUCKET).columns))


def test_a_manifest_that_lists_a_bucket_twice_is_never_made(tmp_path: Path) -> None:
    manifest = make_store(tmp_path, samples_of({BUCKET: 1})).manifest
    with pytest.raises(ValueError, match="listed twice"):
        replace(manifest, buckets=manifest.buckets * 2)


def test_a_truncated_pending_shard_never_takes_the_run_with_it(tmp_path: Path) -> None:
    manifest = empty_store(tmp_path)
    writer = open_writer(tmp_path, "a")
    for sample in samples_of({BUCKET: 200}):
        add(writer, sample)
    writer.commit()
    writer.close()
    path = tmp_path / "pending" / "a.lmdb"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises((StoreError, CorruptError), match="cannot be sealed"):
        adopt(tmp_path, manifest)
