"""Links, pipes and devices under a store's names: nothing outside is written or removed; and what the umask leaves."""

from __future__ import annotations

import json
import os
import shutil
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from bucketline.errors import BucketlineError, StoreError
from bucketline.files.atomic_write import FileLock, staged_folder, staging_path, write_durably
from bucketline.store import Store
from bucketline.store.change.commit import drop
from bucketline.store.change.compact import collect, compact
from bucketline.store.change.merge import merge
from bucketline.store.format.manifest import read_manifest
from bucketline.store.remote.objects import ObjectFolder
from bucketline.store.sync.push_pull import push
from bucketline.store.transfer import remove_pending
from bucketline.store.verify.verify import verify
from bucketline.store.write.publish import adopt, lock_store, publish
from tests.fault.apart import How, apart
from tests.kit import add, faults, leave_pending, make_sample, make_store, open_writer, samples_of, tree, untouched

BUCKET = "train/64x64"
OLD_S = time.time() - 30 * 86400
ID = f"{BUCKET}/0.png"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return make_store(tmp_path / "s", samples_of({BUCKET: 6})).path


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder with old files of names that a store's commands remove."""
    folder = tmp_path / "outside"
    folder.mkdir()
    own = ("precious", "x.123.tmp", "x.tmp", "copy-000001-aa.lmdb", "copy-000001-aa.meta", "left.records", "g7.lmdb", "run")
    for name in own:
        (folder / name).write_text('["g7"]', encoding="ascii")
        os.utime(folder / name, (OLD_S, OLD_S))
    return folder


def quietly(change: Callable[[], object]) -> None:
    """Carry out a change that may be refused in words."""
    with suppress(StoreError):
        change()


@pytest.mark.parametrize("target", ["precious", "made"])
def test_a_lock_is_not_taken_through_a_link(store: Path, outside: Path, target: str) -> None:
    (store / "pending" / "writer.lock").unlink(missing_ok=True)
    (store / "pending" / "writer.lock").symlink_to(outside / target)
    with untouched(outside), pytest.raises(StoreError, match=r"writer\.lock cannot be written: it is a link.* remove it"):
        drop(store, [ID])


def test_a_locks_second_name_outside_keeps_its_content(outside: Path, tmp_path: Path) -> None:
    os.link(outside / "precious", tmp_path / "a.lock")
    with FileLock(tmp_path / "a.lock"):
        pass
    assert (outside / "precious").read_text(encoding="ascii") == '["g7"]'


@pytest.mark.parametrize("name", ["odd", "shards", "pending", "generations"])
def test_what_lies_behind_a_linked_folder_stays(name: str, store: Path, outside: Path) -> None:
    if (store / name).exists():
        shutil.copytree(store / name, outside, dirs_exist_ok=True)
        shutil.rmtree(store / name)
    (store / name).symlink_to(outside)
    with untouched(outside):
        if name == "odd":
            drop(store, [ID])
        else:
            with pytest.raises(StoreError, match=f"{name} is a link; a store is changed only where its folders are its own"):
                drop(store, [ID])


def test_files_of_a_person_that_only_end_in_tmp_stay(store: Path) -> None:
    (store / "notes.tmp").write_text("mine", encoding="ascii")
    (store / "manifest.json.0123abcd.tmp").write_text("{", encoding="ascii")
    drop(store, [ID])
    assert (store / "notes.tmp").exists()
    assert not (store / "manifest.json.0123abcd.tmp").exists()


def test_a_manifest_is_not_written_through_a_link(store: Path, outside: Path) -> None:
    (store / "manifest.json.0123abcd.tmp").symlink_to(outside / "precious")
    (store / "generations" / "2.json.0123abcd.tmp").symlink_to(outside / "precious")
    shutil.copy(store / "manifest.json", outside)
    (store / "manifest.json").unlink()
    (store / "manifest.json").symlink_to(outside / "manifest.json")
    with untouched(outside):
        drop(store, [ID])
    assert not (store / "manifest.json").is_symlink()
    assert Store.open(store).manifest.samples == 5


def test_a_manifest_that_was_lost_is_not_written_through_a_link(store: Path, outside: Path) -> None:
    """It is written before anything is swept away."""
    (store / "manifest.json.0123abcd.tmp").symlink_to(outside / "precious")
    (store / "generations/1.json.0123abcd.tmp").symlink_to(outside / "precious")
    (store / "manifest.json").unlink()
    with untouched(outside):
        drop(store, [ID])


def test_a_file_that_stands_where_one_is_written_aside_is_not_touched(outside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bucketline.files.atomic_write.secrets.token_hex", lambda n: "0" * 2 * n)
    (outside / "a.00000000.tmp").symlink_to(outside / "precious")
    with untouched(outside), pytest.raises(FileExistsError):
        write_durably(outside / "a", b"other")
    assert (outside / "a.00000000.tmp").is_symlink()


@pytest.mark.parametrize("kind", ["link to a folder", "link to a file", "file", "folder of another user"])
def test_what_is_in_the_way_is_not_touched(
    kind: str, store: Path, outside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = staging_path(tmp_path / "out")
    if kind.startswith("link"):
        hidden.symlink_to(outside if kind == "link to a folder" else outside / "precious")
    elif kind == "file":
        hidden.write_text("precious", encoding="ascii")
    else:
        (hidden / "files").mkdir(parents=True)
        (hidden / "files" / "theirs").write_text("precious", encoding="ascii")
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with untouched(tmp_path), pytest.raises(StoreError, match="is in the way: it is a link, a file or another user's folder"):
        merge(tmp_path / "out", [store])


def test_links_within_a_folder_that_a_killed_run_left_are_not_followed(outside: Path, tmp_path: Path) -> None:
    hidden = staging_path(tmp_path / "out")
    hidden.mkdir()
    (hidden / "files").symlink_to(outside)
    before = tree(outside)

    def stage() -> None:
        with staged_folder(tmp_path / "out") as folder:
            (folder / "a").touch()

    quietly(stage)
    assert tree(outside) == before
    (hidden / "files").unlink(missing_ok=True)
    (hidden / "lock").unlink(missing_ok=True)
    (hidden / "lock").symlink_to(outside / "precious")
    quietly(stage)
    assert tree(outside) == before


def test_nobody_else_may_write_where_a_folder_is_prepared_and_its_files_have_the_usual_mode(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        with staged_folder(tmp_path / "out") as folder:
            assert folder.parent.stat().st_mode & 0o777 == 0o700
        assert (tmp_path / "out").stat().st_mode & 0o777 == 0o775
    finally:
        os.umask(before)


def put_in_place(path: Path, kind: str) -> None:
    """Put something that has no end, or is waited for, in the put_in_place of a file."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")


@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize(
    "name",
    [
        "manifest.json", "generations/1.json", "shards/g0.lmdb", "shards/g0.meta", "pending/left.lmdb",
        "pending/writer.lock", "shards/left.lmdb", "rejects.jsonl",
    ],
)  # fmt: skip
def test_nobody_waits_for_a_pipe_or_a_device(name: str, kind: str, store: Path) -> None:
    put_in_place(store / name, kind)
    uses: tuple[Callable[[], object], ...] = (
        lambda: Store.open(store).sample(ID)[1].id,
        lambda: len(verify(Store.open(store), lambda _: None, 1).corrupt),
        lambda: drop(store, [ID]).generation,
        lambda: compact(store, shard_bytes=1 << 20, gc_older_than_s=0.0).generation,
    )

    def use_all() -> None:
        for use in uses:
            with suppress(BucketlineError):
                use()

    ended = apart(use_all)
    assert ended.how is How.DONE, ended.said


def test_a_pending_shard_that_is_a_link_is_not_taken_over(store: Path, outside: Path) -> None:
    shutil.move(leave_pending(store, "left", [make_sample("more.png", BUCKET)]), outside / "left.lmdb")
    (store / "pending" / "left.lmdb").symlink_to(outside / "left.lmdb")
    with (
        untouched(outside),
        pytest.raises(StoreError, match=r"left\.lmdb is a link or not a regular file, which no run leaves: move it elsewhere"),
    ):
        adopt(store, read_manifest(store))


def test_a_store_is_read_through_links_to_its_files_and_to_itself(store: Path, outside: Path, tmp_path: Path) -> None:
    """Large shards may be on another disk; what is removed is the link."""
    for suffix in ("lmdb", "meta"):
        shutil.move(store / "shards" / f"g0.{suffix}", outside)
        (store / "shards" / f"g0.{suffix}").symlink_to(outside / f"g0.{suffix}")
    (tmp_path / "link").symlink_to(store)
    with untouched(outside):
        assert not faults(store)
        drop(tmp_path / "link", [ID])
        compact(tmp_path / "link", shard_bytes=1 << 20, gc_older_than_s=0.0)
        assert not (store / "shards" / "g0.lmdb").is_symlink()
    assert Store.open(store).manifest.samples == 5
    assert not faults(store)


@pytest.mark.parametrize("umask", [0o002, 0o022, 0o077])
def test_every_file_and_folder_of_a_store_has_what_the_umask_leaves(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        store = make_store(tmp_path / "s", samples_of({BUCKET: 5}), samples_of({BUCKET: 5}, "more/"))
        drop(store.path, [f"{BUCKET}/0.png"])
        writer = open_writer(store.path, "left")
        for sample in samples_of({BUCKET: 3}, "left/"):
            add(writer, sample)
        writer.commit()
        assert_modes(store.path, umask)  # of a pending shard and its lock, too
        writer.close()
        with lock_store(store.path):
            publish(store.path, store.manifest, adopt(store.path, store.manifest), ())
        compact(store.path, shard_bytes=1 << 24)
        merge(tmp_path / "merged", [store.path])
    finally:
        os.umask(before)
    assert_modes(store.path, umask)
    assert_modes(tmp_path / "merged", umask)


def assert_modes(store: Path, umask: int) -> None:
    modes = {str(path.relative_to(store)): path.stat().st_mode for path in (store, *store.rglob("*"))}
    expected = {name: (0o777 if stat.S_ISDIR(mode) else 0o666) & ~umask for name, mode in modes.items()}
    assert {name: oct(stat.S_IMODE(mode)) for name, mode in modes.items()} == {n: oct(m) for n, m in expected.items()}


def test_a_lock_that_a_colleague_made_for_himself_alone_is_taken_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    path.touch()
    path.chmod(0o444)
    tmp_path.chmod(0o777)

    def take() -> bool:
        os.chdir(tmp_path)  # the folders above it are closed to others
        if os.geteuid() == 0:  # whom no mode stops
            os.setgid(65534)
            os.setuid(65534)
        with FileLock(Path(path.name)) as lock:
            return not lock.is_released

    ended = apart(take)
    assert (ended.how, ended.gave) == (How.DONE, True), ended.said


# a store at `file://`

SAMPLES = samples_of({BUCKET: 4})


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A store that was pushed to a folder, whose second generation drops a sample."""
    own, path = tmp_path / "own.store", tmp_path / "bucket" / "a.store"
    make_store(own, SAMPLES)
    folder = ObjectFolder.open(f"file://{path}")
    push(own, folder)
    drop(own, [SAMPLES[0].id])
    push(own, folder)
    return path


@pytest.mark.parametrize(
    "name", ["shards/more", "pending/more", "generations/more", "shards/g7.lmdb", "pending/run", "shards/g8.lmdb"]
)
def test_collecting_leaves_alone_what_a_link_leads_to(place: Path, outside: Path, name: str) -> None:
    target = {"shards/g7.lmdb": outside / "g7.lmdb", "pending/run": outside / "run"}.get(name, outside)
    (place / name).parent.mkdir(exist_ok=True)
    (place / name).symlink_to(target)
    with untouched(outside):
        folder = ObjectFolder.open(f"file://{place}")
        compact(folder, shard_bytes=1 << 24, gc_older_than_s=0)
        remove_pending(folder, {"g7"})
    assert Store.open(place).manifest.samples == 3


@pytest.mark.parametrize("name", ["shards", "pending", "generations"])
def test_a_store_whose_own_folder_is_a_link_is_not_changed(place: Path, tmp_path: Path, name: str) -> None:
    (place / name).mkdir(exist_ok=True)
    (place / name).rename(tmp_path / "elsewhere")
    (place / name).symlink_to(tmp_path / "elsewhere")
    with untouched(tmp_path / "elsewhere"):
        folder = ObjectFolder.open(f"file://{place}")
        with pytest.raises(StoreError, match=rf"{name} is a link; a store is changed only where its folders are its own"):
            compact(folder, shard_bytes=1 << 24, gc_older_than_s=0)


@pytest.mark.parametrize("change", ["write", "create", "remove"])
def test_nothing_is_written_or_removed_through_a_link(place: Path, outside: Path, change: str) -> None:
    (place / "shards" / "more").symlink_to(outside)
    folder, before = ObjectFolder.open(f"file://{place}"), tree(outside)
    changes: dict[str, Callable[[], object]] = {
        "write": lambda: folder.write("shards/more/new", b"1"),
        "create": lambda: folder.create("shards/more/new", b"1"),
        "remove": lambda: folder.remove(["shards/more/precious"]),
    }
    with pytest.raises(StoreError, match="shards/more is a link"):
        changes[change]()
    assert tree(outside) == before


def test_a_link_in_the_place_of_an_object_is_replaced_not_followed(place: Path, outside: Path) -> None:
    folder, before = ObjectFolder.open(f"file://{place}"), tree(outside)
    for name in ("a", "b"):
        (place / "shards" / name).symlink_to(outside / "precious")
    folder.write("shards/a", b"1")
    folder.remove(["shards/b"])
    assert tree(outside) == before
    assert (place / "shards" / "a").read_bytes() == b"1"
    assert not os.path.lexists(place / "shards" / "b")


def test_what_is_not_named_as_an_object_of_a_shard_is_not_collected(place: Path) -> None:
    kept = ("shards/notes.txt", "shards/mine/g7.lmdb", "pending/left.lmdb", "pending/writer.lock", "pending/attempts/run/a")
    for name in kept:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text("mine", encoding="ascii")
        os.utime(place / name, (OLD_S, OLD_S))
    (place / "shards" / "g7.meta").write_text("left long ago", encoding="ascii")
    os.utime(place / "shards" / "g7.meta", (OLD_S, OLD_S))
    assert "g7.meta" in collect(ObjectFolder.open(f"file://{place}"), 0).files
    assert all((place / name).read_text() == "mine" for name in kept)


def test_what_a_local_writer_has_committed_is_not_removed_with_notes_of_packs(place: Path) -> None:
    """Every pack into a URL removes the notes of finished ones, next to which a writer on the disk has its pending shards."""
    folder = ObjectFolder.open(f"file://{place}")
    (place / "pending").mkdir(exist_ok=True)
    leave_pending(place, "left", [make_sample("left.png", BUCKET)])
    (place / "pending" / "run").write_text(json.dumps(["g0"]), encoding="ascii")
    (place / "pending" / "odd").write_text("no list", encoding="ascii")
    remove_pending(folder, {"g0"})
    assert sorted(path.name for path in (place / "pending").iterdir()) == ["left.lmdb", "left.records", "odd"]
    drop(place, [SAMPLES[1].id])
    assert Store.open(place).manifest.samples == 3
    drop(folder, [SAMPLES[2].id])
    store = Store.open(place)
    assert store.manifest.samples == 2
    assert not faults(store)
