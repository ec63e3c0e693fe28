"""A folder that appears complete or not at all (atomic rename).

It is written in a hidden folder next to it, under a lock, and renamed at the end. The next run with the same output removes
what a killed run left, because nobody holds its lock. The hidden folder's name is predictable and its parent may be writable
by others (`/tmp`). So it is used only if it is our folder and nobody else can write in it, and only files with our names are
removed from it.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import shutil
import stat
from contextlib import contextmanager
from typing import TYPE_CHECKING

from bucketline.errors import LockedError, StoreError, UsageError
from bucketline.files.atomic_write import sync_folder
from bucketline.files.locks import FileLock

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LOCK, FILES = "lock", "files"

_libc = ctypes.CDLL(None, use_errno=True)


def refuse_existing(output: Path, kind: str = "folder") -> None:
    """Check that the output does not exist and that its parent does."""
    if os.path.lexists(output):
        raise UsageError(f"{output} exists; name a {kind} that does not, or delete it")
    if not output.parent.is_dir():
        raise UsageError(f"{output} cannot be made: {output.parent} is not a folder; make it first")


@contextmanager
def staged_folder(output: Path, *, resumable: bool = False) -> Iterator[Path]:
    """Yield a folder to write into. It is renamed to `output` when the block ends, or removed if the block raises.

    With `resumable`, it is kept if the block raises, and yielded again, with what it has, to the next run with this output.
    """
    refuse_existing(output)
    hidden = staging_path(output)
    lock = _claim(hidden, output)
    is_kept = resumable
    try:
        if not resumable:
            shutil.rmtree(hidden / FILES, ignore_errors=True)  # does not follow a link
        (hidden / FILES).mkdir(exist_ok=resumable and not (hidden / FILES).is_symlink())
        yield hidden / FILES
        _sync_file_system(hidden / FILES)
        refuse_existing(output)
        (hidden / FILES).rename(output)
        is_kept = False
        sync_folder(output.parent)
    except OSError as error:
        left = "rerun the command to continue" if is_kept else "nothing was left there"
        raise StoreError(f"{output} was not finished: {error}; {left}") from error
    finally:
        if not is_kept:
            _remove(hidden)  # while locked: the next run starts with a new folder
        lock.release()


def _remove(hidden: Path) -> None:
    """Remove the hidden folder if it contains only our files."""
    shutil.rmtree(hidden / FILES, ignore_errors=True)
    with contextlib.suppress(OSError):
        (hidden / LOCK).unlink(missing_ok=True)
        hidden.rmdir()


def _claim(hidden: Path, output: Path) -> FileLock:
    """Create the hidden folder, or take over the one that a killed run left, and lock it."""
    is_new = False
    try:
        with contextlib.suppress(FileExistsError):
            hidden.mkdir(mode=0o700)
            is_new = True
        status = hidden.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise StoreError(
                f"{hidden} is in the way: it is a link, a file or another user's folder; remove it, or choose another name"
            )
        hidden.chmod(0o700)
        return FileLock(hidden / LOCK, output)
    except LockedError:
        raise
    except (OSError, StoreError) as error:
        if is_new:
            _remove(hidden)
        raise StoreError(f"{output} cannot be written: {error}") from error


def staging_path(output: Path) -> Path:
    """Return the hidden folder in which `output` is written."""
    # the name is truncated: prefix and suffix could exceed the limit for file names
    digest = hashlib.blake2b(os.fsencode(output.name), digest_size=4).hexdigest()
    return output.with_name(f".{output.name[:32]}-{digest}.partial")


def _sync_file_system(folder: Path) -> None:
    """Wait until all writes are on disk (`syncfs`): one call for a folder of many files."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if _libc.syncfs(fd) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    finally:
        os.close(fd)
