"""Links, pipes and devices under a store's names: nothing outside is written or removed, and nobody waits."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from bucketline.errors import BucketlineError, CorruptError, StoreError
from bucketline.files.atomic_folder import staged_folder, staging_path
from bucketline.files.atomic_write import write_durably
from bucketline.files.locks import FileLock
from bucketline.store import Store
from bucketline.store.change.compact import compact
from bucketline.store.change.drop import drop
from bucketline.store.change.merge import merge
from bucketline.store.format.manifest import read_manifest
from bucketline.store.verify.verify import verify
from bucketline.store.write.publish import adopt
from tests.fault.apart import How, apart
from tests.kit import add, make_sample, make_store, open_writer, samples_of, tree

BUCKET = "train/64x64"
ID = f"{BUCKET}/0.png"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return make_store(tmp_path / "s", samples_of({BUCKET: 6})).path


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder with files of names that a store's commands remove."""
    folder = tmp_path / "outside"
    folder.mkdir()
    for name in ("precious", "x.123.tmp", "x.tmp", "copy-000001-aa.lmdb", "copy-000001-aa.index", "left.sealing"):
        (folder / name).write_text("precious", encoding="ascii")
    return folder


def quietly(change: Callable[[], object]) -> None:
    """Carry out a change that may be refused in words."""
    try:
        change()
    except StoreError:
        return


def test_a_lock_is_not_taken_through_a_link(store: Path, outside: Path) -> None:
    (store / "pending" / "writer.lock").unlink(missing_ok=True)
    (store / "pending" / "writer.lock").symlink_to(outside / "precious")
    before = tree(outside)
    with pytest.raises(StoreError, match=r"writer\.lock cannot be written: it is a link.* remove it"):
        drop(store, [ID])
    assert tree(outside) == before
    (store / "pending" / "writer.lock").unlink()
    (store / "pending" / "writer.lock").symlink_to(outside / "made")
    with pytest.raises(StoreError, match="it is a link"):
        drop(store, [ID])
    assert tree(outside) == before


def test_a_locks_second_name_outside_keeps_its_content(outside: Path, tmp_path: Path) -> None:
    os.link(outside / "precious", tmp_path / "a.lock")
    with FileLock(tmp_path / "a.lock"):
        pass
    assert (outside / "precious").read_text(encoding="ascii") == "precious"


@pytest.mark.parametrize("name", ["odd", "shards", "pending", "generations"])
def test_what_lies_behind_a_linked_folder_stays(name: str, store: Path, outside: Path) -> None:
    if (store / name).exists():
        shutil.copytree(store / name, outside, dirs_exist_ok=True)
        shutil.rmtree(store / name)
    (store / name).symlink_to(outside)
    before = tree(outside)
    if name == "odd":
        drop(store, [ID])
    else:
        with pytest.raises(StoreError, match=f"{name} is a link; a store is changed only where its folders are its own"):
            drop(store, [ID])
    assert tree(outside) == before


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
    before = tree(outside)
    drop(store, [ID])
    assert tree(outside) == before
    assert not (store / "manifest.json").is_symlink()
    assert Store.open(store).manifest.samples == 5


def test_a_manifest_that_was_lost_is_not_written_through_a_link(store: Path, outside: Path) -> None:
    """It is written before anything is swept away."""
    (store / "manifest.json.0123abcd.tmp").symlink_to(outside / "precious")
    (store / "generations/1.json.0123abcd.tmp").symlink_to(outside / "precious")
    (store / "manifest.json").unlink()
    before = tree(outside)
    drop(store, [ID])
    assert tree(outside) == before


def test_a_file_that_stands_where_one_is_written_aside_is_not_touched(outside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bucketline.files.atomic_write.secrets.token_hex", lambda n: "0" * 2 * n)
    (outside / "a.00000000.tmp").symlink_to(outside / "precious")
    before = tree(outside)
    with pytest.raises(FileExistsError):
        write_durably(outside / "a", b"other")
    assert tree(outside) == before
    assert (outside / "a.00000000.tmp").is_symlink()


@pytest.mark.parametrize("kind", ["link to a folder", "link to a file", "file", "folder of another user"])
def test_what_stands_where_a_folder_is_prepared_is_not_touched(
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
    before = tree(tmp_path)
    with pytest.raises(
        StoreError, match="is in the way: it is a link, a file or another user's folder; remove it, or choose another name"
    ):
        merge(tmp_path / "out", [store])
    assert tree(tmp_path) == before


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


def place(path: Path, kind: str) -> None:
    """Put something that has no end, or is waited for, in the place of a file."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")


@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize(
    "name",
    [
        "manifest.json", "generations/1.json", "shards/g0.lmdb", "shards/g0.extents", "shards/g0.index", "pending/left.lmdb",
        "pending/writer.lock", "shards/left.lmdb", "rejects.jsonl",
    ],
)  # fmt: skip
def test_nobody_waits_for_a_pipe_or_a_device(name: str, kind: str, store: Path) -> None:
    place(store / name, kind)
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


def test_a_pipe_in_a_manifests_place_is_said_in_words(store: Path) -> None:
    place(store / "manifest.json", "pipe")
    with pytest.raises(StoreError, match=r"cannot be read: it is a pipe, a device or a folder.*; copy .*1\.json to"):
        read_manifest(store)


def test_a_pending_shard_that_is_a_link_is_not_taken_over(store: Path, outside: Path) -> None:
    writer = open_writer(store, "left")
    add(writer, make_sample("more.png", BUCKET))
    writer.commit()
    writer.close()
    shutil.move(store / "pending" / "left.lmdb", outside / "left.lmdb")
    (store / "pending" / "left.lmdb").symlink_to(outside / "left.lmdb")
    before = tree(outside)
    with pytest.raises(StoreError, match=r"left\.lmdb is a link or not a regular file, which no run leaves: move it elsewhere"):
        adopt(store, read_manifest(store))
    assert tree(outside) == before


def test_a_store_is_read_through_links_to_its_files_and_to_itself(store: Path, outside: Path, tmp_path: Path) -> None:
    """Large shards may be on another disk; what is removed is the link."""
    for suffix in ("lmdb", "extents", "index"):
        shutil.move(store / "shards" / f"g0.{suffix}", outside)
        (store / "shards" / f"g0.{suffix}").symlink_to(outside / f"g0.{suffix}")
    (tmp_path / "link").symlink_to(store)
    before = tree(outside)
    assert verify(Store.open(store), lambda _: None).corrupt == ()
    drop(tmp_path / "link", [ID])
    compact(tmp_path / "link", shard_bytes=1 << 20, gc_older_than_s=0.0)
    assert not (store / "shards" / "g0.lmdb").is_symlink()
    assert tree(outside) == before
    assert Store.open(store).manifest.samples == 5
    assert verify(Store.open(store), lambda _: None).corrupt == ()


def test_a_shard_that_is_a_folder_is_an_error_of_ours(store: Path) -> None:
    (store / "shards" / "g0.lmdb").unlink()
    (store / "shards" / "g0.lmdb").mkdir()
    with pytest.raises((StoreError, CorruptError), match="it is a pipe, a device or a folder"):
        Store.open(store).sample(ID)
