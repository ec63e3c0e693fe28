"""Freeing the ring's lines, of all stores in the cache: those that no process holds, least recently used first."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from bucketline.store.format.hashing import LINE_BYTES
from bucketline.store.remote.cache import room
from bucketline.store.remote.cache.cached_shard import (
    ABSENT,
    HEADER_BYTES,
    MAGIC,
    OLD_RING,
    PRESENT_SUFFIX,
    RING,
    first_lock,
    punch,
    uses_at,
)
from bucketline.store.remote.cache.range_locks import RangeLocks

if TYPE_CHECKING:
    from pathlib import Path

    from bucketline.store.remote.cache.room import Room


class _Victim(NamedTuple):
    last_use: int
    path: Path  # of the shard's list
    line: int
    num_bytes: int
    lock: int


class Evictor:
    """Frees lines by locks of its own, which those that the process itself holds exclude too."""

    def __init__(self, folder: Path, room: Room, locks_name: str) -> None:
        self._folder, self._room, self._locks_name = folder, room, locks_name
        self._victims: list[_Victim] = []  # the least recently used one last
        self._locks: dict[Path, RangeLocks] = {}
        self._freeing = threading.Lock()

    def free(self, count: int) -> int:
        """Free up to `count` lines; return how many."""
        freed, is_new = 0, False
        with self._freeing:
            while freed < count:
                if self._victims:
                    freed += self._free(self._victims.pop())
                elif is_new:
                    break
                else:
                    self._victims, is_new = self._search(), True
        return freed

    def _search(self) -> list[_Victim]:
        found: list[_Victim] = []
        for path in self._folder.glob(f"*/*/*{PRESENT_SUFFIX}"):
            with suppress(OSError):
                data = np.fromfile(path, dtype=np.uint8)
                if len(data) < HEADER_BYTES or data[:16].tobytes() != MAGIC:
                    continue
                num_bytes = int(data[48:56].view("<u8")[0])
                num_lines = -(-num_bytes // LINE_BYTES)
                states = data[HEADER_BYTES : HEADER_BYTES + num_lines]
                uses, locks = data[uses_at(num_lines) :].view("<i8"), first_lock(data[16:32].tobytes())
                for line in np.flatnonzero((states == RING) | (states == OLD_RING)).tolist():
                    own = min(LINE_BYTES, num_bytes - line * LINE_BYTES)
                    found.append(_Victim(int(uses[line]), path, line, own, locks | line))
        return sorted(found, reverse=True)

    def _free(self, victim: _Victim) -> bool:
        """Free a line, unless a process holds it or has used it since the search."""
        with suppress(OSError):
            locks = self._locks_of(victim.path.parent.parent)
            if not locks.try_exclusive(victim.lock):
                return False
            try:
                fd = os.open(victim.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    at = HEADER_BYTES + victim.line
                    uses = uses_at(-(-_length(fd) // LINE_BYTES)) + 8 * victim.line
                    is_same = int.from_bytes(os.pread(fd, 8, uses), "little") == victim.last_use
                    if not is_same or os.pread(fd, 1, at)[0] not in (RING, OLD_RING):
                        return False
                    with self._room.locked():
                        os.pwrite(fd, bytes([ABSENT]), at)  # first: a hole must never be read
                        self._room.add(room.RING_BYTES, -victim.num_bytes)
                finally:
                    os.close(fd)
                begin = victim.line * LINE_BYTES
                punch(victim.path.with_suffix(".lmdb"), begin, begin + victim.num_bytes)
            finally:
                locks.unlock(victim.lock)
            return True
        return False

    def _locks_of(self, store: Path) -> RangeLocks:
        path = store / self._locks_name
        locks = self._locks.get(path)
        if locks is None or not locks.is_there:
            if not path.exists():
                raise FileNotFoundError(path)
            locks = self._locks[path] = RangeLocks(path)
        return locks


def _length(fd: int) -> int:
    return int.from_bytes(os.pread(fd, 8, 48), "little")
