"""Changes to a store in object storage: the same as on a disk, and nothing is lost if two are made at once."""

from __future__ import annotations

import dataclasses
import gc
import shutil
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bucketline.errors import StoreError
from bucketline.store import Store
from bucketline.store.change import commit as commit_module
from bucketline.store.change.commit import restore
from bucketline.store.change.compact import compact
from bucketline.store.change.drop import drop
from bucketline.store.change.garbage_collect import UNLISTED_S, collect
from bucketline.store.change.repair import repair
from bucketline.store.folder import ListedFile
from bucketline.store.remote.generations import listed_generations, newest_generation, read_generation
from bucketline.store.remote.objects import ObjectFolder
from bucketline.store.sync.push_pull import pull, push
from bucketline.store.transfer.sender import pending_shards
from bucketline.store.verify.verify import verify, verify_folder
from tests.kit import add_samples, everything, make_store, samples_of, store_writer
from tests.object_storage import S3Bucket, in_memory

DROPPED = ["first/train/64x64/3.png", "second/train/96x64/0.png"]


@pytest.fixture
def own(store: Store, tmp_path: Path) -> Path:
    shutil.copytree(store.path, tmp_path / "own.store")
    return tmp_path / "own.store"


@pytest.fixture(params=["memory", "s3"])
def folder(request: pytest.FixtureRequest, own: Path) -> ObjectFolder:
    if request.param == "memory":
        objects = in_memory()
    else:
        bucket: S3Bucket = request.getfixturevalue("s3")
        objects = bucket.folder("a.store")
    push(own, objects)
    return objects


@pytest.fixture
def objects(own: Path) -> ObjectFolder:
    folder = in_memory()
    push(own, folder)
    return folder


def pulled(objects: ObjectFolder, path: Path) -> Store:
    pull(objects, path)
    store = Store.open(path)
    found = verify(store, lambda _: None, 1)
    assert not found.corrupt
    assert not found.strays
    return store


def ids_in(store: Store) -> set[str]:
    return {row.record.id for rows in everything(store).values() for row in rows}


def names(objects: ObjectFolder) -> set[str]:
    return {file.name for file in objects.names()}


def aged(monkeypatch: pytest.MonkeyPatch, seconds: float, below: str = "") -> None:
    """Let every object in a subfolder be older than it is."""
    entries = ObjectFolder.names

    def older(self: ObjectFolder, prefix: str = "") -> Iterator[ListedFile]:
        for entry in entries(self, prefix):
            age = seconds if entry.name.startswith(below) else 0
            yield dataclasses.replace(entry, modified_s=entry.modified_s - age)

    monkeypatch.setattr(ObjectFolder, "names", older)


def test_a_drop_is_the_same_as_on_a_disk(folder: ObjectFolder, own: Path, tmp_path: Path) -> None:
    dry = drop(folder, DROPPED, dry_run=True)
    assert (dry.generation, dry.samples) == (2, 51)
    assert newest_generation(folder).generation == 2
    done = drop(folder, DROPPED)
    drop(own, DROPPED)
    assert (done.generation, done.samples) == (3, 51)
    assert everything(pulled(folder, tmp_path / "pulled.store")) == everything(Store.open(own))
    with pytest.raises(StoreError, match=r"a\.store has no sample 'first/train/64x64/3\.png'"):
        drop(folder, DROPPED)


def test_a_compaction_is_the_same_as_on_a_disk(folder: ObjectFolder, own: Path, tmp_path: Path) -> None:
    drop(folder, DROPPED)
    drop(own, DROPPED)
    dry = compact(folder, shard_bytes=1 << 24, dry_run=True)
    assert dry.rewritten == ("g0", "g1")
    done = compact(folder, shard_bytes=1 << 24, gc_older_than_s=0)
    compact(own, shard_bytes=1 << 24)
    assert (done.generation, done.rows, done.dropped) == (4, 51, 2)
    assert done.collected is not None
    assert done.collected.generations == (2, 3)
    assert "g0.lmdb" in done.collected.files
    assert everything(pulled(folder, tmp_path / "pulled.store")) == everything(Store.open(own))
    left = {name.partition(".")[0] for name in names(folder)}
    assert left == {"manifest", "generations/4", f"shards/{done.written[0]}"}
    assert not verify_folder(folder, lambda _: None, 1).corrupt


def test_an_earlier_generation_is_restored(objects: ObjectFolder, own: Path, tmp_path: Path) -> None:
    drop(objects, DROPPED)
    compact(objects, shard_bytes=1 << 24)
    assert restore(objects, 2, dry_run=True)[1].generation == 2
    before, done = restore(objects, 2)
    assert (done.generation, before.samples, done.samples) == (5, 51, 53)
    assert everything(pulled(objects, tmp_path / "pulled.store")) == everything(Store.open(own))
    assert restore(objects, 2)[1] == done
    restore(objects, 3)  # with its lists of dropped rows
    assert ids_in(pulled(objects, tmp_path / "third.store")) == ids_in(Store.open(own)) - set(DROPPED)
    collect(objects, 0)
    with pytest.raises(StoreError, match=r"a\.store has no generation 2: it was removed by"):
        restore(objects, 2)


def test_of_two_changes_at_once_both_are_made(
    folder: ObjectFolder, own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    barrier, waited = threading.Barrier(2), threading.local()
    from bucketline.store.remote.generations import commit

    def together(*args: object, **more: object) -> bool:
        if not getattr(waited, "is_done", False):
            waited.is_done = True
            barrier.wait(30)
        return commit(*args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(commit_module, "commit", together)
    works = (lambda: drop(folder, DROPPED).generation, lambda: compact(folder, shard_bytes=1 << 24).generation)
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda work: work(), works))
    assert sorted(done) == [3, 4]
    expected = ids_in(Store.open(own)) - set(DROPPED)
    assert ids_in(pulled(folder, tmp_path / "pulled.store")) == expected
    newest = newest_generation(folder)
    listed = {entry.name for n in (2, 3, 4) for entry in read_generation(folder, n, newest).shards}
    assert {name.removeprefix("shards/").partition(".")[0] for name in names(folder) if name.startswith("shards/")} == listed


def test_a_compaction_that_a_pack_overtakes_copies_nothing_again(
    objects: ObjectFolder, own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bucketline.store.remote.generations import commit

    drop(own, DROPPED)
    push(own, objects)
    expected = ids_in(Store.open(own)) | {sample.id for sample in samples_of({"val/64x64": 3}, "new/")}
    copied = []

    def late(*args: object, **more: object) -> bool:
        monkeypatch.setattr(commit_module, "commit", commit)
        with store_writer(own) as writer:
            add_samples(writer, samples_of({"val/64x64": 3}, "new/"))
        push(own, objects)
        return commit(*args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(commit_module, "commit", late)
    done = compact(objects, shard_bytes=1 << 24, on_bytes=lambda done, total: copied.append((done, total)))
    assert done.generation == 5
    assert [now == of for now, of in copied].count(True) == 1
    assert [entry.name for entry in newest_generation(objects).shards][:1] == list(done.written)
    assert ids_in(pulled(objects, tmp_path / "pulled.store")) == expected


def test_changes_leave_no_open_file_in_the_process(objects: ObjectFolder, own: Path) -> None:
    ids, num_open = sorted(ids_in(Store.open(own))), list[int]()
    for sample_id in ids[:6]:
        drop(objects, [sample_id])
        gc.collect()
        num_open.append(len(list(Path("/proc/self/fd").iterdir())))
    assert num_open[-1] <= num_open[2]


def test_the_same_change_twice_at_once_uses_different_lists(folder: ObjectFolder, tmp_path: Path, own: Path) -> None:
    ids = sorted(ids_in(Store.open(own)))[:4]
    barrier = threading.Barrier(4)

    def run(sample_id: str) -> None:
        barrier.wait()
        drop(folder, [sample_id])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, ids))
    assert newest_generation(folder).generation == 6
    assert ids_in(pulled(folder, tmp_path / "pulled.store")) == ids_in(Store.open(own)) - set(ids)


def test_a_change_that_dies_before_its_commit_changes_nothing(
    objects: ObjectFolder, own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(commit_module, "commit", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            drop(objects, DROPPED)
        with pytest.raises(ZeroDivisionError):
            compact(objects, shard_bytes=1 << 24)
    assert newest_generation(objects).generation == 2
    assert everything(pulled(objects, tmp_path / "pulled.store")) == everything(Store.open(own))
    assert drop(objects, DROPPED).generation == 3


def test_what_is_wrong_in_the_folder_on_this_disk_is_named_by_that_folder(objects: ObjectFolder, tmp_path: Path) -> None:
    for folder in ("made", "elsewhere"):
        (tmp_path / folder).mkdir()
    (tmp_path / "made" / "shards").symlink_to(tmp_path / "elsewhere")
    work = commit_module.WorkFolder(made=tmp_path / "made", cache=None)
    with pytest.raises(StoreError, match=f"^{tmp_path}/made/shards is a link"):
        commit_module.commit_change(objects, lambda base: base.manifest, work=work)


def test_only_what_no_generation_lists_is_collected(
    objects: ObjectFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    objects.write("shards/upload.lmdb", b"another writer's")
    objects.write("shards/g0.dropped-77", b"another writer's")
    drop(objects, DROPPED)
    before = names(objects)
    kept = collect(objects, 3600)
    assert (kept.generations, kept.files) == ((), ())
    assert kept.waiting == (2,)
    dry = collect(objects, 0, dry_run=True)
    assert dry.generations == (2,)
    assert names(objects) == before
    assert collect(objects, 0).files == ()
    assert names(objects) == before - {"generations/2.json"}
    aged(monkeypatch, UNLISTED_S + 1)
    assert collect(objects, 1e9).files == ("upload.lmdb", "g0.dropped-77")
    assert pulled(objects, tmp_path / "pulled.store").manifest.samples == 51


def test_what_a_damaged_generation_listed_goes_with_it_by_the_notes_of_its_successors(
    objects: ObjectFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    compact(objects, shard_bytes=1 << 30)
    before = newest_generation(objects)
    assert {"g0", "g1"} <= set(before.retired)
    for number in listed_generations(objects):
        if number != before.generation:
            objects.write(f"generations/{number}.json", b"{}")
    removed, own = list[str](), ObjectFolder.remove

    def remove(self: ObjectFolder, names: Iterable[str]) -> None:
        listed = list(names)
        removed.extend(name for name in listed if not name.startswith("pending/"))
        own(self, listed)

    monkeypatch.setattr(ObjectFolder, "remove", remove)
    gone = collect(objects, 0).files
    assert {f"{shard}.{kind}" for shard in ("g0", "g1") for kind in ("lmdb", "extents", "index")} <= set(gone)
    kinds = [name.rpartition(".")[2] for name in removed if name.startswith("shards/")]
    assert kinds == sorted(kinds, key=["lmdb", "extents", "index"].index)  # as on a disk: a kill in between is harmless
    assert removed[len(kinds) :] == ["generations/2.json"]


def test_what_a_running_pack_has_sent_is_not_collected(objects: ObjectFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    objects.write("shards/sent.lmdb", b"a running pack's")
    objects.write("pending/run", b'["sent"]')
    with monkeypatch.context() as patched:
        aged(patched, UNLISTED_S + 1, "shards")
        assert collect(objects, 1e9).files == ()
    aged(monkeypatch, UNLISTED_S + 1)  # the pack is no longer at work
    assert collect(objects, 1e9).files == ("sent.lmdb",)
    assert "pending/run" not in names(objects)


def test_damaged_objects_are_pushed_again_or_repaired(objects: ObjectFolder, own: Path, tmp_path: Path) -> None:
    data = bytearray(objects.read("shards/g1.lmdb"))
    data[len(data) // 2] ^= 1
    objects.write("shards/g1.lmdb", bytes(data))
    objects.remove(["shards/g0.index"])
    assert {fault.shard for fault in verify_folder(objects, lambda _: None, 1).corrupt} == {"g0", "g1"}
    objects.remove(["shards/g1.lmdb"])
    push(own, objects)
    assert everything(pulled(objects, tmp_path / "pulled.store")) == everything(Store.open(own))
    data = bytearray(objects.read("shards/g1.lmdb"))
    data[data.index(b'"latent"') + 4096] ^= 1
    objects.write("shards/g1.lmdb", bytes(data))
    assert repair(objects).generation == 3
    (fault,) = verify_folder(objects, lambda _: None, 1).corrupt
    assert "g1.lmdb has the digest" in fault.error  # as on a disk: a run may be planned on that generation
    collect(objects, 0)
    assert not verify_folder(objects, lambda _: None, 1).corrupt


def test_a_late_hint_does_not_hide_the_newest_generation_after_a_collection(objects: ObjectFolder) -> None:
    hint = objects.read("manifest.json")
    drop(objects, DROPPED)
    drop(objects, ["first/train/64x64/4.png"])
    objects.write("manifest.json", hint)  # a slow writer's
    collect(objects, 0)
    assert newest_generation(objects).generation == 4


def test_a_change_after_an_old_hint_continues_from_the_newest_generation(
    objects: ObjectFolder, own: Path, tmp_path: Path
) -> None:
    """Garbage collection has removed the generations between, so that the newest one does not follow the hint."""
    hint = objects.read("manifest.json")
    for sample_id in DROPPED:
        drop(objects, [sample_id])
    drop(objects, ["first/train/64x64/4.png"])
    collect(objects, 0)
    objects.write("manifest.json", hint)  # a slow writer's, or one that somebody has put back
    assert drop(objects, ["first/train/64x64/5.png"]).generation == 6
    dropped = {*DROPPED, "first/train/64x64/4.png", "first/train/64x64/5.png"}
    assert ids_in(pulled(objects, tmp_path / "pulled.store")) == ids_in(Store.open(own)) - dropped


def test_a_slow_collection_does_not_hide_what_is_committed_and_collected_meanwhile(
    objects: ObjectFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overtaken(*arguments: Any) -> tuple[set[str], list[str]]:
        monkeypatch.undo()
        drop(objects, DROPPED)
        drop(objects, ["first/train/64x64/4.png"])
        collect(objects, 0)
        return pending_shards(*arguments)

    # called once the collection has read which generation is the newest
    monkeypatch.setattr("bucketline.store.change.garbage_collect.pending_shards", overtaken)
    collect(objects, 86400)
    assert newest_generation(objects).generation == 4


def test_verify_names_what_is_damaged(objects: ObjectFolder) -> None:
    read = [0]

    def count(num_bytes: int) -> None:
        read[0] += num_bytes

    found = verify_folder(objects, count, 1)
    assert (found.rows, found.corrupt) == (53, ())
    assert read[0] == sum(entry.lmdb.num_bytes for entry in newest_generation(objects).shards)
    data = bytearray(objects.read("shards/g1.lmdb"))
    latent = data.index(b'"latent"') + 4096
    data[latent] ^= 1
    objects.write("shards/g1.lmdb", bytes(data))
    faults = verify_folder(objects, lambda _: None, 1).corrupt
    assert {fault.shard for fault in faults} == {"g1"}
    assert any("do not match the checksum" in fault.error for fault in faults)
    objects.remove(["shards/g0.index"])
    objects.write("shards/g1.lmdb", bytes(data[:-1]))
    errors = [fault.error for fault in verify_folder(objects, lambda _: None, 1).corrupt]
    assert any("g0.index is missing" in error for error in errors)
    assert any("the manifest says that it is longer" in error for error in errors)
    repair(objects)
    objects.write("generations/2.json", b"{}")
    assert any("generations/2.json is damaged" in f.error for f in verify_folder(objects, lambda _: None, 1).corrupt)


def test_a_generation_that_was_collected_is_not_written_again_for_an_old_hint(objects: ObjectFolder) -> None:
    hint = objects.read("manifest.json")
    drop(objects, DROPPED)
    drop(objects, ["first/train/64x64/4.png"])
    collect(objects, 0)
    objects.write("manifest.json", hint)  # a slow writer's, or one that somebody has put back
    collect(objects, 0)
    assert list(listed_generations(objects)) == [4]
    objects.write("manifest.json", hint)
    drop(objects, ["first/train/64x64/5.png"])
    assert list(listed_generations(objects)) == [4, 5]


def test_a_writer_that_others_get_ahead_of_pauses_between_its_tries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, paused = in_memory(), list[int]()
    push(make_store(tmp_path / "s", samples_of({"train/64x64": 8})).path, place)

    def pause_after(tries: int) -> float:
        paused.append(tries)
        return 0.0

    monkeypatch.setattr(commit_module, "pause_after", pause_after)
    others = iter(["other 1", "other 2"])

    def ruled(name: str) -> Any:
        return lambda base: dataclasses.replace(base.manifest, rules={**base.manifest.rules, name: 1})

    def change(base: Any) -> Any:
        if (other := next(others, None)) is not None:
            commit_module.commit_change(place, ruled(other))
        return ruled("own")(base)

    _, after = commit_module.commit_change(place, change)
    assert {"other 1", "other 2", "own"} <= after.rules.keys()
    assert paused == [1, 2]
