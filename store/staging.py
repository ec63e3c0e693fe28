"""A folder that appears under its name whole, or not at all.

It is written in a hidden folder beside it, under a lock, and renamed at the end. What a killed run left there has no holder:
the next run to the same name removes it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING

from bucketline.errors import LockedError, StoreError, UsageError
from bucketline.store.durable import sync_folder
from bucketline.store.locks import FileLock

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LOCK, FILES = "lock", "files"

_libc = ctypes.CDLL(None, use_errno=True)


def refuse_existing(output: Path, kind: str = "folder") -> None:
    """Refuse a folder, or a file, that is there already, or that has no folder to lie in.

    Raises:
        UsageError: naming it.
    """
    if os.path.lexists(output):
        raise UsageError(f"{output} exists; name a {kind} that does not, or delete it")
    if not output.parent.is_dir():
        raise UsageError(f"{output} cannot be made: {output.parent} is not a folder; make it first")


@contextmanager
def staged_folder(output: Path) -> Iterator[Path]:
    """Give a folder to write into; it becomes `output` when the block ends, and is removed where that raises.

    Raises:
        UsageError: where `output` exists.
        LockedError: where another process is writing it.
        StoreError: where it cannot be written.
    """
    refuse_existing(output)
    hidden = staging_path(output)
    lock = _claim(hidden, output)
    try:
        shutil.rmtree(hidden / FILES, ignore_errors=True)
        (hidden / FILES).mkdir()
        yield hidden / FILES
        _sync_file_system(hidden / FILES)
        refuse_existing(output)
        (hidden / FILES).rename(output)
        sync_folder(output.parent)
    except OSError as error:
        raise StoreError(f"{output} was not finished: {error}; nothing was left there") from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)  # while it is locked: who comes next begins with a new one
        lock.release()


def _claim(hidden: Path, output: Path) -> FileLock:
    """Make the hidden folder, or take over one that a killed run left, and lock it."""
    is_new = not hidden.exists()
    try:
        hidden.mkdir(exist_ok=True)
        return FileLock(hidden / LOCK, output)
    except LockedError:
        raise
    except (OSError, StoreError) as error:
        if is_new:
            shutil.rmtree(hidden, ignore_errors=True)
        raise StoreError(f"{output} cannot be written: {error}") from error


def staging_path(output: Path) -> Path:
    """Give the hidden folder in which `output` is written."""
    # the name is cut: with what is added to it, it would be too long where the folder's own is just not
    digest = hashlib.blake2b(os.fsencode(output.name), digest_size=4).hexdigest()
    return output.with_name(f".{output.name[:32]}-{digest}.partial")


def _sync_file_system(folder: Path) -> None:
    """Wait until everything that was written is on the disk: once, for a folder of many files (`syncfs`)."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        if _libc.syncfs(fd) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    finally:
        os.close(fd)
