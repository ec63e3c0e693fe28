"""One writer at a time, and the second is told who the first is."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from bucketline.errors import LockedError, StoreError
from bucketline.files.atomic_write import FileLock
from bucketline.store.write.publish import lock_store, prepare_store
from tests.commands import spawn
from tests.kit import empty_store, open_writer

HOLD = "import sys; from pathlib import Path; from bucketline.files.atomic_write import FileLock; FileLock(Path(sys.argv[1]))"


def test_a_second_holder_is_refused_with_the_first_one_named(tmp_path: Path) -> None:
    with FileLock(tmp_path / "a.lock"), pytest.raises(LockedError, match=rf'"pid": {os.getpid()}.*wait until it has finished'):
        FileLock(tmp_path / "a.lock")


def test_another_process_is_refused_too(tmp_path: Path) -> None:
    prepare_store(tmp_path / "s")
    with lock_store(tmp_path / "s") as lock:
        ran = spawn([sys.executable, "-c", HOLD, lock.path])
    assert ran.code == 1
    assert f"LockedError: {tmp_path / 's'} is being written by another process" in ran.err
    assert f'"pid": {os.getpid()}' in ran.err


def test_a_lock_given_back_can_be_taken_again(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "a.lock")
    lock.release()
    lock.release()
    FileLock(tmp_path / "a.lock").release()


def test_the_lock_of_a_process_that_died_is_free(tmp_path: Path) -> None:
    died = spawn([sys.executable, "-c", f"{HOLD}; import os; os._exit(9)", tmp_path / "a.lock"])
    assert died.code == 9
    FileLock(tmp_path / "a.lock").release()


def test_two_writers_of_one_shard_are_refused(tmp_path: Path) -> None:
    empty_store(tmp_path)
    writer = open_writer(tmp_path, "a")
    with pytest.raises(LockedError):
        open_writer(tmp_path, "a")
    open_writer(tmp_path, "b").close()
    writer.close()


def test_a_folder_that_is_not_there_is_an_error_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"nowhere/a.lock cannot be written: No such file"):
        FileLock(tmp_path / "nowhere" / "a.lock")
