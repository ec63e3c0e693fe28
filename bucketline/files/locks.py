"""Advisory file locks that record their holder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import stat
import time
from typing import TYPE_CHECKING

from bucketline.errors import LockedError, NoLocksError, StoreError
from bucketline.files.atomic_write import FILE_MODE
from bucketline.forks import OwnerProcess

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType


class FileLock:
    """An exclusive `flock` on a separate file, held until `release` or until the process ends for any reason."""

    def __init__(self, path: Path, item: Path | None = None) -> None:
        """Acquire the lock. Errors name `item`, which it guards; default: the store that contains the lock."""
        self.path = path
        self._owner = OwnerProcess()
        try:
            self._fd = _open_own(path)
        except OSError as error:
            raise StoreError(f"{path} cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(self._fd, 4096).decode("utf-8", "replace")
            os.close(self._fd)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise LockedError(
                    f"{item or path.parent.parent} is being written by another process "
                    f"({holder or 'it has not said who it is'}); wait until it has finished, or stop it"
                ) from error
            if error.errno == errno.EBADF:  # opened read-only, which NFS cannot lock exclusively
                raise StoreError(f"{path} cannot be written: {os.strerror(errno.EACCES)}") from error
            raise NoLocksError(
                f"{path}: this file system has no advisory locks ({error.strerror}); put the store on one that has"
            ) from error
        holder = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%dT%H:%M:%S%z")})
        with contextlib.suppress(OSError):  # disk full: the lock holds, but does not record its holder
            if os.fstat(self._fd).st_nlink == 1:  # a hard link may be outside the store
                os.ftruncate(self._fd, 0)
                os.pwrite(self._fd, holder.encode(), 0)

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
