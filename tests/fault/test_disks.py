"""Disks that fail half-way, and power that fails: an error of ours, and nothing that was committed is missing."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bucketline.errors import LockedError, StoreError
from bucketline.files.locks import FileLock
from bucketline.files.regular_file import open_regular
from bucketline.store.verify.verify import verify
from bucketline.store.write import publish as publish_module
from bucketline.store.write import shard_writer
from bucketline.store.write.publish import prepare_store
from tests.fault.power_loss import Change, Disk
from tests.kit import empty_store, make_store, open_writer, samples_of


def refuse(number: int) -> Callable[..., Any]:
    """Return what the system does in the place of a function."""

    def refusing(*_: object, **__: object) -> Any:
        raise OSError(number, os.strerror(number))

    return refusing


def test_a_disk_keeps_what_was_synced_and_no_name_whose_folder_was_not(tmp_path: Path) -> None:
    def change(what: str, node: int = 1, offset: int = 0, one: str = "/d/a", two: str = "", data: bytes = b"") -> Change:
        return Change(what=what, node=node, offset=offset, length=len(data), one=one, two=two, data=data)

    def left(name: str) -> dict[str, bytes]:
        disk.after_loss(tmp_path / name, random.Random(1), is_strict=True)
        return {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}

    disk, folder = Disk(root="/d"), change("sync", node=0, one="/d")
    written = change("create"), change("write", data=b"old"), change("sync"), folder, change("write", offset=3, data=b"lost")
    b: dict[str, Any] = {"node": 2, "one": "/d/b"}
    for one in (*written, change("create", **b), change("write", node=2, data=b"no name"), change("sync", **b)):
        disk.take(one)
    assert left("then") == {"a": b"old"}
    disk.take(change("rename", one="/d/b", two="/d/a"))
    disk.take(folder)
    assert left("later") == {"a": b"no name"}


def test_the_names_of_a_new_store_and_of_its_folders_are_on_the_disk_before_anything_is_in_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(publish_module, "sync_folder", synced.append)
    prepare_store(tmp_path / "new" / "s")
    assert set(synced) >= {tmp_path / "new" / "s", tmp_path / "new", tmp_path}


def test_a_pending_shards_name_is_on_the_disk_before_its_first_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    empty_store(tmp_path)
    monkeypatch.setattr(shard_writer, "sync_folder", synced.append)
    open_writer(tmp_path, "a").close()
    assert synced == [tmp_path / "pending"]


def test_a_lock_is_given_back_on_a_disk_that_has_turned_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = FileLock(tmp_path / "lock")
    with pytest.raises(LockedError):
        FileLock(tmp_path / "lock")
    with monkeypatch.context() as patched:
        patched.setattr(os, "ftruncate", refuse(errno.EROFS))
        lock.release()
    FileLock(tmp_path / "lock").release()


def test_what_the_system_refuses_while_a_store_is_changed_is_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = empty_store(tmp_path)
    (tmp_path / "pending" / "left.sealing").write_bytes(b"")
    monkeypatch.setattr(type(tmp_path), "unlink", refuse(errno.EROFS))
    with pytest.raises(StoreError, match=r"cannot be read or changed: Read-only file system; fix that"):
        publish_module.adopt(tmp_path, manifest)


def test_an_older_manifest_that_cannot_be_read_is_a_fault_that_verify_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, older = make_store(tmp_path, samples_of({"train/8x8": 2})), tmp_path / "generations" / "0.json"
    fail = refuse(errno.EIO)
    monkeypatch.setattr("bucketline.store.folder.open_regular", lambda path: fail() if path == older else open_regular(path))
    (fault,) = verify(store, lambda _: None, 1).corrupt
    assert f"cannot read {older}: Input/output error; " in fault.error
    assert "a run that was planned on that generation cannot resume" in fault.error


def test_a_shards_id_that_cannot_be_read_is_an_error_of_ours(tmp_path: Path) -> None:
    (shard,) = make_store(tmp_path / "s", samples_of({"train/8x8": 2})).shards
    with pytest.raises(StoreError, match=r"g0.lmdb cannot be read at byte \d+: Bad file descriptor"):
        shard._check_id(-1)
