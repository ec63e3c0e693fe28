"""Stores in object storage: pushed and pulled bit for bit, in parts, again after an interruption, by several at once."""

from __future__ import annotations

import dataclasses
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bucketline.errors import CorruptError, StoreError, UsageError
from bucketline.store import Store
from bucketline.store.change.compact import compact
from bucketline.store.change.drop import drop
from bucketline.store.remote import objects as objects_module
from bucketline.store.remote.generations import newest_generation, read_generation
from bucketline.store.remote.objects import ObjectFolder
from bucketline.store.sync.push_pull import pull, push
from bucketline.store.transfer import files
from bucketline.store.verify.verify import verify
from tests.commands import call
from tests.kit import (
    ANY,
    IMAGES,
    RAGGED,
    Sample,
    add_samples,
    everything,
    flip_bit,
    make_store,
    samples_of,
    store_writer,
    tree,
)
from tests.object_storage import SECRET, S3Bucket, in_memory

MORE = {"train/64x64": 4, "val/64x64": 2}
FORM = dataclasses.replace(RAGGED, columns=IMAGES.columns)


@pytest.fixture
def own(store: Store, tmp_path: Path) -> Path:
    """A copy of the store of two shards and generations, to be changed."""
    shutil.copytree(store.path, tmp_path / "own.store")
    return tmp_path / "own.store"


@pytest.fixture(params=["memory", "file", "s3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectFolder:
    if request.param == "memory":
        return in_memory()
    if request.param == "file":
        return ObjectFolder.open(f"file://{tmp_path}/bucket/a.store")
    bucket: S3Bucket = request.getfixturevalue("s3")
    return bucket.folder("a.store")


def expect_whole(path: Path) -> Store:
    store = Store.open(path)
    result = verify(store, lambda _: None, 1)
    assert not result.corrupt
    assert not result.strays
    return store


def files_of_shards(path: Path) -> dict[str, bytes]:
    return {name: data for name, data in tree(path / "shards").items() if not name.endswith("/")}


def add_more(path: Path, prefix: str) -> list[Sample]:
    samples = samples_of(MORE, prefix)
    with store_writer(path) as writer:
        add_samples(writer, samples)
    return samples


def test_a_store_is_pushed_and_pulled_bit_for_bit(folder: ObjectFolder, own: Path, tmp_path: Path) -> None:
    (own / "rejects.jsonl").write_text('{"id": "a"}\n')
    done = push(own, folder)
    assert (done.generation, done.samples, done.is_committed) == (2, 53, True)
    pulled = pull(folder, tmp_path / "pulled.store")
    assert (pulled.generation, pulled.samples, pulled.shards, pulled.is_update) == (2, 53, 2, False)
    assert files_of_shards(tmp_path / "pulled.store") == files_of_shards(own)
    assert (tmp_path / "pulled.store" / "manifest.json").read_bytes() == (own / "manifest.json").read_bytes()
    assert (tmp_path / "pulled.store" / "rejects.jsonl").read_text() == '{"id": "a"}\n'
    expect_whole(tmp_path / "pulled.store")
    again = push(own, folder)
    assert (again.is_committed, again.files, again.generation) == (False, 0, 2)


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_files_of_many_parts_are_put_together_in_order(
    kind: str, own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (files, objects_module):
        monkeypatch.setattr(module, "PART_BYTES", 1000)  # a hundred parts of each shard
    folder = in_memory() if kind == "memory" else ObjectFolder.open(f"file://{tmp_path}/bucket/a.store")
    push(own, folder)
    for name in ("g0.lmdb", "g1.lmdb", "g0.index"):
        assert folder.read(f"shards/{name}") == (own / "shards" / name).read_bytes()
    pull(folder, tmp_path / "pulled.store")
    assert files_of_shards(tmp_path / "pulled.store") == files_of_shards(own)


def test_columns_of_any_kind_go_there_and_back(tmp_path: Path) -> None:
    made = ANY.make_store(tmp_path / "free.store", ANY.samples({"train/64x64": 5, "val/64x64": 2}))
    folder = in_memory()
    push(made.path, folder)
    pull(folder, tmp_path / "pulled.store")
    assert files_of_shards(tmp_path / "pulled.store") == files_of_shards(made.path)


def test_ragged_groups_go_there_and_back(tmp_path: Path) -> None:
    items = FORM.samples({"train/64x64": 5, "val/64x64": 3})
    made = FORM.make_store(tmp_path / "ragged.store", items)
    folder = in_memory()
    push(made.path, folder)
    pull(folder, tmp_path / "pulled.store")
    assert files_of_shards(tmp_path / "pulled.store") == files_of_shards(made.path)
    drop(folder, [items[0].id])
    compact(folder, shard_bytes=1 << 24)
    pull(folder, tmp_path / "compact.store")
    FORM.expect(expect_whole(tmp_path / "compact.store"), items[1:])


def test_only_what_is_new_is_sent_and_pulled(folder: ObjectFolder, own: Path, tmp_path: Path) -> None:
    push(own, folder)
    pull(folder, tmp_path / "pulled.store")
    add_more(own, "third/")
    drop(own, ["first/train/64x64/3.png"])
    done = push(own, folder)
    assert done.files == 4
    assert done.generation == newest_generation(folder).generation == 4
    update = pull(folder, tmp_path / "pulled.store")
    assert (update.is_update, update.generation, update.num_bytes) == (True, 4, done.num_bytes)
    assert everything(expect_whole(tmp_path / "pulled.store")) == everything(Store.open(own))
    assert pull(folder, tmp_path / "pulled.store").num_bytes == 0
    add_more(tmp_path / "pulled.store", "fourth/")  # the pulled store is a store like any other
    assert push(tmp_path / "pulled.store", folder).generation == 5
    with pytest.raises(StoreError, match=r"has generation 5 with .* is not a generation of .*was changed there"):
        push(own, folder)


def test_generations_between_two_pushes_are_stood_for_by_the_newest(own: Path, tmp_path: Path) -> None:
    folder = in_memory()
    push(own, folder)
    add_more(own, "third/")
    drop(own, ["first/train/64x64/3.png"])
    assert push(own, folder).generation == 4
    held = everything(Store.open(own))
    for number in (3, 4):
        document = read_generation(folder, number, newest_generation(folder))
        assert everything(Store.at(folder, document, tmp_path / "cache")) == held


def test_a_push_is_refused_if_the_store_no_longer_has_the_generation_that_is_there(own: Path) -> None:
    folder = in_memory()
    push(own, folder)
    add_more(own, "third/")
    compact(own, shard_bytes=1 << 24, gc_older_than_s=0)
    with pytest.raises(StoreError, match=r"has generation 2 with 53 samples, .*`store compact --gc` has removed it here"):
        push(own, folder)
    assert newest_generation(folder).generation == 2


def test_an_interrupted_push_leaves_the_old_generation_and_is_continued(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = in_memory()
    push(own, folder)
    add_more(own, "third/")
    add_more(own, "fourth/")
    with monkeypatch.context() as patched:
        patched.setattr("bucketline.store.sync.push_pull.commit", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            push(own, folder)
    assert newest_generation(folder).generation == 2
    pull(folder, tmp_path / "before.store")
    assert expect_whole(tmp_path / "before.store").manifest.samples == 53
    done = push(own, folder)
    assert (done.generation, done.files) == (4, 0)
    # between the commits of two generations
    add_more(own, "fifth/")
    compact(own, shard_bytes=1 << 24)
    from bucketline.store.remote.generations import commit

    with monkeypatch.context() as patched:
        patched.setattr(
            "bucketline.store.sync.push_pull.commit",
            lambda folder, number, data, **more: (commit(folder, number, data, **more) and number < 5) or 1 / 0,
        )
        with pytest.raises(ZeroDivisionError):
            push(own, folder)
    assert newest_generation(folder).generation == 5
    assert push(own, folder).generation == 6


def test_what_was_left_long_ago_is_sent_again(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = in_memory()
    with monkeypatch.context() as patched:
        patched.setattr("bucketline.store.sync.push_pull.commit", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            push(own, folder)
    monkeypatch.setattr(files, "FRESH_S", -60.0)
    assert push(own, folder).files == 6
    assert push(own, folder).files == 0  # a generation lists it now


def test_another_state_of_the_store_is_refused(own: Path, tmp_path: Path) -> None:
    folder = in_memory()
    push(own, folder)
    shutil.copytree(own, tmp_path / "other.store")
    add_more(own, "mine/")
    add_more(tmp_path / "other.store", "theirs/")
    push(tmp_path / "other.store", folder)
    before = {file.name: folder.read(file.name) for file in folder.names()}
    with pytest.raises(StoreError, match="has generation 3 with 59 samples, which is not a generation of"):
        push(own, folder)
    add_more(own, "more/")
    with pytest.raises(StoreError, match="nothing was committed"):
        push(own, folder)
    with pytest.raises(StoreError, match="has changes that memory:"):
        pull(folder, own)
    third = make_store(tmp_path / "third.store", samples_of(MORE))
    with pytest.raises(StoreError, match="holds another store"):
        push(third.path, folder)
    with pytest.raises(UsageError, match="is another store than"):
        pull(folder, third.path)
    assert {file.name: folder.read(file.name) for file in folder.names()} == before


@pytest.mark.parametrize("kind", ["memory", "s3"])
def test_of_two_states_that_are_pushed_at_once_one_wins(
    kind: str, own: Path, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = in_memory() if kind == "memory" else request.getfixturevalue("s3").folder("a.store")
    push(own, folder)
    paths = [own, tmp_path / "other.store"]
    shutil.copytree(paths[0], paths[1])
    for n, path in enumerate(paths):
        add_more(path, f"writer {n}/")
    barrier, won, lost = threading.Barrier(2), [], []
    from bucketline.store.remote.generations import commit

    def together(*args: object, **more: object) -> bool:
        barrier.wait(30)
        return commit(*args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr("bucketline.store.sync.push_pull.commit", together)

    def run(path: Path) -> None:
        try:
            push(path, folder)
            won.append(path)
        except StoreError as error:
            lost.append(str(error))

    with ThreadPoolExecutor(len(paths)) as pool:
        list(pool.map(run, paths))
    assert len(won) == 1
    assert "is not a generation of" in lost[0]
    pull(folder, tmp_path / "pulled.store")
    assert everything(expect_whole(tmp_path / "pulled.store")) == everything(Store.open(won[0]))


def test_another_writers_list_of_dropped_rows_is_never_overwritten(own: Path, tmp_path: Path) -> None:
    folder = in_memory()
    push(own, folder)
    shutil.copytree(own, tmp_path / "other.store")
    drop(own, ["first/train/64x64/3.png"])
    drop(tmp_path / "other.store", ["first/train/64x64/4.png"])
    theirs = (tmp_path / "other.store" / "shards" / "g0.dropped-3").read_bytes()
    folder.write("shards/g0.dropped-3", theirs)  # their writer is about to commit
    with pytest.raises(StoreError, match=r"g0\.dropped-3 is another writer's"):
        push(own, folder)
    assert folder.read("shards/g0.dropped-3") == theirs
    assert push(tmp_path / "other.store", folder).generation == 3


def test_another_writers_shard_of_the_same_name_is_never_overwritten(own: Path, tmp_path: Path) -> None:
    folder = in_memory()
    push(own, folder)
    shutil.copytree(own, tmp_path / "other.store")
    for path, prefix in ((own, "mine/"), (tmp_path / "other.store", "theirs/")):
        with store_writer(path, shard_names="chosen{}") as writer:
            add_samples(writer, samples_of(MORE, prefix))
    theirs = (tmp_path / "other.store" / "shards" / "chosen0.index").read_bytes()
    folder.write("shards/chosen0.index", theirs)
    with pytest.raises(StoreError, match=r"chosen0\.index is another writer's"):
        push(own, folder)
    assert folder.read("shards/chosen0.index") == theirs


@pytest.mark.parametrize("suffix", ["lmdb", "index", "extents"])
def test_a_damaged_store_is_not_pushed(own: Path, suffix: str) -> None:
    folder = in_memory()
    path = own / "shards" / f"g1.{suffix}"
    flip_bit(path, 4 * path.stat().st_size)
    with pytest.raises(CorruptError, match=rf"g1\.{suffix} is damaged: its digest is not the manifest's"):
        push(own, folder)
    assert f"shards/g1.{suffix}" not in {file.name for file in folder.names()}
    assert "manifest.json" not in {file.name for file in folder.names()}
    path.unlink()
    with pytest.raises(CorruptError, match="has lost files"):
        push(own, folder)


def test_a_damaged_object_is_not_pulled(own: Path, tmp_path: Path) -> None:
    folder = in_memory()
    push(own, folder)
    data = folder.read("shards/g1.lmdb")
    folder.write("shards/g1.lmdb", data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CorruptError, match=r"shards/g1\.lmdb is damaged: its digest is not the manifest's"):
        pull(folder, tmp_path / "pulled.store")
    folder.write("shards/g1.lmdb", data[:-1])
    with pytest.raises(CorruptError, match="the manifest says that it is longer"):
        pull(folder, tmp_path / "pulled.store")
    assert not (tmp_path / "pulled.store").exists()
    folder.write("shards/g1.lmdb", data)
    done = pull(folder, tmp_path / "pulled.store")
    assert done.num_bytes == len(data)  # all else was there
    assert files_of_shards(tmp_path / "pulled.store") == files_of_shards(own)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_storage_that_ignores_put_if_absent_is_refused(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = in_memory()

    def overwrites(self: ObjectFolder, name: str, data: bytes) -> bool:
        self.write(name, data)
        return True

    monkeypatch.setattr(ObjectFolder, "create", overwrites)
    with pytest.raises(StoreError, match="does not honour put-if-absent"):
        push(own, folder)
    assert list(folder.names()) == []


def test_the_commands_say_what_was_sent(own: Path, tmp_path: Path, s3: S3Bucket) -> None:
    url = s3.url("a b/photos.store")
    done = call("store", "push", own, url, *s3.arguments)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"{url}: 6 files with ")
    assert done.out.endswith("generation 2 with 53 samples\n")
    again = call("store", "push", own, url, *s3.arguments, "--json")
    assert again.json["files"] == 0
    pulled = call("store", "pull", url, tmp_path / "pulled.store", *s3.arguments).done()
    assert pulled.out.startswith(f"{tmp_path / 'pulled.store'}: 53 samples in 2 shards, generation 2; ")
    assert SECRET not in done.out + again.out + pulled.out + "".join(map(str, tree(own).values()))
    wrong = call("store", "push", own, "s4://bucket/photos.store")
    assert (wrong.code, wrong.out) == (2, "")
    assert "s4:// is not a kind of store that Bucketline knows" in wrong.err
    call("store", "push", own, tmp_path / "elsewhere").fails("is not a URL", code=2)
