"""Sealing, adopting, publishing: what is there afterwards, what was superseded, what an interruption leaves."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lmdb
import numpy as np
import pytest
from numpy.typing import NDArray

from bucketline.errors import LockedError, StoreError
from bucketline.files.locks import FileLock
from bucketline.store import BlockSpec, Store
from bucketline.store.format.hashing import caption_digest, sample_digest
from bucketline.store.format.schema import bucket_entry
from bucketline.store.format.text_block import TEXT_GROUP, make_caption
from bucketline.store.shard.reader import SealedShard
from bucketline.store.verify.verify import verify
from bucketline.store.write import shard_writer
from bucketline.store.write.publish import adopt, lock_store, prepare_store, publish
from bucketline.store.write.seal import may_have_commits, seal
from bucketline.store.write.shard_writer import ShardWriter
from tests.kit import (
    TEXT,
    Sample,
    add,
    caption_of,
    embedding,
    empty_store,
    make_sample,
    make_store,
    open_writer,
    samples_of,
    spec_of,
    tree,
    write_shard,
)

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


@pytest.mark.parametrize("moment", ["pending", "sealed"])
def test_the_next_run_adopts_what_was_committed_and_no_more(moment: str, tmp_path: Path) -> None:
    manifest = empty_store(tmp_path)
    if moment == "sealed":  # moved, and not listed
        write_shard(tmp_path, "a", samples_of({BUCKET: 5}))
    else:
        writer = open_writer(tmp_path, "a")
        for sample in samples_of({BUCKET: 5}):
            add(writer, sample)
        writer.commit()
        add(writer, make_sample("two.png", BUCKET))
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


@pytest.mark.parametrize("damage", ["not LMDB's", "half", "its head"])
def test_a_damaged_pending_shard_is_named_with_what_to_do_and_stays(damage: str, tmp_path: Path) -> None:
    manifest = empty_store(tmp_path)
    pending = write_pending(tmp_path, "a", samples_of({BUCKET: 200}))
    data = pending.read_bytes()
    pending.write_bytes(
        {"not LMDB's": b"nonsense" * 2048, "half": data[: len(data) // 2], "its head": bytes(256) + data[256:]}[damage]
    )
    with lock_store(tmp_path), pytest.raises(StoreError, match=r"a\.lmdb.*cannot be sealed: .*move that file elsewhere"):
        adopt(tmp_path, manifest)
    assert pending.exists()


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


def test_a_disk_that_fails_is_an_error_that_says_so_and_keeps_what_was_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = empty_store(tmp_path)
    writer = open_writer(tmp_path, "a")
    add(writer, make_sample("a.png", BUCKET))
    writer.commit()

    def fail(*_: object) -> None:
        raise lmdb.DiskError("mdb_txn_commit: No space left on device")

    monkeypatch.setattr(shard_writer, "_put_block", fail)
    for n in range(200):
        add(writer, make_sample(f"{n}.png", BUCKET))
    with pytest.raises(StoreError, match=r"pending/a.lmdb cannot be written: .*; the disk is full .* make room"):
        writer.commit()
    writer.close()
    assert seal(tmp_path, "a")
    publish(tmp_path, manifest, ["a"], ())
    assert ids_of(Store.open(tmp_path)) == ["a.png"]


def test_a_disk_that_is_too_full_to_seal_a_shard_is_named_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty_store(tmp_path)
    write_pending(tmp_path, "a", samples_of({BUCKET: 2}))

    def fail(*_: object) -> None:
        raise lmdb.Error("mdb_txn_commit: Input/output error")

    monkeypatch.setattr("bucketline.store.write.seal._write_anew", fail)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=5 << 10))
    with pytest.raises(
        StoreError, match=r"a\.lmdb cannot be sealed: .*; the disk is full \(5 KiB are free\): make room and rerun"
    ):
        seal(tmp_path, "a")


@pytest.mark.parametrize("num_bytes", [1 << 10, 1 << 20])
def test_a_shard_takes_whatever_is_written_to_it_however_long_the_captions_beside_its_rows(
    num_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_writer, "SPARE_MAP_BYTES", 0)
    manifest = empty_store(tmp_path)
    writer = ShardWriter(tmp_path, "a", manifest.groups, {TEXT_GROUP: caption_of("")}, 1 << 17)  # 256 KiB of addresses
    samples = [make_sample(f"{n}.png", "train/8x8", (f"{n} " * (num_bytes // 2),)) for n in range(20)]
    for sample in samples:
        text = sample.captions[0]
        writer.add_caption({TEXT_GROUP: make_caption(TEXT, caption_digest(text), {"tokens": embedding(text[:8])}, {})})
        writer.add(
            spec=spec_of(sample.bucket),
            latents={"latent": sample.latent},
            record=sample.record,
            captions=[caption_digest(text)],
        )
    assert writer.seal()
    with lock_store(tmp_path):
        publish(tmp_path, manifest, ["a"], ())
    store = Store.open(tmp_path)
    assert [store.sample(sample.id)[1].captions for sample in samples] == [sample.captions for sample in samples]
    assert clean(store)


def test_a_store_at_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s").write_bytes(b"")
    with pytest.raises(StoreError, match=r"cannot make .* a store"):
        prepare_store(tmp_path / "s")


@pytest.mark.parametrize("name", ["train", "train/64", "test/64x64", "train/064x64", "train/64x0", "../../64x64", "text"])
def test_a_bucket_without_a_proper_name_never_reaches_a_manifest(name: str) -> None:
    with pytest.raises(StoreError, match=r"is not a bucket name; expected something like 'train/256x192'"):
        bucket_entry(BlockSpec(bucket=name, columns=spec_of(BUCKET).columns))


def test_a_manifest_that_lists_a_bucket_twice_is_never_made(tmp_path: Path) -> None:
    manifest = make_store(tmp_path, samples_of({BUCKET: 1})).manifest
    with pytest.raises(ValueError, match="listed twice"):
        replace(manifest, buckets=manifest.buckets * 2)


@pytest.mark.parametrize(
    "change",
    [{"source_mtime_ns": 1 << 63}, {"source_mtime_ns": -1}, {"source_bytes": -1}, {"source_bytes": 1 << 64}, {"content": b""}],
)
def test_a_writer_refuses_a_record_that_could_not_be_sealed(change: dict[str, object], tmp_path: Path) -> None:
    manifest = empty_store(tmp_path)
    good, bad = samples_of({BUCKET: 2})
    writer = open_writer(tmp_path, "a")
    add(writer, good)
    with pytest.raises(StoreError, match=rf"sample '{bad.id}'.* {next(iter(change))}"):
        add(writer, replace(bad, record=replace(bad.record, **change)))  # type: ignore[arg-type]
    assert writer.seal()
    with lock_store(tmp_path):
        publish(tmp_path, manifest, ["a"], ())
    assert ids_of(Store.open(tmp_path)) == [good.id]


def write_pending(store: Path, name: str, samples: list[Sample]) -> Path:
    """Leave a pending shard as a run that was killed after a commit leaves it."""
    writer = open_writer(store, name)
    for sample in samples:
        add(writer, sample)
    writer.commit()
    writer.close()
    return writer.path


@pytest.mark.parametrize("page_bytes", [1 << 14, 1 << 16])
def test_a_small_pending_shard_is_adopted_on_a_machine_of_larger_pages(
    page_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mmap

    manifest = empty_store(tmp_path)
    (sample,) = samples_of({"train/8x8": 1})
    pending = write_pending(tmp_path, "a", [sample])
    assert pending.stat().st_size < 2 << 16
    monkeypatch.setattr(mmap, "PAGESIZE", page_bytes)
    with lock_store(tmp_path):
        assert adopt(tmp_path, manifest) == ["a"]
        publish(tmp_path, manifest, ["a"], ())
    assert ids_of(Store.open(tmp_path)) == [sample.id]


@pytest.mark.parametrize("left", [*(slice(n) for n in (0, 1, 100, 4096, 8191, 8192)), "zeros"])
def test_a_pending_shard_that_ends_before_its_first_commit_is_removed(left: slice | str, tmp_path: Path) -> None:
    """A power failure may leave only a length: zeros."""
    manifest = empty_store(tmp_path)
    pending = write_pending(tmp_path, "a", samples_of({"train/8x8": 1}))
    pending.write_bytes(pending.read_bytes()[left] if isinstance(left, slice) else bytes(1 << 14))
    with lock_store(tmp_path):
        assert adopt(tmp_path, manifest) == []
    assert not pending.exists()


def test_the_first_pages_of_a_pending_shard_are_synced_before_any_other_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a power failure may keep a later page and lose them: a file that cannot be sealed."""
    synced: list[int] = []
    opened = lmdb.open

    class Environment:
        def __init__(self, path: str, **options: Any) -> None:
            self._env, self._path = opened(path, **options), path

        def sync(self, force: bool) -> None:  # noqa: FBT001 - as LMDB's
            assert force
            synced.append(tmp_path.joinpath(self._path).stat().st_size)
            self._env.sync(force)

        def begin(self, **options: Any) -> Any:
            assert synced == [2 * os.sysconf("SC_PAGE_SIZE")]
            return self._env.begin(**options)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._env, name)

    monkeypatch.setattr("lmdb.open", Environment)
    empty_store(tmp_path)
    write_pending(tmp_path, "a", samples_of({"train/8x8": 1}))
    assert synced


@pytest.mark.parametrize(("page_bytes", "num_bytes", "expected"), [(1 << 15, 1 << 16, False), (1 << 15, (1 << 16) + 1, True)])
def test_how_long_a_shard_without_a_commit_is_follows_from_the_pages_of_its_own_file(
    page_bytes: int, num_bytes: int, *, expected: bool, tmp_path: Path
) -> None:
    """On a machine of 64 KiB pages LMDB takes pages of 32 KiB; here such a file's head is made of one of this machine."""
    empty_store(tmp_path)
    data = bytearray(
        write_pending(tmp_path, "a", samples_of({"train/8x8": 1})).read_bytes().ljust(num_bytes, b"\0")[:num_bytes]
    )
    at = data.index((0xBEEFC0DE).to_bytes(4, "little")) + 24
    assert int.from_bytes(data[at : at + 4], "little") == os.sysconf("SC_PAGE_SIZE")
    data[at : at + 4] = page_bytes.to_bytes(4, "little")
    (tmp_path / "b.lmdb").write_bytes(data)
    assert may_have_commits(tmp_path / "b.lmdb") is expected


def test_what_is_live_after_many_shards_and_drops_is_what_the_last_word_on_each_sample_says(tmp_path: Path) -> None:
    draw = random.Random(5)
    ids = [f"{n}.png" for n in range(60)]
    manifest = empty_store(tmp_path)
    live: dict[str, tuple[str, int]] = {}  # id: bucket and version
    version = 0
    for turn in range(8):
        names = [f"t{turn}-{n}" for n in range(draw.randrange(4))]
        for name in names:
            version += 1
            own = draw.sample(ids, draw.choice([1, 3, 30]))
            buckets = {sample_id: draw.choice(["train/64x64", "train/8x16", "val/8x8"]) for sample_id in own}
            write_shard(tmp_path, name, [make_sample(i, bucket, version=version) for i, bucket in buckets.items()])
            live |= {sample_id: (bucket, version) for sample_id, bucket in buckets.items()}
        dropped = draw.sample(ids, draw.choice([0, 2, 40]))
        before = manifest
        manifest = publish(tmp_path, manifest, names, map(sample_digest, dropped))
        assert (manifest == before) == (not names and not set(dropped) & set(live))
        live = {sample_id: found for sample_id, found in live.items() if sample_id not in dropped}
        store = Store(tmp_path, manifest)
        assert sorted(ids_of(store)) == sorted(live)
        for sample_id, (bucket, of) in live.items():
            record = store.sample(sample_id)[1]
            assert (record.bucket, record.content) == (bucket, make_sample(sample_id, bucket, version=of).record.content)
        assert clean(store)


@pytest.mark.parametrize(("old", "new"), [(10, 1), (1, 10)])
def test_publishing_searches_no_more_than_there_is(old: int, new: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It searched every sample of the new shards in every older one."""
    manifest = empty_store(tmp_path)
    for n in range(old + new):
        write_shard(tmp_path, f"s{n:02d}", samples_of({"train/8x8": 4}, f"{n}/"))
    manifest = publish(tmp_path, manifest, [f"s{n:02d}" for n in range(old)], ())
    searched: list[int] = []
    positions, searchsorted = SealedShard.positions, np.searchsorted

    def counting(self: SealedShard, keys: NDArray[np.bytes_]) -> NDArray[np.int64]:
        searched.append(len(keys))
        return positions(self, keys)

    def counting_too(a: Any, v: Any, *more: Any, **named: Any) -> Any:
        searched.append(np.size(v))
        return searchsorted(a, v, *more, **named)

    monkeypatch.setattr(SealedShard, "positions", counting)
    monkeypatch.setattr(np, "searchsorted", counting_too)
    publish(tmp_path, manifest, [f"s{n:02d}" for n in range(old, old + new)], ())
    assert 0 < sum(searched) <= 2 * 4 * (old + new)
    searched.clear()
    assert publish(tmp_path, manifest, (), ()) is manifest
    assert not searched
