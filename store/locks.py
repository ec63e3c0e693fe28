"""Advisory locks that name their holder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from typing import TYPE_CHECKING

from bucketline.errors import LockedError, StoreError

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType


class FileLock:
    """An exclusive `flock` on a file of its own, held until `release` or until the process ends, however it ends."""

    def __init__(self, path: Path, item: Path | None = None) -> None:
        """Take the lock; `item` is what it guards, to be named: the store that the lock lies in, where none is given.

        Raises:
            LockedError: where another process holds it; the holder is named.
            StoreError: where the file system has no locks, or the folder cannot be written.
        """
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
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
            raise StoreError(
                f"{path}: this file system has no advisory locks ({error.strerror}); put the store on one that has"
            ) from error
        holder = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%dT%H:%M:%S%z")})
        with contextlib.suppress(OSError):  # a full disk: the lock holds, though it does not say whose it is
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, holder.encode(), 0)

    @property
    def is_released(self) -> bool:
        return self._fd < 0

    def release(self) -> None:
        """Give the lock back; more than once does nothing."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):  # a disk that has turned read-only: closing it is what gives it back
                os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()
