"""Stores in object storage: pushed and pulled bit for bit, in parts, again after an interruption, by several at once."""

from __future__ import annotations

import dataclasses
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bucketline.bench.fixtures.range_server import Fault, RangeServer, Schedule
from bucketline.errors import CorruptError, StoreError, UsageError
from bucketline.store import Store, transfer
from bucketline.store.change.commit import drop
from bucketline.store.change.compact import compact
from bucketline.store.folder import MissingObjectError
from bucketline.store.remote import objects as objects_module
from bucketline.store.remote.generations import commit, newest_generation, read_generation
from bucketline.store.remote.objects import ObjectFolder
from bucketline.store.remote.urls import RemoteOptions
from bucketline.store.sync.push_pull import pull, push
from bucketline.store.sync.working import WorkingStore, own_working_store
from bucketline.store.verify.verify import verify, verify_folder
from tests.commands import call
from tests.kit import (
    ANY,
    COLUMNS,
    IMAGES,
    RAGGED,
    Form,
    Sample,
    add_samples,
    dropped_list,
    everything,
    flip_bit,
    ids_of,
    make_store,
    samples_of,
    store_writer,
    tree,
)
from tests.object_storage import SECRET, S3Bucket, in_memory

MORE = {"train/64x64": 4, "val/64x64": 2}
FORM = dataclasses.replace(RAGGED, columns=IMAGES.columns)


@pytest.fixture(params=["memory", "file", "s3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectFolder:
    if request.param == "s3":
        bucket: S3Bucket = request.getfixturevalue("s3")
        return bucket.folder("a.store")
    return in_memory() if request.param == "memory" else ObjectFolder.open(f"file://{tmp_path}/bucket/a.store")


def expect_whole(path: Path) -> Store:
    store = Store.open(path)
    result = verify(store, lambda _: None, 1)
    assert not result.corrupt
    assert not result.strays
    return store


def add_more(path: Path, prefix: str) -> list[Sample]:
    samples = samples_of(MORE, prefix)
    with store_writer(path) as writer:
        add_samples(writer, samples)
    return samples


def test_a_store_is_pushed_and_pulled_bit_for_bit(folder: ObjectFolder, copy: Path, tmp_path: Path) -> None:
    (copy / "rejects.jsonl").write_text('{"id": "a"}\n')
    done = push(copy, folder)
    assert (done.generation, done.samples, done.is_committed) == (2, 53, True)
    pulled = pull(folder, tmp_path / "pulled.store")
    assert (pulled.generation, pulled.samples, pulled.shards, pulled.is_update) == (2, 53, 2, False)
    assert tree(tmp_path / "pulled.store" / "shards") == tree(copy / "shards")
    assert (tmp_path / "pulled.store" / "manifest.json").read_bytes() == (copy / "manifest.json").read_bytes()
    assert (tmp_path / "pulled.store" / "rejects.jsonl").read_text() == '{"id": "a"}\n'
    expect_whole(tmp_path / "pulled.store")
    again = push(copy, folder)
    assert (again.is_committed, again.files, again.generation) == (False, 0, 2)


@pytest.mark.parametrize("folder", ["memory", "file"], indirect=True)
def test_a_file_of_many_parts_is_whole(
    folder: ObjectFolder, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (transfer, objects_module):
        monkeypatch.setattr(module, "PART_BYTES", 1000)  # a hundred parts of each shard
    push(copy, folder)
    for name in ("g0.lmdb", "g1.lmdb", "g0.meta"):
        assert folder.read(f"shards/{name}") == (copy / "shards" / name).read_bytes()
    pull(folder, tmp_path / "pulled.store")
    assert tree(tmp_path / "pulled.store" / "shards") == tree(copy / "shards")


@pytest.mark.parametrize("form", [ANY, FORM], ids=["columns", "ragged"])
def test_stores_of_any_form_go_there_and_back(form: Form, tmp_path: Path) -> None:
    items, folder = form.samples({"train/64x64": 5, "val/64x64": 3}), in_memory()
    made = form.make_store(tmp_path / "own.store", items)
    push(made.path, folder)
    pull(folder, tmp_path / "pulled.store")
    assert tree(tmp_path / "pulled.store" / "shards") == tree(made.path / "shards")
    drop(folder, [items[0].id])
    compact(folder, shard_bytes=1 << 24)
    pull(folder, tmp_path / "compact.store")
    form.expect(expect_whole(tmp_path / "compact.store"), items[1:])


def test_only_what_is_new_is_sent_and_pulled(folder: ObjectFolder, copy: Path, tmp_path: Path) -> None:
    push(copy, folder)
    pull(folder, tmp_path / "pulled.store")
    add_more(copy, "third/")
    drop(copy, ["first/train/64x64/3.png"])
    done = push(copy, folder)
    assert done.files == 3
    assert done.generation == newest_generation(folder).generation == 4
    update = pull(folder, tmp_path / "pulled.store")
    assert (update.is_update, update.generation, update.num_bytes) == (True, 4, done.num_bytes)
    assert everything(expect_whole(tmp_path / "pulled.store")) == everything(Store.open(copy))
    assert pull(folder, tmp_path / "pulled.store").num_bytes == 0
    add_more(tmp_path / "pulled.store", "fourth/")  # the pulled store is a store like any other
    assert push(tmp_path / "pulled.store", folder).generation == 5
    with pytest.raises(StoreError, match=r"has generation 5 with .* is not a generation of .*was changed there"):
        push(copy, folder)


def test_generations_between_two_pushes_are_stood_for_by_the_newest(copy: Path, objects: ObjectFolder, tmp_path: Path) -> None:
    add_more(copy, "third/")
    drop(copy, ["first/train/64x64/3.png"])
    assert push(copy, objects).generation == 4
    held = everything(Store.open(copy))
    for number in (3, 4):
        document = read_generation(objects, number, newest_generation(objects))
        assert everything(Store.at(objects, document, tmp_path / "cache")) == held


def test_a_push_is_refused_if_the_store_no_longer_has_the_generation_that_is_there(copy: Path, objects: ObjectFolder) -> None:
    add_more(copy, "third/")
    compact(copy, shard_bytes=1 << 24, gc_older_than_s=0)
    with pytest.raises(StoreError, match=r"has generation 2 with 53 samples, .*`store compact --gc` has removed it here"):
        push(copy, objects)
    assert newest_generation(objects).generation == 2


def test_an_interrupted_push_is_continued(
    copy: Path, objects: ObjectFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_more(copy, "third/")
    add_more(copy, "fourth/")
    monkeypatch.setattr("bucketline.store.sync.push_pull.commit", ended)
    with pytest.raises(ZeroDivisionError):
        push(copy, objects)
    monkeypatch.undo()
    assert newest_generation(objects).generation == 2
    pull(objects, tmp_path / "before.store")
    assert expect_whole(tmp_path / "before.store").manifest.samples == 53
    done = push(copy, objects)
    assert (done.generation, done.files) == (4, 0)
    add_more(copy, "fifth/")
    compact(copy, shard_bytes=1 << 24)
    later = (commit, ended)  # between the commits of two generations
    monkeypatch.setattr(
        "bucketline.store.sync.push_pull.commit", lambda *arguments, **more: later[arguments[1] > 5](*arguments, **more)
    )
    with pytest.raises(ZeroDivisionError):
        push(copy, objects)
    monkeypatch.undo()
    assert newest_generation(objects).generation == 5
    assert push(copy, objects).generation == 6


def ended(*_: object, **__: object) -> bool:
    raise ZeroDivisionError


def test_what_was_left_long_ago_is_sent_again(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = in_memory()
    monkeypatch.setattr("bucketline.store.sync.push_pull.commit", ended)
    with pytest.raises(ZeroDivisionError):
        push(copy, folder)
    monkeypatch.undo()
    monkeypatch.setattr(transfer, "FRESH_S", -60.0)
    assert push(copy, folder).files == 4
    assert push(copy, folder).files == 0  # a generation lists it now


def test_another_state_of_the_store_is_refused(copy: Path, objects: ObjectFolder, tmp_path: Path) -> None:
    shutil.copytree(copy, tmp_path / "other.store")
    add_more(copy, "mine/")
    add_more(tmp_path / "other.store", "theirs/")
    push(tmp_path / "other.store", objects)
    before = {file.name: objects.read(file.name) for file in objects.names()}
    with pytest.raises(StoreError, match="has generation 3 with 59 samples, which is not a generation of"):
        push(copy, objects)
    add_more(copy, "more/")
    with pytest.raises(StoreError, match="nothing was committed"):
        push(copy, objects)
    with pytest.raises(StoreError, match="has changes that memory:"):
        pull(objects, copy)
    third = make_store(tmp_path / "third.store", samples_of(MORE))
    with pytest.raises(StoreError, match="holds another store"):
        push(third.path, objects)
    with pytest.raises(UsageError, match="is another store than"):
        pull(objects, third.path)
    assert {file.name: objects.read(file.name) for file in objects.names()} == before


@pytest.mark.parametrize("folder", ["memory", "s3"], indirect=True)
def test_of_two_states_that_are_pushed_at_once_one_wins(
    folder: ObjectFolder, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(copy, folder)
    paths = [copy, Path(shutil.copytree(copy, tmp_path / "other.store"))]
    for n, path in enumerate(paths):
        add_more(path, f"writer {n}/")
    barrier, won, lost = threading.Barrier(2), list[Path](), list[str]()

    def together(*args: object, **more: object) -> bool:
        barrier.wait(30)
        return commit(*args, **more)  # type: ignore[arg-type]

    def run(path: Path) -> None:
        try:
            push(path, folder)
            won.append(path)
        except StoreError as error:
            lost.append(str(error))

    monkeypatch.setattr("bucketline.store.sync.push_pull.commit", together)
    with ThreadPoolExecutor(len(paths)) as pool:
        list(pool.map(run, paths))
    assert len(won) == 1
    assert "is not a generation of" in lost[0]
    pull(folder, tmp_path / "pulled.store")
    assert everything(expect_whole(tmp_path / "pulled.store")) == everything(Store.open(won[0]))


def test_another_writers_file_is_never_overwritten(copy: Path, objects: ObjectFolder, tmp_path: Path) -> None:
    other = Path(shutil.copytree(copy, tmp_path / "other.store"))
    for number, path in ((3, copy), (4, other)):
        with store_writer(path, shard_names="chosen{}") as writer:
            add_samples(writer, samples_of(MORE, f"{number}/"))
    theirs = (other / "shards" / "chosen0.meta").read_bytes()
    objects.write("shards/chosen0.meta", theirs)  # their writer is about to commit
    with pytest.raises(StoreError, match=r"chosen0\.meta is another writer's"):
        push(copy, objects)
    assert objects.read("shards/chosen0.meta") == theirs
    assert push(other, objects).generation == 3


def test_lists_of_dropped_rows_of_two_writers_have_two_names(copy: Path, objects: ObjectFolder, tmp_path: Path) -> None:
    other = Path(shutil.copytree(copy, tmp_path / "other.store"))
    for number, path in ((3, copy), (4, other)):
        drop(path, [f"first/train/64x64/{number}.png"])
    theirs = f"generations/{dropped_list(other).name}"
    objects.write(theirs, dropped_list(other).read_bytes())  # their writer is about to commit
    assert push(copy, objects).files == 1
    assert objects.read(theirs) == dropped_list(other).read_bytes()
    pull(objects, tmp_path / "pulled.store")
    assert everything(expect_whole(tmp_path / "pulled.store")) == everything(Store.open(copy))
    flip_bit(dropped_list(other), 70)
    with pytest.raises(CorruptError, match=r"\.dropped is damaged: its digest is not the manifest's"):
        push(other, in_memory())


@pytest.mark.parametrize("suffix", ["lmdb", "meta"])
def test_a_damaged_store_is_not_pushed(copy: Path, suffix: str) -> None:
    folder = in_memory()
    path = copy / "shards" / f"g1.{suffix}"
    flip_bit(path, 4 * path.stat().st_size)
    with pytest.raises(CorruptError, match=rf"g1\.{suffix} is damaged: its digest is not the manifest's"):
        push(copy, folder)
    assert f"shards/g1.{suffix}" not in {file.name for file in folder.names()}
    assert "manifest.json" not in {file.name for file in folder.names()}
    path.unlink()
    with pytest.raises(CorruptError, match="has lost files"):
        push(copy, folder)


def test_a_damaged_object_is_not_pulled(copy: Path, objects: ObjectFolder, tmp_path: Path) -> None:
    data = objects.read("shards/g1.lmdb")
    objects.write("shards/g1.lmdb", data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CorruptError, match=r"shards/g1\.lmdb is damaged: its digest is not the manifest's"):
        pull(objects, tmp_path / "pulled.store")
    objects.write("shards/g1.lmdb", data[:-1])
    with pytest.raises(CorruptError, match="the manifest says that it is longer"):
        pull(objects, tmp_path / "pulled.store")
    assert not (tmp_path / "pulled.store").exists()
    objects.write("shards/g1.lmdb", data)
    done = pull(objects, tmp_path / "pulled.store")
    assert done.num_bytes == len(data)  # all else was there
    assert tree(tmp_path / "pulled.store" / "shards") == tree(copy / "shards")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_storage_that_ignores_put_if_absent_is_refused(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = in_memory()

    def overwrites(self: ObjectFolder, name: str, data: bytes) -> bool:
        self.write(name, data)
        return True

    monkeypatch.setattr(ObjectFolder, "is_put_if_absent", overwrites)
    with pytest.raises(StoreError, match="does not honour put-if-absent"):
        push(copy, folder)
    assert list(folder.names()) == []


def test_the_commands_say_what_was_sent(copy: Path, tmp_path: Path, s3: S3Bucket) -> None:
    url = s3.url("a b/photos.store")
    done = call("store", "push", copy, url, *s3.arguments)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"{url}: 4 files with ")
    assert done.out.endswith("generation 2 with 53 samples\n")
    again = call("store", "push", copy, url, *s3.arguments, "--json")
    assert again.json["files"] == 0
    pulled = call("store", "pull", url, tmp_path / "pulled.store", *s3.arguments).done()
    assert pulled.out.startswith(f"{tmp_path / 'pulled.store'}: 53 samples in 2 shards, generation 2; ")
    assert SECRET not in done.out + again.out + pulled.out + "".join(map(str, tree(copy).values()))
    wrong = call("store", "push", copy, "s4://bucket/photos.store").fails(
        "s4:// is not a kind of store that Bucketline knows", code=2
    )
    assert wrong.out == ""
    call("store", "push", copy, tmp_path / "elsewhere").fails("is not a URL", code=2)


def packed_in(objects: ObjectFolder, path: Path) -> set[str]:
    pull(objects, path)
    return {name.partition("/")[0] for name in ids_of(path)}


@pytest.mark.parametrize("form", [IMAGES, COLUMNS], ids=["images", "columns"])
def test_writers_without_a_common_disk_commit_for_themselves_and_their_folders_are_gone(tmp_path: Path, form: Form) -> None:
    objects, work = in_memory(), tmp_path / "work"
    working = WorkingStore(objects, work)
    with working.held(), working.writing(form.writer(work)._schema) as manifest:
        pass
    for name in ("a", "b"):
        with own_working_store(objects, tmp_path / "workers") as own, own.sender(manifest, name, is_first=False) as sender:
            with form.part(own.path, name) as writer:
                form.add(writer, samples_of({"train/64x64": 5, "val/64x64": 2}, f"{name}/"))
            for shard in writer.sealed:
                sender.put(shard)
            sender.finish(lambda: None)
            own.publish(manifest, writer.sealed)
    assert packed_in(objects, tmp_path / "s") == {"a", "b"}
    assert not list((tmp_path / "workers").iterdir())


def test_a_writer_removes_what_killed_ones_left_and_leaves_living_ones_alone(tmp_path: Path) -> None:
    objects, parent = in_memory(), tmp_path / "workers"
    with own_working_store(objects, parent) as living:
        (parent / "killed").mkdir()
        (parent / "killed.lock").touch()
        with own_working_store(objects, parent):
            assert living.path.exists()
            assert not (parent / "killed").exists()


FAULTS = (
    *(Fault.MISSING, Fault.SHORT_RANGE, Fault.SHORT_LENGTH, Fault.CUT, Fault.LONG_LENGTH),
    *(Fault.HUGE_LENGTH, Fault.WHOLE, Fault.MORE, Fault.WRONG_BYTE, Fault.INTERNAL),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pulled")
    store = make_store(path / "a.store", samples_of({"train/64x64": 9}), samples_of({"train/64x64": 5}, "b/"))
    push(store.path, ObjectFolder.open(f"file://{path}/served/a"))
    return path


def reaching(server: RangeServer, deadline_s: float) -> ObjectFolder:
    return ObjectFolder.open(f"{server.url}/a", RemoteOptions(deadline_s=deadline_s))


@pytest.mark.parametrize("fault", FAULTS)
def test_one_wrong_answer_does_not_end_a_pull(fault: Fault, made: Path, tmp_path: Path) -> None:
    once = Schedule([fault] * 2, concerns=lambda path: path.endswith((".lmdb", ".meta")))
    with RangeServer(made / "served", schedule=once) as server:
        pulled = pull(reaching(server, 20.0), tmp_path / "b.store")
    assert (pulled.samples, once.given) == (14, 2)
    for path in (made / "a.store" / "shards").iterdir():
        assert (tmp_path / "b.store" / "shards" / path.name).read_bytes() == path.read_bytes()


def test_what_stays_missing_ends_a_pull_within_the_deadline(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "served", tmp_path / "served")
    (tmp_path / "served" / "a" / "shards" / "g1.meta").unlink()
    with RangeServer(tmp_path / "served") as server:
        begun = time.monotonic()
        with pytest.raises(MissingObjectError, match=r"g1\.meta is missing"):
            pull(reaching(server, 8.0), tmp_path / "b.store")
        assert time.monotonic() - begun < 30.0  # 4 s on a quiet machine: after half of its deadline nothing is tried again
        assert server.statistics.refused > 2


def test_what_stays_wrong_ends_a_pull_after_a_few_tries(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "served", tmp_path / "served")
    flip_bit(tmp_path / "served" / "a" / "shards" / "g1.meta", 4000)
    with RangeServer(tmp_path / "served") as server:
        with pytest.raises(CorruptError, match=r"g1\.meta is damaged: its digest is not the manifest's"):
            pull(reaching(server, 60.0), tmp_path / "b.store")
        assert server.statistics.gets["/a/shards/g1.meta"] == 3


def test_verifying_waits_for_no_deadline_where_objects_are_missing(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "served", tmp_path / "served")
    for name in ("g0.meta", "g1.meta"):
        (tmp_path / "served" / "a" / "shards" / name).unlink()
    with RangeServer(tmp_path / "served") as server:
        begun = time.monotonic()
        found = verify_folder(reaching(server, 60.0), lambda _: None, 1)
        assert [fault.shard for fault in found.corrupt] == ["g0", "g1"]
        assert time.monotonic() - begun < 30.0
