"""Sealing, adopting, publishing: what is there afterwards, what was superseded, what an interruption leaves."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lmdb
import numpy as np
import pytest
from numpy.typing import NDArray

from bucketline.errors import StoreError
from bucketline.files.atomic_write import FileLock
from bucketline.store import BlockSpec, Store
from bucketline.store.change.commit import drop
from bucketline.store.change.compact import compact
from bucketline.store.format.block import caption_digest, sample_digest
from bucketline.store.format.manifest import read_manifest, write_manifest
from bucketline.store.format.schema import bucket_entry
from bucketline.store.format.text import TEXT_GROUP, make_caption
from bucketline.store.shard.reader import SealedShard
from bucketline.store.write import seal as sealing
from bucketline.store.write import shard_writer
from bucketline.store.write.publish import (
    LocalTarget,
    adopt,
    changing,
    lock_store,
    prepare_store,
    publish,
)
from bucketline.store.write.seal import RECORDS, may_have_commits, read_contents, refusing, seal
from bucketline.store.write.shard_writer import ShardWriter
from tests.kit import (
    IMAGES,
    TEXT,
    Sample,
    add,
    add_samples,
    caption_of,
    embedding,
    empty_store,
    faults,
    flip_bit,
    ids_of,
    leave_pending,
    make_sample,
    make_store,
    open_writer,
    samples_of,
    spec_of,
    store_writer,
    tree,
    untouched,
    without_locks,
    write_shard,
)

BUCKET = "train/64x64"
FIVE = samples_of({BUCKET: 5})


def adopted(store: Path) -> list[str]:
    """Adopt and publish what was left, as every writer begins; return the ids of all live rows."""
    with changing(store):
        return ids_of(store)


def test_a_shard_without_samples_is_removed_not_published(tmp_path: Path) -> None:
    empty_store(tmp_path)
    writer = open_writer(tmp_path, "a")
    writer.commit()
    writer.close()
    assert not seal(tmp_path, "a")
    assert tree(tmp_path / "shards") == tree(tmp_path / "pending") == {}


@pytest.mark.parametrize("moment", ["pending", "sealed"])
def test_the_next_run_adopts_what_was_committed_and_no_more(moment: str, tmp_path: Path) -> None:
    empty_store(tmp_path)
    if moment == "sealed":  # moved, and not listed
        write_shard(tmp_path, "a", FIVE)
    else:
        writer = open_writer(tmp_path, "a")
        for sample in FIVE:
            add(writer, sample)
        writer.commit()
        add(writer, make_sample("two.png", BUCKET))
        writer._env.close()  # as a killed process leaves it: no seal, and the lock's file still there
        writer._lock.release()
    assert adopted(tmp_path) == adopted(tmp_path) == [sample.id for sample in FIVE]
    assert Store.open(tmp_path).manifest.generation == 1
    assert not faults(tmp_path)
    assert [name for name in tree(tmp_path / "pending") if name != "writer.lock"] == []


def test_a_pending_shard_whose_writer_is_at_work_is_passed_over(tmp_path: Path) -> None:
    empty_store(tmp_path)
    writer = open_writer(tmp_path, "a")
    add(writer, make_sample("one.png", BUCKET))
    writer.commit()
    assert adopted(tmp_path) == []
    add(writer, make_sample("two.png", BUCKET))
    writer.seal()
    assert sorted(adopted(tmp_path)) == ["one.png", "two.png"]


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_pending_shard_that_a_process_has_locked_is_not_touched(tmp_path: Path, *, is_begun: bool) -> None:
    """It was only just begun, or a sealer is still at work."""
    manifest, path = empty_store(tmp_path), tmp_path / "pending" / "a.lmdb"
    with FileLock(path.with_suffix(".lock")):
        path.touch()
    if is_begun:
        path.unlink()
        leave_pending(tmp_path, "a", FIVE)
    with FileLock(path.with_suffix(".lock")):
        assert adopt(tmp_path, manifest) == []
    assert path.exists()
    assert adopt(tmp_path, manifest) == (["a"] if is_begun else [])


@pytest.mark.parametrize("damage", ["not LMDB's", "half", "its head"])
def test_a_damaged_pending_shard_is_named_with_what_to_do_and_stays(damage: str, tmp_path: Path) -> None:
    manifest = empty_store(tmp_path)
    pending = leave_pending(tmp_path, "a", samples_of({BUCKET: 200}))
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
    assert not faults(store)
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
    assert not faults(after)
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
    with pytest.raises(StoreError, match=r"sample 'a.png' is in shard a twice; ids must be unique"):
        add(writer, make_sample("a.png", BUCKET))
    writer.close()


def test_rows_are_numbered_over_blocks_and_buckets_as_they_came(tmp_path: Path) -> None:
    mixed: list[Sample] = []
    for pair in zip(samples_of({BUCKET: 20}), samples_of({"train/96x64": 20}), strict=True):
        mixed += pair
    store = make_store(tmp_path, mixed)
    assert [group.blocks for group in store.shards[0].entry.groups.values() if group.rows == 20] == [6, 6]
    assert ids_of(store) == [f"{name}/{n}.png" for name in (BUCKET, "train/96x64") for n in range(20)]


def test_a_failing_disk_is_an_error_and_keeps_what_was_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty_store(tmp_path)
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
    monkeypatch.undo()
    assert adopted(tmp_path) == ["a.png"]


def test_a_disk_that_is_too_full_to_seal_a_shard_is_named_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty_store(tmp_path)
    leave_pending(tmp_path, "a", samples_of({BUCKET: 2}))

    def fail(*_: object) -> None:
        raise lmdb.Error("mdb_txn_commit: Input/output error")

    monkeypatch.setattr("bucketline.store.write.seal._put_in_order", fail)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=5 << 10))
    with pytest.raises(StoreError, match=r"a\.lmdb cannot be sealed: .*; the disk is full \(5 KiB are free\)"):
        seal(tmp_path, "a")


@pytest.mark.parametrize("num_bytes", [1 << 10, 1 << 20])
def test_a_shard_takes_captions_of_any_length(num_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert not faults(store)


def test_a_store_at_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s").write_bytes(b"")
    with pytest.raises(StoreError, match=r"cannot make .* a store"):
        prepare_store(tmp_path / "s")


@pytest.mark.parametrize("name", ["train", "train/64", "test/64x64", "train/064x64", "train/64x0", "../../64x64", "text"])
def test_a_bucket_without_a_proper_name_never_reaches_a_manifest(name: str) -> None:
    with pytest.raises(StoreError, match=r"is not a bucket name; expected something like 'train/256x192'"):
        bucket_entry(BlockSpec(bucket=name, columns=spec_of(BUCKET).columns))


@pytest.mark.parametrize("page_bytes", [1 << 14, 1 << 16])
def test_a_small_pending_shard_is_adopted_if_pages_are_larger(
    page_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mmap

    empty_store(tmp_path)
    (sample,) = samples_of({"train/8x8": 1})
    pending = leave_pending(tmp_path, "a", [sample])
    assert pending.stat().st_size < 2 << 16
    monkeypatch.setattr(mmap, "PAGESIZE", page_bytes)
    assert adopted(tmp_path) == [sample.id]


@pytest.mark.parametrize("left", [*(slice(n) for n in (0, 1, 100, 4096, 8191, 8192)), "zeros", "a zero", "8191 zeros"])
def test_a_pending_shard_that_ends_before_its_first_commit_is_removed(left: slice | str, tmp_path: Path) -> None:
    """A power failure may leave only a length: zeros."""
    manifest = empty_store(tmp_path)
    pending = leave_pending(tmp_path, "a", samples_of({"train/8x8": 1}))
    zeros = {"zeros": 1 << 14, "a zero": 1, "8191 zeros": 8191}
    pending.write_bytes(pending.read_bytes()[left] if isinstance(left, slice) else bytes(zeros[left]))
    with lock_store(tmp_path):
        assert adopt(tmp_path, manifest) == []
    assert not pending.exists()


def test_a_pending_shards_first_pages_are_synced_before_any_other_is_written(
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
    leave_pending(tmp_path, "a", samples_of({"train/8x8": 1}))
    assert synced


@pytest.mark.parametrize(("page_bytes", "num_bytes", "expected"), [(1 << 15, 1 << 16, False), (1 << 15, (1 << 16) + 1, True)])
def test_a_shard_without_a_commit_is_known_by_its_files_pages(
    page_bytes: int, num_bytes: int, *, expected: bool, tmp_path: Path
) -> None:
    """On a machine of 64 KiB pages LMDB takes pages of 32 KiB; here such a file's head is made of one of this machine."""
    empty_store(tmp_path)
    data = bytearray(
        leave_pending(tmp_path, "a", samples_of({"train/8x8": 1})).read_bytes().ljust(num_bytes, b"\0")[:num_bytes]
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
        assert not faults(store)


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


NAMES = ("struct", "json", "lmdb", "numpy", "msgpack", "xxhash", "hashlib", "pathlib", "subprocess", "bucketline")
CODE = "import os, sys; open(os.environ['CANARY'], 'w').close(); sys.exit(0)"


def test_python_files_of_the_current_folder_are_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unpacked data set may hold a file of any name."""
    store, here = tmp_path / "s", tmp_path / "here"
    empty_store(store)
    leave_pending(store, "a", FIVE)
    here.mkdir()
    for name in NAMES:
        (here / f"{name}.py").write_text(CODE, encoding="ascii")
    monkeypatch.chdir(here)
    monkeypatch.setenv("CANARY", str(tmp_path / "canary"))
    assert len(adopted(store)) == 5
    assert not (tmp_path / "canary").exists()


def test_a_pending_shard_stays_if_the_process_that_seals_did_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = empty_store(tmp_path)
    pending = leave_pending(tmp_path, "a", FIVE)
    data = pending.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", shutil.which("true"))
        with pytest.raises(StoreError, match=r"a\.lmdb is not sealed: .*rerun the command"):
            adopt(tmp_path, manifest)
    assert pending.read_bytes() == data
    assert adopt(tmp_path, manifest) == ["a"]


def test_pending_files_go_where_a_kill_came_between_moving_their_shard_and_removing_them(tmp_path: Path) -> None:
    manifest = empty_store(tmp_path)
    pending = leave_pending(tmp_path, "a", FIVE)
    old, copy = shutil.copy(pending, tmp_path / "old"), shutil.copy(pending.with_suffix(RECORDS), tmp_path / "copy")
    assert seal(tmp_path, "a")
    with untouched(tmp_path / "shards"):
        shutil.move(copy, pending.with_suffix(RECORDS))
        shutil.copy(old, pending)
        assert adopt(tmp_path, manifest) == ["a"]
        assert not list((tmp_path / "pending").glob("a.*"))


@pytest.mark.parametrize("moment", ["_append", "write_durably"])
def test_a_seal_that_ended_early_loses_no_record(moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty_store(tmp_path)
    leave_pending(tmp_path, "a", FIVE)
    with monkeypatch.context() as patch:
        patch.setattr(sealing, "TRANSACTION_BYTES", 1)
        calls, real = count(), getattr(sealing, moment)
        most = 2 if moment == "_append" else 0  # transactions
        patch.setattr(sealing, moment, lambda *given: real(*given) if next(calls) < most else 1 / 0)
        with pytest.raises(ZeroDivisionError):
            seal(tmp_path, "a")
    assert not list((tmp_path / "pending").glob("*.tmp"))
    assert adopted(tmp_path) == [sample.id for sample in FIVE]
    assert not faults(tmp_path)


def test_blocks_of_a_bucket_lie_together_in_a_sealed_shard(tmp_path: Path) -> None:
    empty_store(tmp_path)
    writer = open_writer(tmp_path, "a")
    for n in range(6):  # a transaction each
        add(writer, make_sample(f"{n}.png", ("train/64x64", "train/8x8")[n % 2], (f"caption {n}",)))
        writer.commit()
    assert writer.seal()
    read_contents(tmp_path / "shards" / "a.lmdb", found := refusing("a"))
    pages = [[offset // found.page_bytes for offset, *_ in own] for _, own in sorted(found.blocks.items())]
    assert [len(own) for own in pages] == [6, 3, 3]  # text, and two buckets
    assert sorted(chain(*pages)) == [*chain(*pages)]


@pytest.mark.parametrize("left", [0, 100, None])
def test_a_pending_shard_without_all_of_its_records_stays(left: int | None, tmp_path: Path) -> None:
    manifest = empty_store(tmp_path)
    pending = leave_pending(tmp_path, "a", FIVE)
    records = pending.with_suffix(RECORDS)
    whole = records.read_bytes()
    if left is None:
        records.unlink()
    else:
        os.truncate(records, left)
    with pytest.raises(StoreError, match=r"a\.lmdb.*cannot be sealed: .*a\.records"):
        adopt(tmp_path, manifest)
    records.write_bytes(whole)
    assert adopted(tmp_path) == [sample.id for sample in FIVE]


@pytest.mark.parametrize("kind", ["another shard's", "no LMDB file", "without sidecars"])
def test_a_pending_shard_stays_where_the_sealed_one_of_its_name_is_another(kind: str, tmp_path: Path) -> None:
    manifest = empty_store(tmp_path)
    if kind == "another shard's":
        leave_pending(tmp_path, "a", samples_of({BUCKET: 5}, "other/"))
        seal(tmp_path, "a")
    pending = leave_pending(tmp_path, "a", FIVE)
    if kind == "no LMDB file":
        (tmp_path / "shards" / "a.lmdb").write_bytes(b"nonsense" * 1024)
    elif kind == "without sidecars":
        shutil.copy(pending, tmp_path / "shards" / "a.lmdb")
    with untouched(tmp_path / "shards"):
        with pytest.raises(StoreError, match=r"shards/a\.lmdb .*rename the pending file to a-2\.lmdb"):
            adopt(tmp_path, manifest)
        assert pending.exists()


def test_what_was_committed_after_an_older_copy_was_sealed_stays(tmp_path: Path) -> None:
    store, copy = tmp_path / "store", tmp_path / "copy"
    manifest = empty_store(store)
    writer = open_writer(store, "a")
    add(writer, FIVE[0])
    writer.commit()
    shutil.copytree(store, copy)
    add(writer, FIVE[1])
    writer.commit()
    writer.close()
    assert seal(copy, "a")
    shutil.copytree(copy / "shards", store / "shards", dirs_exist_ok=True)
    with pytest.raises(StoreError, match=r"shards/a\.lmdb .*rename the pending file to a-2\.lmdb"):
        adopt(store, manifest)
    assert writer.path.exists()


def test_what_the_message_about_two_shards_of_one_name_advises_loses_no_row(tmp_path: Path) -> None:
    empty_store(tmp_path)
    leave_pending(tmp_path, "a", samples_of({BUCKET: 5}, "other/"))
    seal(tmp_path, "a")
    pending = leave_pending(tmp_path, "a", FIVE)
    for path in (pending, pending.with_suffix(RECORDS)):
        path.rename(path.with_stem("a-2"))
    assert len(adopted(tmp_path)) == 10
    assert not faults(tmp_path)


@pytest.mark.parametrize("kind", ["missing", "damaged", "another shard's"])
def test_a_shard_without_its_own_sound_sidecar_is_sealed_again_as_the_message_says(tmp_path: Path, kind: str) -> None:
    empty_store(tmp_path)
    if kind == "another shard's":
        leave_pending(tmp_path, "b", samples_of({BUCKET: 5}, "other/"))
        seal(tmp_path, "b")
    pending, sealed = leave_pending(tmp_path, "a", FIVE), tmp_path / "shards" / "a.lmdb"
    seal(tmp_path, "a")
    if kind == "damaged":
        sealed.with_suffix(".meta").write_bytes(b"nonsense" * 100)
    elif kind == "missing":
        sealed.with_suffix(".meta").unlink()
    else:
        assert sealed.stat().st_size == sealed.with_stem("b").stat().st_size
        shutil.copy(sealed.with_name("b.meta"), sealed.with_suffix(".meta"))
    with pytest.raises(StoreError, match=rf"a\.(meta|lmdb has the id).*; move {sealed} to {pending} and rerun"):
        adopted(tmp_path)
    sealed.rename(pending)
    assert len(adopted(tmp_path)) == (10 if kind == "another shard's" else 5)


def test_a_sealer_may_outlive_its_command_and_end_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command was killed, and its sealing process takes the shard's lock before the next command's does."""
    manifest = empty_store(tmp_path)
    leave_pending(tmp_path, "a", FIVE)
    run = subprocess.run

    def late(*arguments: Any, **more: Any) -> Any:
        assert run(*arguments, **more).returncode == 0
        return run(*arguments, **more)

    monkeypatch.setattr(subprocess, "run", late)
    assert adopt(tmp_path, manifest) == ["a"]
    assert publish(tmp_path, manifest, ["a"], ()).samples == 5
    assert tree(tmp_path / "pending") == {}


@pytest.fixture
def put_back(tmp_path: Path) -> Path:
    """A store of two generations whose older manifest is in the place of the newest, as a restored backup's is."""
    make_store(tmp_path / "s", samples_of({BUCKET: 3}), samples_of({BUCKET: 3}, "more/"))
    shutil.copy(tmp_path / "s" / "generations" / "1.json", tmp_path / "s" / "manifest.json")
    return tmp_path / "s"


def test_after_an_older_manifest_was_put_back_no_dropped_sample_comes_back(put_back: Path) -> None:
    """The next writer continues from the newest generation: a crash between its two documents looks the same."""
    first, second = samples_of({BUCKET: 3}), samples_of({BUCKET: 3}, "more/")
    older = (put_back / "manifest.json").read_bytes()
    drop(put_back, [second[0].id, first[0].id])
    (put_back / "manifest.json").write_bytes(older)
    assert drop(put_back, [first[1].id], dry_run=True).samples == drop(put_back, [first[1].id]).samples == 3
    store = Store.open(put_back)
    assert sorted(ids_of(store)) == sorted(sample.id for sample in (first[2], *second[1:]))
    assert store.manifest.generation == 4
    assert not faults(store)


def test_a_generation_whose_manifest_a_crash_kept_from_its_place_is_finished(put_back: Path) -> None:
    with changing(put_back) as manifest:
        assert (manifest.generation, manifest.samples) == (2, 6)
    assert (put_back / "manifest.json").read_bytes() == (put_back / "generations" / "2.json").read_bytes()


def test_a_newer_generation_that_is_damaged_stops_what_would_change_the_store(put_back: Path) -> None:
    flip_bit(put_back / "generations" / "2.json", 801)
    with (
        untouched(put_back, without_locks),
        pytest.raises(StoreError, match=r"2\.json is newer than .*manifest\.json, generation 1, and .*move it elsewhere"),
    ):
        drop(put_back, [samples_of({BUCKET: 3})[0].id])


def test_a_generation_of_another_store_is_not_taken_for_the_newest(tmp_path: Path) -> None:
    make_store(tmp_path / "one", samples_of({BUCKET: 3}))
    make_store(tmp_path / "other", samples_of({BUCKET: 3}), samples_of({BUCKET: 3}, "more/"))
    shutil.copy(tmp_path / "other" / "generations" / "2.json", tmp_path / "one" / "generations")
    with pytest.raises(StoreError, match=r"2\.json belongs to another store.*move it elsewhere"):
        drop(tmp_path / "one", [samples_of({BUCKET: 3})[0].id])


def test_a_shard_that_any_generation_lists_is_never_adopted(tmp_path: Path) -> None:
    """Somebody published the older manifest again, and retired nothing of what it left."""
    store = make_store(tmp_path, samples_of({BUCKET: 3}), samples_of({BUCKET: 3}, "more/"))
    older = read_manifest(tmp_path, 1)
    write_manifest(tmp_path, replace(older, generation=3))
    with changing(tmp_path) as manifest:
        assert manifest.samples == 3
        assert adopt(tmp_path, manifest) == []
    assert store.shards[1].paths.lmdb.exists()


@pytest.mark.parametrize("is_first", [False, True], ids=["committed", "adopted"])
def test_a_shard_that_was_rewritten_since_is_not_listed_again(tmp_path: Path, *, is_first: bool) -> None:
    """Else a row that was replaced before it was rewritten would be back, in front of the newer one."""
    make_store(tmp_path, FIVE)
    target, before = LocalTarget(tmp_path), read_manifest(tmp_path)
    write_shard(tmp_path, "mine", samples_of({BUCKET: 2}, "mine/"))
    if not is_first:
        target.publish(before, ["mine"])
    newer = make_sample(f"mine/{BUCKET}/0.png", BUCKET, version=1)
    with store_writer(tmp_path) as writer:  # adopts `mine`, if that is not listed yet
        add_samples(writer, [newer])
    drop(tmp_path, [FIVE[0].id])
    compact(tmp_path, shard_bytes=1 << 24)
    rewritten = read_manifest(tmp_path)
    assert target.publish(before if is_first else rewritten, ["mine"]) == rewritten
    IMAGES.expect(Store.open(tmp_path), [*FIVE[1:], newer, samples_of({BUCKET: 2}, "mine/")[1]])
    compact(tmp_path, shard_bytes=1 << 24, gc_older_than_s=0.0)
    drop(tmp_path, [FIVE[1].id])  # the generation after it no longer calls `mine` retired
    with pytest.raises(StoreError, match=r"mine\.meta is missing; .*rerun the command, which packs what is lacking"):
        target.publish(before, ["mine"])


def test_no_shard_is_published_in_a_store_that_took_the_place_of_another(tmp_path: Path) -> None:
    before = make_store(tmp_path, FIVE).manifest
    shutil.rmtree(tmp_path)
    make_store(tmp_path, FIVE[:1])
    write_shard(tmp_path, "mine", FIVE)
    with pytest.raises(StoreError, match=f"is another store than when this run began: .*expected {before.store_id}"):
        LocalTarget(tmp_path).publish(before, ["mine"])


def captioned(*names: str) -> list[Sample]:
    return [make_sample(name, "train/64x64", ("a cat",)) for name in names]


def test_a_shard_whose_values_cannot_be_located_stays_for_the_next_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with pages of another LMDB, which do not begin with their own numbers, or a file that is not the one that it maps."""
    real, pread = ctypes.string_at, os.pread
    words = r"g0 cannot be sealed: a read of \S*g0.lmdb\S* gives other bytes than LMDB"
    with monkeypatch.context() as patch, store_writer(tmp_path, shard_names="g{}") as writer:
        patch.setattr(ctypes, "string_at", lambda address, size: bytes(byte ^ 0x55 for byte in real(address, size)))
        add_samples(writer, samples_of({"train/8x8": 3}))
        with pytest.raises(StoreError, match=words):
            writer.publish()
        patch.setattr(ctypes, "string_at", real)
        patch.setattr(os, "pread", lambda fd, size, at: bytes(byte ^ 1 for byte in pread(fd, size, at)))
        with pytest.raises(StoreError, match=words):
            seal(tmp_path, "g0")
    assert not list((tmp_path / "shards").glob("*.lmdb"))
    with store_writer(tmp_path) as writer:
        writer.publish()
    assert Store.open(tmp_path).bucket("train/8x8").num_rows == 3
