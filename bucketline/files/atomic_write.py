"""Atomic file writes: after a crash the old or the new file is there, complete. Locks. Links are never written through.

An unfinished file is locked by the process that writes it, so that others can tell what a killed one has left.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import json
import os
import random
import re
import secrets
import shutil
import socket
import stat
import sys
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from bucketline.errors import LockedError, NoLocksError, StoreError, UsageError
from bucketline.forks import OwnerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import TracebackType


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


def is_held(fd: int) -> bool:
    """Return True if a process holds the lock of an open file. It takes the lock for a moment: `FileLock` tries again."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


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


# ------------------------------------------------------------------------------------------------------------------ copy bytes
# Copy bytes between two open files; they share blocks if the file system supports it.

_READ_BYTES = 1 << 20
_CANNOT = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)


def copy_some(source: int, target: int, num_bytes: int) -> int:
    """Copy bytes from the descriptors' current positions. Return their number, 0 at the end of the source."""
    try:
        return os.copy_file_range(source, target, num_bytes)
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
    data = memoryview(os.read(source, min(num_bytes, _READ_BYTES)))
    done = 0
    while done < len(data):
        done += os.write(target, data[done:])
    return len(data)


# ------------------------------------------------------------------------------------------------------------------ disk space
# Free disk space: checked before the work starts, and named when a write has failed.

FULL_BYTES = 1 << 24  # a disk with less free space counts as full


def refuse_too_little_disk(folder: Path, needed_bytes: int, what: str, remedy: str = "or choose another disk") -> None:
    """Check that an existing folder's disk has room for what is to be written."""
    free = shutil.disk_usage(folder).free
    if needed_bytes > free:
        raise StoreError(
            f"{what} needs about {-(-needed_bytes >> 20)} MiB in {folder}, but only {free >> 20} MiB are free; "
            f"make room, {remedy}"
        )


def failed_write(folder: Path, error: Exception) -> str:
    """Return what an error of writing in a folder says, and that the disk is full if it is: libraries say it in other words."""
    with suppress(OSError):
        free = shutil.disk_usage(folder).free
        if free < FULL_BYTES or os.strerror(errno.ENOSPC) in str(error):  # safetensors' has that, and no errno
            return f"{os.strerror(errno.ENOSPC)}, {free} bytes are free ({error})"
    return str(error)


def remedy_for_failed_write(folder: Path, *, is_full: bool = False) -> str:
    """Return what helps after a failed write in a folder: LMDB reports a short write on a full disk as an I/O error."""
    with suppress(OSError):
        free = shutil.disk_usage(folder).free
        if is_full or free < FULL_BYTES:
            return f"the disk is full ({free >> 10} KiB are free): make room and rerun the command"
    return "fix this and rerun the command"


# ----------------------------------------------------------------------------------------------------------------- sparse file
# Files of a length and without content, which stand for others.


def make_sparse(path: Path, num_bytes: int) -> None:
    """Replace a file by one that has only a length. Who has the former one open reads on."""
    aside, fd = create_aside(path)
    try:
        os.ftruncate(fd, num_bytes)
        aside.replace(path)
    finally:
        os.close(fd)


# ----------------------------------------------------------------------------------------------------------------------- locks
# Advisory file locks that record their holder.


SAY_AFTER_S = 5.0
LOOK_AGAIN_S = 0.002, 0.03  # a commit holds a lock for some milliseconds


class FileLock:
    """An exclusive `flock` on a separate file, held until `release` or until the process ends for any reason."""

    def __init__(self, path: Path, item: Path | None = None, *, wait_s: float = 0.0) -> None:
        """Acquire the lock, waiting up to `wait_s`. Errors name `item`, which it guards; default: the lock's store."""
        self.path = path
        self._owner = OwnerProcess()
        try:
            self._fd = _open_own(path)
        except OSError as error:
            raise StoreError(f"{path} cannot be written: {error.strerror}") from error
        try:
            self._acquire(item or path.parent.parent, wait_s)
        except BaseException:
            os.close(self._fd)
            raise
        holder = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%dT%H:%M:%S%z")})
        with contextlib.suppress(OSError):  # disk full: the lock holds, but does not record its holder
            if os.fstat(self._fd).st_nlink == 1:  # a hard link may be outside the store
                os.ftruncate(self._fd, 0)
                os.pwrite(self._fd, holder.encode(), 0)

    def _acquire(self, item: Path, wait_s: float) -> None:
        """Take the lock. A queue of waiting processes gets it in no order; one that waits long says so once."""
        begun, is_said = time.monotonic(), False
        while not self._is_taken():
            waited_s = time.monotonic() - begun
            holder = os.pread(self._fd, 4096, 0).decode("utf-8", "replace").strip("{}").replace('"', "")
            what = f"{item} is being written by another process ({holder or 'it has not said who it is'})"
            if waited_s >= wait_s:
                raise LockedError(f"{what}; wait until it has finished, or stop it")
            if waited_s >= SAY_AFTER_S and not is_said:
                is_said = True
                print(f"{what}; waiting until it has finished, {wait_s:.0f} s at most", file=sys.stderr, flush=True)
            time.sleep(random.uniform(*LOOK_AGAIN_S))  # noqa: S311 - nothing secret

    def _is_taken(self) -> bool:
        """Take the lock if no process holds it; return whether it is taken."""
        try:
            with suppress(BlockingIOError, PermissionError):
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            time.sleep(0.01)  # perhaps it was held only by a process that asked: `is_held`
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            if error.errno == errno.EBADF:  # opened read-only, which NFS cannot lock exclusively
                raise StoreError(f"{self.path} cannot be written: {os.strerror(errno.EACCES)}") from error
            raise NoLocksError(
                f"{self.path}: this file system has no advisory locks ({error.strerror}); put the store on one that has"
            ) from error
        return True

    @property
    def is_released(self) -> bool:
        return self._fd < 0

    def release(self) -> None:
        """Release the lock; idempotent. In a forked child, the lock stays its parent's."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):  # read-only disk: closing the descriptor releases the lock
                if self._owner.is_current and os.fstat(self._fd).st_nlink == 1:
                    os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


def _open_own(path: Path) -> int:
    """Open a lock file, creating it if missing; never through a link, never a pipe or a device."""
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(path.lstat().st_mode):
            raise OSError(errno.ELOOP, "it is a link or not a regular file; remove it and rerun the command", os.fspath(path))
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | flags, FILE_MODE)
    except PermissionError:
        # another user's lock file under a different umask, in a writable folder: flock works on a read-only descriptor
        if not path.exists() or not os.access(path.parent, os.W_OK, effective_ids=True):
            raise
        return os.open(path, os.O_RDONLY | flags)


# --------------------------------------------------------------------------------------------------------------- atomic folder
# A folder that appears complete or not at all (atomic rename).
#
# It is written in a hidden folder next to it, under a lock, and renamed at the end. The next run with the same output removes
# what a killed run left, because nobody holds its lock. The hidden folder's name is predictable and its parent may be writable
# by others (`/tmp`). So it is used only if it is our folder and nobody else can write in it, and only files with our names are
# removed from it.

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
        raise StoreError(f"{output} was not finished: {error.strerror or error}; {left}") from error
    finally:
        if not is_kept:
            _remove(hidden)  # while locked: the next run starts with a new folder
        lock.release()


def _remove(hidden: Path) -> None:
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
