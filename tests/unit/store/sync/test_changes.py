"""Changes in object storage, by functions and commands: as on a disk, and nothing is lost if two are made at once."""

from __future__ import annotations

import dataclasses
import gc
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bucketline.bench.fixtures.range_server import RangeServer
from bucketline.errors import CorruptError, StoreError
from bucketline.store import Store
from bucketline.store.change import commit as commit_module
from bucketline.store.change.commit import drop, restore
from bucketline.store.change.compact import UNLISTED_S, collect, compact
from bucketline.store.folder import ListedFile
from bucketline.store.remote.generations import commit, listed_generations, newest_generation, read_generation
from bucketline.store.remote.objects import ObjectFolder
from bucketline.store.sync.push_pull import pull, push
from bucketline.store.transfer import pending_shards
from bucketline.store.verify.verify import verify, verify_folder
from bucketline.store.write import publish
from tests import object_storage
from tests.commands import call
from tests.kit import add_samples, everything, ids_of, make_store, samples_of, store_writer, tree
from tests.object_storage import SECRET, S3Bucket, in_memory

DROPPED = ["first/train/64x64/3.png", "second/train/96x64/0.png"]


@pytest.fixture(params=["memory", "s3"])
def folder(request: pytest.FixtureRequest, copy: Path) -> ObjectFolder:
    objects: ObjectFolder = in_memory() if request.param == "memory" else request.getfixturevalue("s3").folder("a.store")
    push(copy, objects)
    return objects


def pulled(objects: ObjectFolder, path: Path) -> Store:
    pull(objects, path)
    store = Store.open(path)
    found = verify(store, lambda _: None, 1)
    assert not found.corrupt
    assert not found.strays
    return store


def names(objects: ObjectFolder) -> set[str]:
    return {file.name for file in objects.names()}


def aged(monkeypatch: pytest.MonkeyPatch, seconds: float, below: str = "") -> None:
    entries = ObjectFolder.names

    def older(self: ObjectFolder, prefix: str = "") -> Iterator[ListedFile]:
        for entry in entries(self, prefix):
            age = seconds if entry.name.startswith(below) else 0
            yield dataclasses.replace(entry, modified_s=entry.modified_s - age)

    monkeypatch.setattr(ObjectFolder, "names", older)


def test_a_drop_is_the_same_as_on_a_disk(folder: ObjectFolder, copy: Path, tmp_path: Path) -> None:
    dry = drop(folder, DROPPED, dry_run=True)
    assert (dry.generation, dry.samples) == (2, 51)
    assert newest_generation(folder).generation == 2
    done = drop(folder, DROPPED)
    drop(copy, DROPPED)
    assert (done.generation, done.samples) == (3, 51)
    assert everything(pulled(folder, tmp_path / "pulled.store")) == everything(Store.open(copy))
    with pytest.raises(StoreError, match=r"a\.store has already withdrawn 'first/train/64x64/3\.png'"):
        drop(folder, DROPPED)


def test_a_drop_takes_six_requests_besides_an_index_a_shard_and_another_one_for_a_list_that_is_there(
    s3: S3Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = [samples_of({"train/64x64": 3}, f"{n}/") for n in range(12)]
    make_store(tmp_path / "many.store", *samples)
    objects, requests, bare = s3.folder("many.store"), list[str](), object_storage._Atomic.__call__
    push(tmp_path / "many.store", objects)

    def counted(self: Any, environ: dict[str, Any], start_response: Any) -> Any:
        requests.append(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}")
        return bare(self, environ, start_response)

    monkeypatch.setattr(object_storage._Atomic, "__call__", counted)
    for n, most in ((4, 6), (7, 7)):
        requests.clear()
        publish._indexes.clear()
        drop(objects, [samples[n][0].id, samples[n + 1][2].id])
        own = [one for one in requests if not one.endswith(".meta")]
        assert (len(own), len(requests) - len(own)) == (most, len(samples)), own
    for ids, words in ((["0/nothing.png"], "has no sample"), ([samples[4][0].id], "has already withdrawn")):
        before = names(objects)
        with pytest.raises(StoreError, match=words):
            drop(objects, [samples[5][0].id, *ids])
        assert names(objects) == before
    assert len(ids_of(pulled(objects, tmp_path / "pulled.store").path)) == 36 - 4


def test_storage_that_ignores_put_if_absent_is_refused_and_keeps_its_store(
    objects: ObjectFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overwrites(self: ObjectFolder, name: str, data: bytes) -> bool:
        self.write(name, data)
        return True

    before = {name: objects.read(name) for name in names(objects)}
    monkeypatch.setattr(ObjectFolder, "is_put_if_absent", overwrites)
    with pytest.raises(StoreError, match="does not honour put-if-absent"):
        drop(objects, DROPPED)
    assert {name: objects.read(name) for name in names(objects)} == before


@pytest.mark.parametrize("name", ["shards/g1.meta", "list"])
def test_a_drop_by_what_a_server_answers_wrongly_is_refused(objects: ObjectFolder, name: str) -> None:
    drop(objects, DROPPED[1:])
    name = next(own for own in names(objects) if own.endswith(".dropped")) if name == "list" else name
    data = objects.read(name)
    objects.write(name, data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])
    before = names(objects)
    publish._indexes.clear()
    with pytest.raises(CorruptError, match=r"is not the file that the manifest lists|of its index do not match"):
        drop(objects, DROPPED[:1])
    assert names(objects) == before


def test_a_generation_whose_own_file_an_interrupted_push_left_out_gets_it_by_the_next_change(objects: ObjectFolder) -> None:
    objects.remove(["generations/2.json"])
    drop(objects, DROPPED)
    assert {"generations/2.json", "generations/3.json"} <= names(objects)
    assert not [name for name in names(objects) if "probe" in name]


def test_a_listing_that_comes_late_costs_a_drop_another_try(objects: ObjectFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    drop(objects, DROPPED[:1])
    manifest = objects.read("generations/2.json")
    with monkeypatch.context() as patched:
        entries, hint = ObjectFolder.names, ObjectFolder.read
        patched.setattr(
            ObjectFolder, "names", lambda *at: (own for own in entries(*at) if not own.name.startswith("generations/3"))
        )
        patched.setattr(
            ObjectFolder, "read", lambda self, name, *most: manifest if name == "manifest.json" else hint(self, name, *most)
        )
        patched.setattr(commit_module, "pause_after", lambda *_: 0.0)
        assert drop(objects, DROPPED[1:]).generation == 4
    assert newest_generation(objects).samples == 51


def test_a_compaction_is_the_same_as_on_a_disk(folder: ObjectFolder, copy: Path, tmp_path: Path) -> None:
    drop(folder, DROPPED)
    drop(copy, DROPPED)
    dry = compact(folder, shard_bytes=1 << 24, dry_run=True)
    assert dry.rewritten == ("g0", "g1")
    done = compact(folder, shard_bytes=1 << 24, gc_older_than_s=0)
    compact(copy, shard_bytes=1 << 24)
    assert (done.generation, done.rows, done.dropped) == (4, 51, 2)
    assert done.collected is not None
    assert done.collected.generations == (2, 3)
    assert "g0.lmdb" in done.collected.files
    assert everything(pulled(folder, tmp_path / "pulled.store")) == everything(Store.open(copy))
    left = {name.partition(".")[0] for name in names(folder)}
    assert left == {"manifest", "generations/4", f"shards/{done.written[0]}"}
    assert not verify_folder(folder, lambda _: None, 1).corrupt


def test_an_earlier_generation_is_restored(objects: ObjectFolder, copy: Path, tmp_path: Path) -> None:
    drop(objects, DROPPED)
    compact(objects, shard_bytes=1 << 24)
    assert restore(objects, 2, dry_run=True)[1].generation == 2
    before, done = restore(objects, 2)
    assert (done.generation, before.samples, done.samples) == (5, 51, 53)
    assert everything(pulled(objects, tmp_path / "pulled.store")) == everything(Store.open(copy))
    assert restore(objects, 2)[1] == done
    restore(objects, 3)  # with its lists of dropped rows
    assert set(ids_of(pulled(objects, tmp_path / "third.store"))) == set(ids_of(copy)) - set(DROPPED)
    collect(objects, 0)
    with pytest.raises(StoreError, match=r"a\.store has no generation 2: it was removed by"):
        restore(objects, 2)


def test_two_changes_at_once_are_both_made(
    folder: ObjectFolder, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    barrier, waited = threading.Barrier(2), threading.local()

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
    expected = set(ids_of(copy)) - set(DROPPED)
    assert set(ids_of(pulled(folder, tmp_path / "pulled.store"))) == expected
    newest = newest_generation(folder)
    listed = {entry.name for n in (2, 3, 4) for entry in read_generation(folder, n, newest).shards}
    assert {name.removeprefix("shards/").partition(".")[0] for name in names(folder) if name.startswith("shards/")} == listed


def test_an_overtaken_compaction_copies_once(
    objects: ObjectFolder, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drop(copy, DROPPED)
    push(copy, objects)
    expected = set(ids_of(copy)) | {sample.id for sample in samples_of({"val/64x64": 3}, "new/")}
    copied = []

    def late(*args: object, **more: object) -> bool:
        monkeypatch.setattr(commit_module, "commit", commit)
        with store_writer(copy) as writer:
            add_samples(writer, samples_of({"val/64x64": 3}, "new/"))
        push(copy, objects)
        return commit(*args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(commit_module, "commit", late)
    done = compact(objects, shard_bytes=1 << 24, on_bytes=lambda done, total: copied.append((done, total)))
    assert done.generation == 5
    assert [now == of for now, of in copied].count(True) == 1
    assert [entry.name for entry in newest_generation(objects).shards][:1] == list(done.written)
    assert set(ids_of(pulled(objects, tmp_path / "pulled.store"))) == expected


def test_changes_leave_no_open_file_in_the_process(objects: ObjectFolder, copy: Path) -> None:
    ids, num_open = sorted(set(ids_of(copy))), list[int]()
    for sample_id in ids[:6]:
        drop(objects, [sample_id])
        gc.collect()
        num_open.append(len(list(Path("/proc/self/fd").iterdir())))
    assert num_open[-1] <= num_open[2]


def test_the_same_change_twice_at_once_uses_different_lists(folder: ObjectFolder, tmp_path: Path, copy: Path) -> None:
    ids = sorted(set(ids_of(copy)))[:4]
    barrier = threading.Barrier(4)

    def run(sample_id: str) -> None:
        barrier.wait()
        drop(folder, [sample_id])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, ids))
    assert newest_generation(folder).generation == 6
    assert set(ids_of(pulled(folder, tmp_path / "pulled.store"))) == set(ids_of(copy)) - set(ids)


def test_a_change_killed_before_it_commits(
    objects: ObjectFolder, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(commit_module, "commit", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            drop(objects, DROPPED)
        with pytest.raises(ZeroDivisionError):
            compact(objects, shard_bytes=1 << 24)
    assert newest_generation(objects).generation == 2
    assert everything(pulled(objects, tmp_path / "pulled.store")) == everything(Store.open(copy))
    assert drop(objects, DROPPED).generation == 3


def test_what_is_wrong_in_the_folder_on_this_disk_is_named_by_that_folder(objects: ObjectFolder, tmp_path: Path) -> None:
    for folder in ("made", "elsewhere"):
        (tmp_path / folder).mkdir()
    (tmp_path / "made" / "shards").symlink_to(tmp_path / "elsewhere")
    work = commit_module.WorkFolder(made=tmp_path / "made", cache=None)
    with pytest.raises(StoreError, match=f"^{tmp_path}/made/shards is a link"):
        commit_module.commit_change(objects, lambda base: base.manifest, work=work)


def test_what_a_generation_lists_is_not_collected(
    objects: ObjectFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    objects.write("shards/upload.lmdb", b"another writer's")
    objects.write(theirs := f"generations/3-{'7' * 32}.dropped", b"another writer's")
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
    assert collect(objects, 1e9).files == ("upload.lmdb", theirs)
    assert pulled(objects, tmp_path / "pulled.store").manifest.samples == 51


def test_what_a_damaged_generation_listed_goes_by_the_notes_of_others(
    objects: ObjectFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    compact(objects, shard_bytes=1 << 30)
    before = newest_generation(objects)
    assert {"g0", "g1"} <= set(before.retired)
    for number in listed_generations(objects):
        if number != before.generation:
            objects.write(f"generations/{number}.json", b"{}")
    removed, copy = list[str](), ObjectFolder.remove

    def remove(self: ObjectFolder, names: Iterable[str]) -> None:
        listed = list(names)
        removed.extend(name for name in listed if not name.startswith("pending/"))
        copy(self, listed)

    monkeypatch.setattr(ObjectFolder, "remove", remove)
    gone = collect(objects, 0).files
    assert {f"{shard}.{kind}" for shard in ("g0", "g1") for kind in ("lmdb", "meta")} <= set(gone)
    kinds = [name.rpartition(".")[2] for name in removed if name.startswith("shards/")]
    assert kinds == sorted(kinds, key=["lmdb", "meta"].index)  # as on a disk: a kill in between is harmless
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


def test_damaged_objects_are_pushed_again(objects: ObjectFolder, copy: Path, tmp_path: Path) -> None:
    data = bytearray(objects.read("shards/g1.lmdb"))
    data[len(data) // 2] ^= 1
    objects.write("shards/g1.lmdb", bytes(data))
    objects.remove(["shards/g0.meta"])
    assert {fault.shard for fault in verify_folder(objects, lambda _: None, 1).corrupt} == {"g0", "g1"}
    objects.remove(["shards/g1.lmdb"])
    push(copy, objects)
    assert everything(pulled(objects, tmp_path / "pulled.store")) == everything(Store.open(copy))


def test_an_old_hint_hides_no_generation_from_gc_or_a_change(objects: ObjectFolder, copy: Path, tmp_path: Path) -> None:
    """A slow writer's, or one that somebody has put back; the generations after it may be gone, and it names none of them."""
    hint, gone = objects.read("manifest.json"), [*DROPPED, *(f"first/train/64x64/{n}.png" for n in (4, 5))]
    for sample_id in gone[:3]:
        drop(objects, [sample_id])
    for _ in range(2):  # the second time there is nothing but the newest one
        objects.write("manifest.json", hint)
        collect(objects, 0)
        assert (newest_generation(objects).generation, list(listed_generations(objects))) == (5, [5])
    objects.write("manifest.json", hint)
    assert drop(objects, gone[3:]).generation == 6
    assert list(listed_generations(objects)) == [5, 6]
    assert set(ids_of(pulled(objects, tmp_path / "pulled.store"))) == set(ids_of(copy)) - set(gone)


def test_a_slow_collection_hides_nothing_that_is_committed_meanwhile(
    objects: ObjectFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overtaken(*arguments: Any) -> tuple[set[str], list[str]]:
        monkeypatch.undo()
        drop(objects, DROPPED)
        drop(objects, ["first/train/64x64/4.png"])
        collect(objects, 0)
        return pending_shards(*arguments)

    # called once the collection has read which generation is the newest
    monkeypatch.setattr("bucketline.store.change.compact.pending_shards", overtaken)
    collect(objects, 86400)
    assert newest_generation(objects).generation == 4


def test_verify_tells_its_progress_and_names_what_is_missing_or_of_another_length(objects: ObjectFolder) -> None:
    read = list[int]()
    found = verify_folder(objects, read.append, 1)
    assert (found.rows, found.corrupt) == (53, ())
    assert sum(read) == sum(entry.lmdb.num_bytes for entry in newest_generation(objects).shards)
    objects.remove(["shards/g0.meta"])
    objects.write("shards/g1.lmdb", objects.read("shards/g1.lmdb")[:-1])
    errors = [fault.error for fault in verify_folder(objects, lambda _: None, 1).corrupt]
    assert any("g0.meta is missing" in error for error in errors)
    assert any("the manifest says that it is longer" in error for error in errors)


def test_a_writer_that_others_get_ahead_of_pauses_between_its_tries(
    objects: ObjectFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused, others = list[int](), iter(["other 1", "other 2"])

    def pause_after(tries: int, _: float) -> float:
        paused.append(tries)
        return 0.0

    monkeypatch.setattr(commit_module, "pause_after", pause_after)

    def ruled(name: str) -> Any:
        return lambda base: dataclasses.replace(base.manifest, rules={**base.manifest.rules, name: 1})

    def change(base: Any) -> Any:
        if (other := next(others, None)) is not None:
            commit_module.commit_change(objects, ruled(other))
        return ruled("own")(base)

    _, after = commit_module.commit_change(objects, change)
    assert {"other 1", "other 2", "own"} <= after.rules.keys()
    assert paused == [1, 2]


ID = "first/train/64x64/3.png"


@pytest.fixture
def url(copy: Path, s3: S3Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("BUCKETLINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    url = s3.url("photos.store")
    assert call("store", "push", copy, url).code == 0
    return url


def test_a_store_is_read_by_its_url(url: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    for command in (["info"], ["ls"], ["ls", "--json"], ["ls", "--match", "*/val/*"], ["verify"]):
        here, there = (call("store", command[0], place, *command[1:]) for place in (copy, url))
        assert (there.code, there.err, SECRET in there.out) == (0, "", False)
        if command != ["info"]:  # which says how much it is on the disk
            assert there.out == here.out
    report = call("store", "info", url, "--json").json
    assert (report["samples"], report["lost_shards"]) == (53, [])
    assert report["disk_bytes"] > sum(shard.lmdb.num_bytes for shard in Store.open(copy).manifest.shards)
    for place, name in ((copy, "here"), (url, "there")):
        assert call("store", "get", place, ID, "-o", tmp_path / f"{name}.safetensors").code == 0
        assert call("store", "export", place, tmp_path / name, "--format", "safetensors", "--split", "val").code == 0
    assert (tmp_path / "here.safetensors").read_bytes() == (tmp_path / "there.safetensors").read_bytes()
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).rglob("*.safetensors")} for name in ("here", "there")]
    assert files[0] == files[1]
    assert len(files[0]) == 6
    assert not [name for name, data in tree(tmp_path).items() if SECRET.encode() in data]


def test_a_store_is_changed_by_its_url(url: str, tmp_path: Path) -> None:
    assert call("store", "drop", url, ID).done().out.startswith(f"{url}: 1 sample dropped, 52 stay; generation 3\n")
    assert call("store", "get", url, ID, "-o", tmp_path / "x").code == 1
    done = call("store", "compact", url).done()
    assert f"`store compact {url} --gc` removes them later" in done.out
    listed = call("store", "restore", url)
    assert [line.partition(",")[0] for line in listed.out.splitlines()] == [
        "generation 4: 52 samples",
        "generation 3: 52 samples",
        "generation 2: 53 samples",
    ]
    assert call("store", "restore", url, "2").out == f"{url}: generation 2 restored, 53 samples (there were 52); generation 5\n"
    collected = call("store", "compact", url, "--gc", "--older-than", "0s", "--json").json["collected"]
    assert collected["generations"] == [2, 3, 4, 5]


def test_what_is_lost_or_damaged_shows(url: str, s3: S3Bucket) -> None:
    objects = s3.folder("photos.store")
    objects.write("shards/g1.lmdb", objects.read("shards/g1.lmdb")[:-1])
    call("store", "info", url).fails("lost: shard g1 (14 samples): g1.lmdb has ", f"`store repair {url}`")
    faults = call("store", "verify", url, "--json")
    assert faults.code == 1
    assert [fault["shard"] for fault in faults.json["corrupt"]] == ["g1"]
    repaired = call("store", "repair", url).done()
    assert f"{url}: 14 samples dropped, 39 stay; generation 3" in repaired.out
    assert call("store", "verify", url).code == 1  # the older generation still lists it
    assert call("store", "compact", url, "--gc", "--older-than", "0s").code == 0
    assert call("store", "verify", url).code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["info", "s3:/bucket/a.store"], "one slash after the scheme; write s3://bucket/a.store"),
        (["drop", "https://me:hidden@host/a.store?key=hidden", "a"], "has a query"),
        (["info", "s3://bucket/a.store", "--store-option", "aws_secret_access_key=hidden"], "is a secret"),
        (["info", "s3://bucket/a.store", "--cache-bytes", "many"], "--cache-bytes is 'many'"),
    ],
)
def test_a_place_that_cannot_be_is_refused_in_words(arguments: list[str], message: str) -> None:
    done = call("store", *arguments).fails(message, code=2)
    assert done.out == ""
    assert "hidden" not in done.err.replace("secret_access_key", "")


def test_a_store_on_a_web_server_is_read_and_not_written(copy: Path, tmp_path: Path) -> None:
    assert call("store", "push", copy, f"file://{tmp_path}/www/a.store").code == 0
    with RangeServer(tmp_path / "www") as server:
        url = f"{server.url}/a.store"
        info = call("store", "info", url, "--cache", tmp_path / "cache", "--json")
        assert (info.json["samples"], info.json["lost_shards"]) == (53, [])
        assert call("store", "verify", url).code == 0
        with_password = url.replace("://", "://me:hidden@")
        done = call("store", "pull", with_password, tmp_path / "pulled.store")
        assert (done.code, done.err) == (0, "")
        refused = call("store", "push", copy, with_password).fails("web servers are read only")
        assert "hidden" not in done.out + refused.err + refused.out
        (tmp_path / "www" / "a.store" / "shards" / "g1.meta").unlink()
        assert "g1.meta is missing" in call("store", "info", url, "--cache", tmp_path / "cache").err
