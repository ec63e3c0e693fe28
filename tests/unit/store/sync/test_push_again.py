"""Pushes that something comes in between of: a collection, a kill, a clock that is wrong, a shard's name that is used again."""

from __future__ import annotations

import importlib
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bucketline.errors import StoreError
from bucketline.store import Store
from bucketline.store.change import commit as commit_module
from bucketline.store.change.commit import drop, restore
from bucketline.store.change.compact import UNLISTED_S, collect, compact
from bucketline.store.format.block import bytes_digest
from bucketline.store.format.manifest import dump_manifest, read_manifest
from bucketline.store.remote.generations import commit, newest_generation, read_generation
from bucketline.store.remote.objects import ObjectFolder
from bucketline.store.sync.push_pull import pull
from bucketline.store.transfer import pending_shards
from bucketline.store.verify.verify import verify, verify_folder
from tests.kit import add_samples, everything, make_sample, make_store, rewrite_manifest, samples_of, store_writer
from tests.object_storage import in_memory

push_module = importlib.import_module("bucketline.store.sync.push_pull")
push = push_module.push
BUCKET = "train/64x64"
FIRST = samples_of({BUCKET: 8})
DAYS_S = 2 * 86400.0


@pytest.fixture
def own(tmp_path: Path) -> Path:
    return make_store(tmp_path / "own.store", FIRST).path


@pytest.fixture(params=["memory", "file"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectFolder:
    return in_memory() if request.param == "memory" else ObjectFolder.open(f"file://{tmp_path}/bucket/a.store")


@pytest.fixture
def pushed(own: Path) -> ObjectFolder:
    objects = in_memory()
    push(own, objects)
    return objects


def during_a_push(monkeypatch: pytest.MonkeyPatch, work: Callable[[], object], *, is_late: bool = False) -> None:
    """Do something once a push has sent its shards: before it sends their lists of dropped rows, or after that."""
    lists = push_module.send_lists

    def sending(*arguments: object) -> None:
        if is_late:
            lists(*arguments)
        work()
        if not is_late:
            lists(*arguments)

    monkeypatch.setattr(push_module, "send_lists", sending)


def add_more(path: Path, prefix: str) -> None:
    with store_writer(path) as writer:
        add_samples(writer, samples_of({BUCKET: 3}, prefix))


def with_clock(patched: pytest.MonkeyPatch, ahead_s: float) -> None:
    now = time.time
    patched.setattr(time, "time", lambda: now() + ahead_s)


def expect_sound(folder: ObjectFolder, own: Path, out: Path) -> None:
    assert not verify_folder(folder, lambda _: None, 1).corrupt
    pull(folder, out)
    assert everything(Store.open(out)) == everything(Store.open(own))


def use_a_name_again(own: Path) -> None:
    """Compact a store, collect what is outdated, and write another shard of a name that is free now, of the same lengths."""
    add_more(own, "second/")
    compact(own, shard_bytes=1 << 24, gc_older_than_s=0)
    assert not (own / "shards" / "g0.lmdb").exists()
    add_more(own, "third/")  # its generation retires nothing: no file of that name is left
    assert not read_manifest(own).retired
    with store_writer(own, shard_names="g{}") as writer:
        add_samples(writer, [make_sample(sample.id, BUCKET, sample.captions, version=1) for sample in FIRST])
    assert (own / "shards" / "g0.lmdb").exists()


def push_by_names_alone(own: Path, folder: ObjectFolder) -> None:
    """Overwrite objects of the same names, as a careless copy does, and commit."""
    for path in (*(own / "shards").iterdir(), *(own / "generations").glob("*.dropped")):
        folder.write(f"{path.parent.name}/{path.name}", path)
    newest, manifest = newest_generation(folder), read_manifest(own)
    for number in range(newest.generation + 1, manifest.generation):
        document = push_module._as_number(manifest, number)
        assert commit(folder, number, dump_manifest(document), is_first=False)
    assert commit(folder, manifest.generation, dump_manifest(manifest), is_first=False)


@pytest.mark.parametrize("ahead_s", [DAYS_S, -DAYS_S])
def test_a_collection_while_a_push_runs_takes_nothing_of_it_whatever_the_clocks(
    folder: ObjectFolder, own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    push(own, folder)
    add_more(own, "second/")

    def collecting() -> None:
        with monkeypatch.context() as patched:
            with_clock(patched, ahead_s)
            assert collect(folder, 86400).files == ()

    during_a_push(monkeypatch, collecting)
    assert push(own, folder).generation == 2
    expect_sound(folder, own, tmp_path / "pulled.store")


def test_what_is_removed_while_a_push_runs_is_sent_again(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, found = in_memory(), set[str]()

    def removing() -> None:
        found.update(pending_shards(folder, UNLISTED_S, time.time())[0])
        folder.remove(["shards/g0.lmdb", "shards/g0.meta"])

    during_a_push(monkeypatch, removing)
    push(own, folder)
    assert found == {"g0"}, "what is sent is noted meanwhile"
    assert not list(folder.names("pending"))
    expect_sound(folder, own, tmp_path / "pulled.store")


def test_what_disappears_again_and_again_is_not_committed(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = in_memory()
    entries = type(folder).names

    def vanishing(self: ObjectFolder, prefix: str = "") -> object:
        self.remove(["shards/g0.lmdb"])
        return entries(self, prefix)

    monkeypatch.setattr(type(folder), "names", vanishing)
    with pytest.raises(StoreError, match=r"g0\.lmdb was sent, and is not there .*nothing was committed"):
        push(own, folder)
    assert folder.size("manifest.json") is None


def test_a_shard_of_a_superseded_generation_that_is_pushed_again_is_not_collected_meanwhile(
    pushed: ObjectFolder, own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drop(own, [FIRST[0].id])
    compact(own, shard_bytes=1 << 24)
    push(own, pushed)
    restore(own, 1)
    during_a_push(monkeypatch, lambda: collect(pushed, 0), is_late=True)
    push(own, pushed)
    expect_sound(pushed, own, tmp_path / "pulled.store")


def test_the_copies_of_a_compaction_are_noted_while_they_are_sent(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, found = in_memory(), set[str]()
    drop(own, [FIRST[0].id])
    push(own, folder)

    def looking(*arguments: object, **more: object) -> bool:
        found.update(pending_shards(folder, UNLISTED_S, time.time())[0])
        return commit(*arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(commit_module, "commit", looking)
    written = compact(folder, shard_bytes=1 << 24).written
    assert len(found) == len(written) == 1
    assert not list(folder.names("pending"))


@pytest.mark.parametrize("ahead_s", [DAYS_S, -DAYS_S])
def test_leftovers_are_judged_by_the_servers_clock(
    folder: ObjectFolder, own: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(push_module, "commit", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            push(own, folder)
    with_clock(monkeypatch, ahead_s)
    assert push(own, folder).files == 0


@pytest.mark.parametrize("ahead_s", [DAYS_S, -DAYS_S])
def test_what_was_superseded_lately_stays(
    folder: ObjectFolder, own: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    push(own, folder)
    drop(own, [FIRST[0].id])
    push(own, folder)
    with_clock(monkeypatch, ahead_s)
    done = compact(folder, shard_bytes=1 << 24, gc_older_than_s=86400)
    assert done.collected is not None
    assert (done.collected.generations, done.collected.files) == ((), ())
    assert done.collected.waiting == (1, 2)
    assert collect(folder, 0).generations == (1, 2)


def test_a_name_that_is_used_again_is_refused_and_both_stay_whole(folder: ObjectFolder, own: Path, tmp_path: Path) -> None:
    push(own, folder)
    shutil.copytree(own, tmp_path / "before.store")
    use_a_name_again(own)
    with pytest.raises(StoreError, match=r"is not a generation of"):
        push(own, folder)
    shutil.copy(tmp_path / "before.store" / "generations" / "1.json", own / "generations")
    with pytest.raises(StoreError, match=r"shards/g0\.lmdb is another shard than that of .*never used twice.*store merge"):
        push(own, folder)
    expect_sound(folder, tmp_path / "before.store", tmp_path / "pulled.store")


def test_a_shard_of_an_older_generation_there_is_not_overwritten(pushed: ObjectFolder, own: Path, tmp_path: Path) -> None:
    add_more(own, "second/")
    compact(own, shard_bytes=1 << 24)
    push(own, pushed)
    collect(own, 0)
    add_more(own, "third/")  # its generation retires nothing: the name is free
    with store_writer(own, shard_names="g{}") as writer:
        add_samples(writer, samples_of({BUCKET: 3}, "fourth/"))
    with pytest.raises(StoreError, match=r"shards/g0\.meta is another writer's"):
        push(own, pushed)
    assert not verify_folder(pushed, lambda _: None, 1, read_generation(pushed, 1, newest_generation(pushed))).corrupt


def test_sidecars_that_were_rebuilt_are_sent(pushed: ObjectFolder, own: Path, tmp_path: Path) -> None:
    """A repair may write other sidecars of the same shard, of the same length."""
    path = own / "shards" / "g0.meta"
    data = path.read_bytes().replace(b'"page_bytes"', b'"PAGE_BYTES"')  # of a header's metadata
    path.write_bytes(data)
    (entry,) = read_manifest(own).shards
    rewrite_manifest(own, generation=2, shards=(replace(entry, meta=replace(entry.meta, digest=bytes_digest(data))),))
    assert push(own, pushed).files == 1
    assert pushed.read("shards/g0.meta") == data


def test_a_pull_over_another_shard_of_the_same_name_is_refused(pushed: ObjectFolder, own: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.store"
    pull(pushed, copy)
    use_a_name_again(own)
    push_by_names_alone(own, pushed)
    with pytest.raises(StoreError, match=r"has another shard g0 .*pull into a path where there is nothing"):
        pull(pushed, copy)
    found = verify(Store.open(copy), lambda _: None, 1)
    assert (found.corrupt, found.rows, found.strays) == ((), len(FIRST), ())
    expect_sound(pushed, own, tmp_path / "new.store")


def test_an_unfinished_pull_keeps_no_other_shard(
    pushed: ObjectFolder, own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "pulled.store"
    with monkeypatch.context() as patched:
        patched.setattr("bucketline.store.sync.push_pull.get_lists", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pull(pushed, out)
    use_a_name_again(own)
    push_by_names_alone(own, pushed)
    expect_sound(pushed, own, out)


def test_a_restore_of_collected_shards_commits_nothing(
    pushed: ObjectFolder, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drop(own, [FIRST[0].id])
    compact(own, shard_bytes=1 << 24)
    push(own, pushed)

    def collecting(*_: object) -> None:  # after the first look, before the commit
        pushed.remove(["shards/g0.lmdb"])

    monkeypatch.setattr("bucketline.store.change.commit.refuse_without_put_if_absent", collecting)
    with pytest.raises(StoreError, match=r"generation 1 of .* cannot be restored: .*g0\.lmdb is missing; nothing was changed"):
        restore(pushed, 1)
    assert newest_generation(pushed).generation == 3
