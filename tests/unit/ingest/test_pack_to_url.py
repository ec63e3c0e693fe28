"""`ingest pack SOURCE URL`: shards are made in a folder on a disk, sent, and committed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bucketline.errors import StoreError
from bucketline.ingest.packing import finish as finish_module
from bucketline.ingest.pipeline import slice_packer
from bucketline.ingest.pipeline.slice_packer import BATCHES_WAITING
from bucketline.store import Store, transfer
from bucketline.store.change import commit as commit_module
from bucketline.store.change.commit import drop
from bucketline.store.folder import ListedFile
from bucketline.store.format.manifest import Manifest
from bucketline.store.remote.generations import find_newest, newest_generation
from bucketline.store.remote.objects import ObjectFolder
from bucketline.store.sync import working
from bucketline.store.transfer import ShardSender
from bucketline.store.verify.verify import verify_folder
from bucketline.store.write.publish import lock_store, prepare_store
from tests import object_storage
from tests.commands import Ran, call, forked_ranks
from tests.kit import everything, ids_of
from tests.models import SMALL, write_images
from tests.object_storage import SECRET, S3Bucket, pulled


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectFolder:
    """The place of a store that is to be made, in this process's memory."""
    monkeypatch.setenv("BUCKETLINE_CACHE", str(tmp_path / "cache"))
    return object_storage.in_memory()


@pytest.fixture
def s3_place(s3: S3Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectFolder:
    """One on S3; commands reach it by the environment."""
    monkeypatch.setenv("BUCKETLINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    return s3.folder("photos.store")


def pack(source: Path, place: ObjectFolder | Path, model: Path, *more: object) -> Ran:
    where = place.url if isinstance(place, ObjectFolder) else place
    return call("ingest", "pack", source, where, "--model", model, *SMALL, "--json", *more)


def images_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.png"))


def add_images(source: Path, count: int, tmp_path: Path) -> None:
    """Let a source have so many images; those that it has stay as they are."""
    for name in write_images(tmp_path / "more", count):
        if not (source / name).exists():
            (tmp_path / "more" / name).replace(source / name)


def sent(place: ObjectFolder) -> set[str]:
    return {file.name for file in place.names("shards") if file.name.endswith(".lmdb")}


def test_a_pack_into_a_url_is_the_same_as_on_a_disk(s3_place: ObjectFolder, source: Path, model: Path, tmp_path: Path) -> None:
    (source / "damaged.png").write_bytes(b"nothing")
    done = pack(source, s3_place, model)
    assert (done.code, done.err) == (0, "")
    here = pack(source, tmp_path / "here.store", model)
    same = ("found", "packed", "unchanged", "rejected", "without_caption", "payload_bytes", "generation")
    assert {name: done.json[name] for name in same} == {name: here.json[name] for name in same}
    assert everything(pulled(s3_place, tmp_path / "pulled.store")) == everything(Store.open(tmp_path / "here.store"))
    assert [json.loads(line)["id"] for line in s3_place.read("rejects.jsonl").splitlines()] == ["damaged.png"]
    work = next((tmp_path / "cache-pack").iterdir())
    assert work.name.startswith("photos.store-")
    assert not list((work / "shards").iterdir())  # what was committed has left
    printed = call("ingest", "pack", source, s3_place.url, "--model", model, *SMALL).done()
    assert f"{s3_place.url}: generation 1, " in printed.out
    assert SECRET not in done.out + printed.out


def test_what_is_new_is_packed_and_what_is_gone_is_pruned(
    place: ObjectFolder, source: Path, model: Path, tmp_path: Path
) -> None:
    pack(source, place, model)
    first = sent(place)
    unchanged = pack(source, place, model).json
    assert (unchanged["unchanged"], unchanged["packed"], unchanged["generation"]) == (14, 0, 1)
    shutil.rmtree(tmp_path / "cache-pack")  # another machine
    gone = images_in(source)[0]
    (source / gone).unlink()
    add_images(source, 16, tmp_path)
    (source / gone).unlink()
    dry = pack(source, place, model, "--prune", "--dry-run").json
    assert (dry["unchanged"], dry["pruned"]) == (13, 1)
    assert dry["pruned_ids"] == [gone]
    assert not (tmp_path / "cache-pack").exists()  # a dry run makes no folder for shards
    done = pack(source, place, model, "--prune").done()
    report = done.json
    assert (report["unchanged"], report["pruned"], report["pruned_ids"], report["generation"]) == (13, 1, [gone], 2)
    assert report["packed"] == report["found"] - 13 > 0
    assert first < sent(place)
    assert len(sorted(ids_of(pulled(place, tmp_path / "pulled.store")))) == report["found"]


def test_a_store_that_has_lost_a_shard_is_refused(place: ObjectFolder, source: Path, model: Path) -> None:
    """By the shard's index, every image of it would look unchanged."""
    pack(source, place, model)
    place.remove(sent(place))
    for more in ((), ("--dry-run",)):
        pack(source, place, model, *more).fails(f"{place.url} has lost files of 1 shard with 14 samples")


def test_other_captions_are_encoded_with_stored_latents(place: ObjectFolder, source: Path, model: Path, tmp_path: Path) -> None:
    pack(source, place, model)
    shutil.rmtree(tmp_path / "cache-pack")
    captioned = images_in(source)[0]
    (source / captioned).with_suffix(".txt").write_text("a blue house")
    done = pack(source, place, model).json
    assert (done["packed"], done["latents_kept"], done["unchanged"]) == (1, 1, 13)
    _, record = pulled(place, tmp_path / "pulled.store").sample(captioned)
    assert record.captions == ("a blue house",)


def interrupted_before_the_commit(
    monkeypatch: pytest.MonkeyPatch, source: Path, place: ObjectFolder, model: Path, *more: object
) -> set[str]:
    """Pack until the shards were sent; return them."""
    with monkeypatch.context() as patched:
        patched.setattr(commit_module, "commit", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pack(source, place, model, *more)
    return sent(place)


def test_an_interrupted_pack_is_continued(
    place: ObjectFolder, source: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for count, before in ((14, 0), (18, 14)):  # into a new store, and into one that is there
        add_images(source, count, tmp_path)
        uploaded, newest = interrupted_before_the_commit(monkeypatch, source, place, model), find_newest(place)
        assert (0 if newest is None else newest.samples) == before
        with monkeypatch.context() as patched:
            patched.setattr(transfer.Uploader, "_parts", lambda *_: 1 / 0)  # nothing is sent again but sidecars of other names
            again = pack(source, place, model).done().json
        assert (again["packed"], again["unchanged"], sent(place)) == (0, count, uploaded)
        assert newest_generation(place).samples == count
    assert not verify_folder(place, lambda _: None, 1).corrupt


@pytest.fixture
def in_memory(place: ObjectFolder, monkeypatch: pytest.MonkeyPatch) -> ObjectFolder:
    """The same; a shard is full after two images, batches are of two."""
    monkeypatch.setattr(slice_packer.ShardFill, "is_full", lambda fill, _: fill.num_rows >= 2)
    return place


PAIRS = ("--batch-size", 2, "--work")


def pack_in_pairs(source: Path, place: ObjectFolder, model: Path, work: Path) -> Ran:
    return pack(source, place, model, *PAIRS, work)


def whole_shards(work: Path) -> int:
    """Count the files of sealed shards that have content."""
    return sum(path.stat().st_blocks > 0 for path in (work / "shards").glob("*.lmdb"))


def test_shards_leave_the_disk_while_others_are_made(
    in_memory: ObjectFolder, source: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_images(source, 28, tmp_path)
    work, counts = tmp_path / "work", list[int]()
    wait = ShardSender.wait_for_room

    def counting(sender: ShardSender, check: Callable[[], None]) -> None:
        wait(sender, check)
        counts.append(whole_shards(work))

    monkeypatch.setattr(ShardSender, "wait_for_room", counting)
    uploaded = interrupted_before_the_commit(monkeypatch, source, in_memory, model, *PAIRS, work)
    assert len(counts) == 13
    assert max(counts) <= 1 + BATCHES_WAITING + 1  # one is sent; of batches that are one shard each, more may have been sealed
    assert whole_shards(work) == 0
    assert len(uploaded) == 14
    (note,) = [file.name for file in in_memory.names("pending")]
    assert {f"shards/{name}.lmdb" for name in json.loads(in_memory.read(note))} == uploaded

    with monkeypatch.context() as patched:  # nothing is sent or encoded again
        patched.setattr(transfer.Uploader, "_parts", lambda *_: 1 / 0)
        patched.setattr(slice_packer, "ShardWriter", lambda *_, **__: 1 / 0)
        again = pack_in_pairs(source, in_memory, model, work)
    assert (again.code, again.json["packed"], again.json["unchanged"]) == (0, 0, 28)
    assert sent(in_memory) == uploaded
    assert not list(in_memory.names("pending"))
    assert not list((work / "shards").glob("*.sent"))
    assert sorted(ids_of(pulled(in_memory, tmp_path / "pulled.store"))) == images_in(source)


def test_what_was_sent_and_then_removed_is_packed_again(
    in_memory: ObjectFolder, source: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    in_memory.remove([min(interrupted_before_the_commit(monkeypatch, source, in_memory, model, *PAIRS, work))])
    again = pack_in_pairs(source, in_memory, model, work).done().json
    assert (again["packed"], again["unchanged"]) == (2, 12)
    assert sorted(ids_of(pulled(in_memory, tmp_path / "pulled.store"))) == images_in(source)


@pytest.mark.parametrize("before", [0, 14])
def test_only_what_was_removed_before_the_commit_is_packed_again(
    before: int, in_memory: ObjectFolder, source: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule of a bucket may remove what was sent; the run fails, and the next one makes only that again."""
    work = tmp_path / "work"
    if before:
        pack_in_pairs(source, in_memory, model, work).done()
        add_images(source, 18, tmp_path)
    listed, count = sent(in_memory), len(images_in(source))

    def removing(*args: Any, **more: Any) -> tuple[Manifest, Manifest]:
        in_memory.remove([min(sent(in_memory) - listed)])
        return commit_module.commit_change(*args, **more)

    with monkeypatch.context() as patched:
        patched.setattr(working, "commit_change", removing)
        pack_in_pairs(source, in_memory, model, work).fails("is no longer there")
    newest = find_newest(in_memory)
    assert (0 if newest is None else newest.samples) == before
    again = pack_in_pairs(source, in_memory, model, work)
    assert (again.code, again.err) == (0, "")
    assert (again.json["packed"], again.json["unchanged"]) == (2, count - 2)
    assert sorted(ids_of(pulled(in_memory, tmp_path / "pulled.store"))) == images_in(source)


def test_an_object_that_a_list_does_not_show_yet_counts(
    in_memory: ObjectFolder, source: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists of some storage are some seconds old."""
    entries = ObjectFolder.names

    def stale(folder: ObjectFolder, prefix: str = "") -> Iterator[ListedFile]:
        return (entry for entry in entries(folder, prefix) if prefix != "shards")

    with monkeypatch.context() as patched:
        patched.setattr(ObjectFolder, "names", stale)
        interrupted_before_the_commit(patched, source, in_memory, model, *PAIRS, tmp_path / "work")
        done = pack_in_pairs(source, in_memory, model, tmp_path / "work")
    assert (done.code, done.err) == (0, "")
    assert (done.json["packed"], done.json["unchanged"]) == (0, 14)
    assert sorted(ids_of(pulled(in_memory, tmp_path / "pulled.store"))) == images_in(source)


def test_a_shard_that_cannot_be_sent_ends_the_pack_and_is_kept(
    in_memory: ObjectFolder, source: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, parts = tmp_path / "work", transfer.Uploader._parts

    def failing(uploader: transfer.Uploader, file: transfer._File) -> object:
        if file.path.suffix == ".lmdb" and len(sent(in_memory)) == 3:
            raise StoreError("the network is gone")
        return parts(uploader, file)

    with monkeypatch.context() as patched:
        patched.setattr(transfer.Uploader, "_parts", failing)
        done = pack_in_pairs(source, in_memory, model, work)
    assert (done.code, "the network is gone" in done.err) == (1, True)
    assert whole_shards(work) > 0
    assert pack_in_pairs(source, in_memory, model, work).code == 0
    assert sorted(ids_of(pulled(in_memory, tmp_path / "pulled.store"))) == images_in(source)


def test_a_pack_that_another_one_overtakes_is_added_to_it(
    place: ObjectFolder, source: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bucketline.store.remote.generations import commit

    shutil.copytree(source, tmp_path / "other" / "sub")
    both = images_in(source)[0]
    (tmp_path / "other" / both).parent.mkdir()
    shutil.copy(source / both, tmp_path / "other" / both)
    rival: list[Ran] = []

    def late(*args: object, **more: object) -> bool:
        monkeypatch.setattr(commit_module, "commit", commit)
        rival.append(pack(tmp_path / "other", place, model, "--work", tmp_path / "another machine"))
        return commit(*args, **more)  # type: ignore[arg-type]

    for generation in (0, 2):  # into a new store, and into one that is there
        monkeypatch.setattr(commit_module, "commit", late)
        done = pack(source, place, model)
        assert (done.code, rival[-1].code) == (0, 0)
        assert (rival[-1].json["generation"], done.json["generation"]) == (generation + 1, generation + 2)
        names = {*images_in(source), *images_in(tmp_path / "other")}
        assert sorted(ids_of(pulled(place, tmp_path / f"{generation}.store"))) == sorted(names)
        for folder, name in ((source, f"new {generation}"), (tmp_path / "other", f"newer {generation}")):
            shutil.copytree(tmp_path / "other" / "sub", folder / name)
    assert not verify_folder(place, lambda _: None, 1).corrupt


def test_anothers_drop_is_kept(
    place: ObjectFolder, source: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack(source, place, model)
    dropped = images_in(source)[3]
    add_images(source, 16, tmp_path)
    from bucketline.store.remote.generations import commit

    def late(*args: object, **more: object) -> bool:
        monkeypatch.setattr(commit_module, "commit", commit)
        drop(place, [dropped])
        return commit(*args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(commit_module, "commit", late)
    done = pack(source, place, model)
    assert done.json["generation"] == 3
    found = sorted(ids_of(pulled(place, tmp_path / "pulled.store")))
    assert dropped not in found
    assert len(found) == 15


COUNTS = ("found", "packed", "unchanged", "rejected", "withdrawn", "pruned", "generation")


def counts_of(done: Ran) -> tuple[int, ...]:
    return tuple(done.done().json[name] for name in COUNTS)


@pytest.mark.parametrize("kind", ["disk", "s3"])
def test_what_was_dropped_stays_out_until_it_is_taken_back(
    kind: str, source: Path, model: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Whether the image changes, rows are rewritten, and other images change or go."""
    where: ObjectFolder | Path = request.getfixturevalue("s3_place") if kind == "s3" else tmp_path / "here.store"
    place = where.url if isinstance(where, ObjectFolder) else where
    gone, changed, dropped, *_ = images_in(source)
    assert counts_of(pack(source, where, model)) == (14, 14, 0, 0, 0, 0, 1)
    said = call("store", "drop", place, dropped).done().out
    assert "later packs leave out what was dropped; `ingest pack … --take-back ID` packs one again" in said
    assert counts_of(pack(source, where, model)) == (14, 0, 13, 0, 1, 0, 2)
    call("store", "compact", place, "--gc", "--older-than", "0s").done()
    kept, new = (source / gone).read_bytes(), (source / images_in(source)[5]).read_bytes()
    for name in (changed, dropped):
        (source / name).write_bytes(new)
    (source / gone).unlink()
    dry = pack(source, where, model, "--prune", "--dry-run").done().json
    assert (dry["found"], dry["new"], dry["changed"], dry["unchanged"], dry["withdrawn"]) == (13, 0, 1, 11, 1)
    assert counts_of(pack(source, where, model, "--prune")) == (13, 1, 11, 0, 1, 1, 4)
    (source / gone).write_bytes(kept)  # which pack dropped, not a user
    assert counts_of(pack(source, where, model)) == (14, 1, 12, 0, 1, 0, 5)
    printed = call("ingest", "pack", source, place, "--model", model, *SMALL).done().out
    assert "14 images found = 0 packed + 13 unchanged + 0 rejected + 1 withdrawn, in " in printed
    assert "  withdrawn: 1 (store drop); --take-back ID packs one again\n" in printed
    assert call("store", "info", place, "--json").json["withdrawn"] == 1
    assert "1 sample withdrawn (store drop): packs leave them out" in call("store", "info", place).out
    unknown = pack(source, where, model, "--take-back", "nosuch.png")
    unknown.fails("--take-back 'nosuch.png': the store has not withdrawn it", code=2)
    (tmp_path / "ids").write_text(f"{dropped}\n")
    assert pack(source, where, model, "--take-back-from", tmp_path / "ids", "--dry-run").json["new"] == 1
    assert call("store", "info", place, "--json").json["withdrawn"] == 1
    assert counts_of(pack(source, where, model, "--take-back-from", tmp_path / "ids"))[:5] == (14, 1, 13, 0, 0)
    assert counts_of(pack(source, where, model, "--take-back", dropped))[:5] == (14, 0, 14, 0, 0)  # of a command that is rerun


def test_what_is_withdrawn_while_it_is_packed_does_not_come_back(
    place: ObjectFolder, source: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here by an interrupted pack that had encoded it, there by a drop that commits before, and one before that drop."""
    from bucketline.store.remote.generations import commit

    pack(source, place, model)
    first, second, third, *_, new = images_in(source)
    for name in (first, second):
        (source / name).write_bytes((source / new).read_bytes())
    interrupted_before_the_commit(monkeypatch, source, place, model)
    drop(place, [first])

    def late(*args: object, **more: object) -> bool:
        monkeypatch.setattr(commit_module, "commit", later)
        drop(place, [second])
        return commit(*args, **more)  # type: ignore[arg-type]

    def later(*args: object, **more: object) -> bool:
        monkeypatch.setattr(commit_module, "commit", commit)
        drop(place, [third])
        return commit(*args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(commit_module, "commit", late)
    pack(source, place, model).done()
    assert newest_generation(place).withdrawn == (first, second, third)
    assert sorted(ids_of(pulled(place, tmp_path / "pulled.store"))) == images_in(source)[3:]
    assert counts_of(pack(source, place, model))[:5] == (14, 0, 11, 0, 3)
    with monkeypatch.context() as patched:
        patched.setattr(finish_module, "sample_changes", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):  # what was taken back is so at once
            pack(source, place, model, "--take-back", second, "--take-back", third)
    assert newest_generation(place).withdrawn == (first,)
    assert counts_of(pack(source, place, model))[:5] == (14, 0, 13, 0, 1)


def test_ranks_leave_out_what_is_withdrawn(source: Path, model: Path, tmp_path: Path) -> None:
    store, dropped = tmp_path / "s", images_in(source)[0]
    pack(source, store, model).done()
    drop(store, [dropped])
    add_images(source, 18, tmp_path)
    done = forked_ranks(2, "ingest", "pack", source, store, "--model", model, *SMALL, "--json")
    assert counts_of(done) == (18, 4, 13, 0, 1, 0, 4)  # each rank commits a generation
    assert sorted(ids_of(store)) == images_in(source)[1:]


def test_two_processes_do_not_share_a_working_folder(place: ObjectFolder, source: Path, model: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    prepare_store(work)
    with lock_store(work):
        done = pack(source, place, model, "--work", work)
    assert done.code == 1
    assert "is being written by another process" in done.err
    pack(source, place, model, "--work", work).done()
    assert [path.name for path in work.glob("pending/*.lock")] == ["writer.lock"]


def test_what_cannot_be_is_refused(place: ObjectFolder, source: Path, model: Path, tmp_path: Path) -> None:
    pack(source, tmp_path / "here.store", model, "--work", tmp_path / "work").fails(
        "it is for a store in object storage", code=2
    )
    done = call("ingest", "pack", source, "https://me:hidden@127.0.0.1:9/a.store", "--model", model, *SMALL)
    assert (done.code, "web servers are read only" in done.err, "hidden" in done.err) == (1, True, False)
    pack(source, place, model)
    pack(source, place, model, "--flip").fails("was made with other options than this run has")
