"""Locks on single numbers, held through a file: claims that vanish with their process, however it ends.

They are byte-range locks of an open file description (`F_OFD_SETLK`). They say nothing between threads of one process, which
must keep their own record of what they hold.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import weakref
from typing import TYPE_CHECKING

from bucketline.errors import StoreError

if TYPE_CHECKING:
    from pathlib import Path

_FLOCK = struct.Struct("@hhqqi0q")  # type, whence, start, length, process id (0 for these locks)
_OPEN: weakref.WeakSet[RangeLocks] = weakref.WeakSet()


class RangeLocks:
    """The locks of one file that this process holds, each on a number from 0 to 2^62."""

    def __init__(self, path: Path) -> None:
        """Open the file, creating it if it is missing; never through a link."""
        self.path = path
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        _OPEN.add(self)

    @property
    def is_there(self) -> bool:
        """True if the file is still at its path; neither it nor the folder that it is in has been removed."""
        try:
            return os.path.samestat(os.fstat(self.fd), self.path.stat())
        except OSError:
            return False

    def duplicate(self) -> RangeLocks:
        """Return another object for the same locks: those that are held stay so until both are closed."""
        try:
            fd = os.dup(self.fd)
        except OSError as error:
            raise StoreError(f"{self.path}: the store was closed") from error
        found = RangeLocks.__new__(RangeLocks)
        found.path, found.fd = self.path, fd
        _OPEN.add(found)
        return found

    def exclusive(self, number: int) -> None:
        """Acquire a number for this process only; wait until no other holds it."""
        self._set(fcntl.F_OFD_SETLKW, fcntl.F_WRLCK, number)

    def try_exclusive(self, number: int) -> bool:
        """Acquire a number for this process only; return False if another process holds it. A shared lock becomes exclusive."""
        return self._set(fcntl.F_OFD_SETLK, fcntl.F_WRLCK, number)

    def try_shared(self, number: int) -> bool:
        """Acquire a number together with others; return False if one holds it exclusively. An exclusive lock becomes shared."""
        return self._set(fcntl.F_OFD_SETLK, fcntl.F_RDLCK, number)

    def unlock(self, number: int) -> None:
        """Release a number."""
        self._set(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, number)

    def _set(self, command: int, kind: int, number: int) -> bool:
        try:
            fcntl.fcntl(self.fd, command, _FLOCK.pack(kind, os.SEEK_SET, number, 1, 0))
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise StoreError(
                f"{self.path}: this file system has no byte-range locks ({error.strerror}); put the cache on a local disk"
            ) from error
        return True

    def close(self) -> None:
        """Release everything; idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        if "fd" in self.__dict__:
            self.close()


def _close_in_child() -> None:
    """Close what a forked child shares with its parent: it would keep the locks after the parent's end, or release them."""
    for locks in list(_OPEN):
        locks.close()


os.register_at_fork(after_in_child=_close_in_child)
