"""Atomic file writes: after a crash the old or the new file is there, complete. Links are never written through.

An unfinished file is locked by the process that writes it, so that others can tell what a killed one has left.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from bucketline.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


_ASIDE = re.compile(r".+\.[0-9a-f]{8}\.tmp", re.DOTALL)
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
FILE_MODE = 0o666  # before umask


def is_aside(name: str) -> bool:
    """Return True if the name is that of a temporary file of `write_durably`."""
    return _ASIDE.fullmatch(name) is not None


def create_held(path: Path) -> int:
    """Create an unfinished file and return its descriptor, open for writing; until that is closed, it is this process's."""
    while True:
        fd = os.open(path, CREATE, FILE_MODE)
        with suppress(OSError):  # a file system without locks, where no store is changed
            fcntl.flock(fd, fcntl.LOCK_EX)  # waits for a `remove_unless_held` at most, which has then removed it
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)


def create_aside(path: Path) -> tuple[Path, int]:
    """Create a temporary file next to `path` under an unpredictable name, as `create_held`; `is_aside` knows it."""
    aside = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    return aside, create_held(aside)


def remove_unless_held(path: Path, lock: Path | None = None) -> None:
    """Remove a file, unless a process holds its lock: that of the file `lock`, which is removed too, by default its own."""
    lock = lock or path
    try:
        fd = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        if not lock.is_symlink() and os.path.lexists(lock):
            return  # another user's: nobody can tell
        path.unlink(missing_ok=True)
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
        lock.unlink(missing_ok=True)
    except BlockingIOError:
        pass
    finally:
        os.close(fd)


def write_durably(path: Path, data: bytes, *, syncs: bool = True) -> None:
    """Replace `path` with `data`: write to an unpredictable temporary name, fsync, rename, fsync the folder.

    Without `syncs`, it is complete for every process, but not after a power failure; it then waits for no disk.
    """
    aside, fd = create_aside(path)
    try:
        with open(fd, "wb") as file:  # noqa: PTH123 - opens a descriptor
            file.write(data)
            file.flush()
            if syncs:
                os.fsync(file.fileno())
            aside.replace(path)  # still held
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    if syncs:
        sync_folder(path.parent)


def write_or_explain(path: Path, data: bytes) -> None:
    """Replace `path` with `data`, like `write_durably`."""
    try:
        write_durably(path, data)
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror}; fix that and rerun the command") from error


@contextmanager
def explaining(item: Path) -> Iterator[None]:
    """Convert an OSError in this block to a StoreError that names the file, or else `item`."""
    try:
        yield
    except OSError as error:
        what = f"{error.filename or item} cannot be read or changed: {error.strerror or error}"
        raise StoreError(f"{what}; fix that and rerun the command") from error


def move_durably(source: Path, target: Path) -> None:
    """Move a file within a file system: fsync it, rename, fsync both folders."""
    with source.open("rb") as file:
        os.fsync(file.fileno())
    source.replace(target)
    sync_folder(target.parent)
    sync_folder(source.parent)


def sync_folder(folder: Path) -> None:
    """Fsync a folder's entries."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
