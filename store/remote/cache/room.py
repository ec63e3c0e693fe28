"""The room in a cache: how many bytes all processes together hold or have reserved, in a small file that they share.

Every change is made under one lock, together with what it counts (a line's byte in its shard's list), so a recount gives the
same numbers. A process reserves bytes in a slot of its own, which it holds locked: those of a process that is gone are free.
"""

from __future__ import annotations

import ctypes
import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from bucketline.errors import StoreError
from bucketline.store.remote.cache.cached_shard import FULL, RangeLocks, fallocate
from bucketline.store.shard.mapped import map_file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PINNED_BYTES, RING_BYTES, SIDECARS, CLOCK = range(4)  # words: bytes of pinned and ring lines, of whole files; uses so far
_SLOTS_AT, _SLOTS = 8, 1024
NUM_BYTES = 8 * (_SLOTS_AT + _SLOTS)
_ALL = 0  # number of the lock on the words


class Room:
    """The words of one cache folder."""

    def __init__(self, path: Path) -> None:
        """Map the words and take a slot. The file exists, `NUM_BYTES` long."""
        self._locks, self._own = RangeLocks(path), threading.RLock()
        if os.fstat(self._locks.fd).st_size != NUM_BYTES:
            raise StoreError(f"{path} does not have {NUM_BYTES} bytes; remove it while no process uses the cache")
        # another descriptor than that of the locks: a map keeps those of the one that it is made by
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            self._words = np.frombuffer(map_file(fd, NUM_BYTES, writable=True), dtype="<i8")
        finally:
            os.close(fd)
        with self.locked() as words:
            slot = next((n for n in range(_SLOTS) if self._locks.try_exclusive(1 + n)), None)
            if slot is None:
                raise StoreError(f"{path.parent} is used by {_SLOTS} processes, its maximum")
            self._slot = _SLOTS_AT + slot
            words[self._slot] = 0

    @property
    def is_there(self) -> bool:
        """True if the cache folder that it is in has not been removed."""
        return self._locks.is_there

    @contextmanager
    def locked(self) -> Iterator[np.ndarray[tuple[int], np.dtype[np.int64]]]:
        """Yield the words while no other thread or process changes them. Keep it short: system calls only on this machine."""
        with self._own:
            self._locks.exclusive(_ALL)
            try:
                yield self._words
            finally:
                self._locks.unlock(_ALL)

    def used(self) -> int:
        """Return the bytes that are held or reserved, by all processes."""
        words = self._words
        return int(words[PINNED_BYTES] + words[RING_BYTES] + words[SIDECARS] + words[_SLOTS_AT:].sum())

    def pinned(self) -> int:
        return int(self._words[PINNED_BYTES])

    def ring(self) -> int:
        return int(self._words[RING_BYTES])

    def sidecars(self) -> int:
        return int(self._words[SIDECARS])

    def is_shared(self) -> bool:
        """Return whether another process uses the cache."""
        with self.locked():
            for slot in range(_SLOTS):
                if slot != self._slot - _SLOTS_AT:
                    if not self._locks.try_exclusive(1 + slot):
                        return True
                    self._locks.unlock(1 + slot)
        return False

    def reserve(self, num_bytes: int, limit: int) -> bool:
        """Reserve bytes; return False if there would be more than `limit` then."""
        with self.locked() as words:
            if self.used() + num_bytes > limit:
                return False
            words[self._slot] += num_bytes
            return True

    def give_back(self, num_bytes: int) -> None:
        """Reserve bytes no longer."""
        with self.locked() as words:
            words[self._slot] -= num_bytes

    def convert(self, kind: int, num_bytes: int) -> None:
        """Count bytes that this process has reserved as held. The caller holds `locked`."""
        self._words[self._slot] -= num_bytes
        self._words[kind] += num_bytes

    def add(self, kind: int, num_bytes: int) -> None:
        """Count bytes as held, or with a negative number as held no longer. The caller holds `locked`."""
        self._words[kind] += num_bytes

    def tick(self) -> int:
        """Return the next number of the uses of lines, roughly in their order."""
        self._words[CLOCK] += 1
        return int(self._words[CLOCK])

    def recounted(self, pinned: int, ring: int, sidecars: int) -> None:
        """Replace the counts by those found in the folder, and free the slots of processes that are gone.

        The caller holds `locked`.
        """
        self._words[[PINNED_BYTES, RING_BYTES, SIDECARS]] = pinned, ring, sidecars
        for slot in np.flatnonzero(self._words[_SLOTS_AT:]).tolist():
            if slot != self._slot - _SLOTS_AT and self._locks.try_exclusive(1 + slot):
                self._words[_SLOTS_AT + slot] = 0
                self._locks.unlock(1 + slot)

    def close(self) -> None:
        if self._locks.fd >= 0:
            with self.locked() as words:
                words[self._slot] = 0
            self._locks.close()


class RingSpace:
    """Disk space for lines that pass through: allocated before others fill the disk, and given to lines when they have.

    It is a file in the cache's folder that holds nothing. All processes share it. It shrinks while such lines arrive, so that
    pinned lines, the ring and this file together stay within the cache's limit.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def num_bytes(self) -> int:
        try:
            return self._path.lstat().st_size
        except OSError:
            return 0

    def grow_to(self, num_bytes: int) -> bool:
        """Have at least so many bytes; return False, and change nothing, if the disk has no room for them."""
        begin = self.num_bytes
        if begin >= num_bytes:
            return True
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            return error.errno not in FULL
        try:
            if fallocate(fd, begin, num_bytes) and ctypes.get_errno() in FULL:
                os.ftruncate(fd, begin)
                return False
        finally:
            os.close(fd)
        return True  # also if the file system cannot allocate

    def shrink_to(self, num_bytes: int) -> bool:
        """Have at most so many bytes, and 0 or more; return False if it has no more already."""
        if self.num_bytes <= max(0, num_bytes):
            return False
        try:
            os.truncate(self._path, max(0, num_bytes))
        except OSError:
            return False
        return True
