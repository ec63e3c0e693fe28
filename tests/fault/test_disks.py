"""Disks that fail half-way, and power that fails: an error of ours, and nothing that was committed is missing."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from bucketline.errors import LockedError, StoreError
from bucketline.files.locks import FileLock
from bucketline.files.regular_file import open_regular
from bucketline.store.verify.verify import verify
from bucketline.store.write import publish as publish_module
from bucketline.store.write.publish import prepare_store
from tests.fault.power_loss import Change, Disk
from tests.kit import empty_store, make_store, open_writer, samples_of


def test_a_disk_keeps_what_was_synced_and_no_name_whose_folder_was_not(tmp_path: Path) -> None:
    import random

    def change(what: str, node: int = 1, offset: int = 0, one: str = "/d/a", two: str = "", data: bytes = b"") -> Change:
        return Change(what=what, node=node, offset=offset, length=len(data), one=one, two=two, data=data)

    disk = Disk(root="/d")
    for one in (
        change("create"),
        change("write", data=b"old"),
        change("sync"),
        change("sync", node=0, one="/d"),
        change("write", offset=3, data=b"lost"),
        change("create", node=2, one="/d/b"),
        change("write", node=2, data=b"no name"),
        change("sync", node=2, one="/d/b"),
    ):
        disk.take(one)
    disk.after_loss(tmp_path / "left", random.Random(1), is_strict=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "left").iterdir()} == {"a": b"old"}
    disk.take(change("rename", one="/d/b", two="/d/a"))
    disk.take(change("sync", node=0, one="/d"))
    disk.after_loss(tmp_path / "then", random.Random(1), is_strict=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "then").iterdir()} == {"a": b"no name"}


def test_the_names_of_a_new_store_and_of_its_folders_are_on_the_disk_before_anything_is_in_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(publish_module, "sync_folder", synced.append)
    prepare_store(tmp_path / "new" / "s")
    assert set(synced) >= {tmp_path / "new" / "s", tmp_path / "new", tmp_path}


def test_a_pending_shards_name_is_on_the_disk_before_its_first_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bucketline.store.write import shard_writer

    synced: list[Path] = []
    empty_store(tmp_path)
    monkeypatch.setattr(shard_writer, "sync_folder", synced.append)
    open_writer(tmp_path, "a").close()
    assert synced == [tmp_path / "pending"]


def test_a_lock_is_given_back_on_a_disk_that_has_turned_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = FileLock(tmp_path / "lock")
    with pytest.raises(LockedError):
        FileLock(tmp_path / "lock")

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patched:
        patched.setattr(os, "ftruncate", refuse)
        lock.release()
    FileLock(tmp_path / "lock").release()


def test_what_the_system_refuses_while_a_store_is_changed_is_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = empty_store(tmp_path)
    (tmp_path / "pending" / "left.sealing").write_bytes(b"")

    def refuse(path: Path, **_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(type(tmp_path), "unlink", refuse)
    with pytest.raises(StoreError, match=r"left\.sealing cannot be read or changed: Read-only file system; fix that"):
        publish_module.adopt(tmp_path, manifest)


def test_an_older_manifest_that_cannot_be_read_is_a_fault_that_verify_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path, samples_of({"train/8x8": 2}))
    older = tmp_path / "generations" / "0.json"

    def failing(path: Path) -> int:
        if path == older:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return open_regular(path)

    monkeypatch.setattr("bucketline.store.folder.open_regular", failing)
    (fault,) = verify(store, lambda _: None, 1).corrupt
    assert f"cannot read {older}: Input/output error; " in fault.error
    assert "a run that was planned on that generation cannot resume" in fault.error


def test_a_shards_id_that_cannot_be_read_is_an_error_of_ours(tmp_path: Path) -> None:
    (shard,) = make_store(tmp_path / "s", samples_of({"train/8x8": 2})).shards
    not_open = -1
    with pytest.raises(StoreError, match=r"g0.lmdb cannot be read at byte \d+: Bad file descriptor"):
        shard._check_id(not_open)
