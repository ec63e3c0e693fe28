"""The cache's folder: marked as ours, with one folder for each store, and limited in bytes over all of them.

Nothing is removed in a folder without the mark, and no store that a process has open.
"""

from __future__ import annotations

import gc
import json
import os
import re
import secrets
import shutil
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import numpy as np

from bucketline.command_line import human_bytes
from bucketline.errors import StoreError
from bucketline.files.atomic_write import write_durably
from bucketline.forks import ForkSafeLock
from bucketline.store.format.block import LINE_BYTES
from bucketline.store.remote.cache import room
from bucketline.store.remote.cache.cached_shard import (
    ABSENT,
    HEADER_BYTES,
    OLD_RING,
    PRESENT_SUFFIX,
    RING,
    CacheRemovedError,
    RangeLocks,
    count_lines,
    first_lock,
    punch,
    read_list,
    unpin_lines,
    uses_at,
)
from bucketline.store.remote.cache.room import NUM_BYTES, SIDECARS, RingSpace, Room

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping
    from pathlib import Path


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

    def free(self) -> bool:
        """Free the least recently used line that may be; return False if there is none.

        One at a time: of a ring of 30 lines, eight at once were fetched again.
        """
        is_new = False
        with self._freeing:
            while self._victims or not is_new:
                if not self._victims:
                    self._victims, is_new = self._search(), True
                elif self._free(self._victims.pop()):
                    return True
        return False

    def _search(self) -> list[_Victim]:
        found: list[_Victim] = []
        for path in self._folder.glob(f"*/*/*{PRESENT_SUFFIX}"):
            if (known := read_list(path)) is None:
                continue
            data, num_bytes = known
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


MARK = "bucketline-cache.json"
MARK_FORMAT = "bucketline.cache/1"
LOCKS, ABOUT = "locks", "store.json"
DEFAULT_SHARE = 0.8  # of the disk's free bytes and those that the cache holds
LEAST_BYTES = 16 * LINE_BYTES
USUAL_RING_BYTES = 96 * LINE_BYTES  # of a cache that has twice as much
_SPARE_BYTES = 2 * LINE_BYTES  # of a disk that was full, for others
RELEASED_AT_ONCE = 4 * LINE_BYTES  # of the space that is allocated for the ring
_ROOM, _SPACE, _REMOVED = "room", "ring-space", "removed-"
_IN_USE = 1 << 62  # number of the lock that every process which has a store open holds
_FOLDER = re.compile(r"[0-9A-Za-z_]{1,64}")  # of a store
_OWN_FOLDER = re.compile(rf"[0-9a-f]{{32}}|{_REMOVED}[0-9a-f]{{8}}")
_LOOK_AGAIN_S = 10.0  # after no store could be removed
_BOOKKEEPING = (PRESENT_SUFFIX, ".lmdb", ".tmp")  # not counted as whole files: 9 bytes a line; lines are counted by their lists


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedStore:
    """A store in the cache, as `store cache info` shows it."""

    folder: str  # its name in the cache
    url: str
    pinned_bytes: int
    ring_bytes: int
    sidecar_bytes: int
    last_used_s: float  # Unix time
    is_open: bool

    @property
    def num_bytes(self) -> int:
        return self.pinned_bytes + self.ring_bytes + self.sidecar_bytes


class StoreFolder:
    """One store's folder in the cache, held open: it is not removed until `close`, or until the process ends."""

    def __init__(self, path: Path, url: str) -> None:
        self.path = path
        self.sidecar_bytes = 0  # of all its sidecars, those to be fetched included
        while True:
            path.mkdir(parents=True, exist_ok=True)
            self.locks = RangeLocks(path / LOCKS)
            is_held = self.locks.try_shared(_IN_USE)
            if is_held and self.locks.is_there:
                break
            self.locks.close()  # it is being removed
            time.sleep(0.01)
        os.utime(path / LOCKS)
        if not (path / ABOUT).exists():
            write_durably(path / ABOUT, json.dumps({"url": url}).encode())

    def refuse_removed(self) -> None:
        """Check that somebody has not removed the folder: what is written into it would be lost, or make no cache of it."""
        if not self.locks.is_there:
            raise CacheRemovedError.of(self.path)

    def close(self) -> None:
        """Let other processes remove the store."""
        if self.locks.fd >= 0:
            with suppress(OSError):
                os.utime(self.path / LOCKS)
            self.locks.close()


def ring_share(limit: int, needed: int = 0) -> int:
    """Return how many of a cache's bytes are never pinned: what its readers need, or the usual if that is not known."""
    return min(needed, limit) or min(limit // 2, USUAL_RING_BYTES)


class CacheFolder:
    """An open cache folder. One object a process and folder, by `cache_folder`."""

    def __init__(self, path: Path, limit: int | None) -> None:
        """Open the folder, or make it; count what it holds."""
        self.path = path
        try:
            _mark(path)
            _make_once(path / _ROOM, bytes(NUM_BYTES))
            self.room = Room(path / _ROOM)
            self._space = RingSpace(path / _SPACE)
        except OSError as error:
            raise StoreError(f"the cache {path} cannot be used: {error.strerror}; name another folder with --cache") from error
        self.recount()
        self.given_limit = limit
        self.limit = limit or int(DEFAULT_SHARE * self._bytes_on_disk())
        if self.limit < LEAST_BYTES:
            raise StoreError(
                f"the cache {path} may hold {human_bytes(self.limit)}, at least {human_bytes(LEAST_BYTES)} are needed; give "
                "more with --cache-bytes, or name a folder on another disk with --cache"
            )
        self.asked_limit = self.limit
        self.evictor = Evictor(path, self.room, LOCKS)
        self._nothing_until = self._collects_at = 0.0
        self._making_room = threading.Lock()
        self._spare = 0  # bytes of the ring whose space is allocated
        self._needs: WeakKeyDictionary[object, tuple[Mapping[Hashable, int], Callable[[int], bool]]] = WeakKeyDictionary()
        self._opened: WeakSet[StoreFolder] = WeakSet()

    @property
    def ring_bytes(self) -> int:
        """The share of the limit that is never pinned: what does not fit passes through it."""
        needed: dict[Hashable, int] = {}
        for own, is_held in tuple(self._needs.values()):
            if not is_held(self.limit):
                needed.update(own)
        return ring_share(self.limit, sum(needed.values()))

    def reserve_ring(self, reader: object, needed: Mapping[Hashable, int], is_held: Callable[[int], bool]) -> None:
        """Leave bytes to lines that are not pinned, while `reader` exists; what several readers need counts once, by key.

        They are allocated on the disk, so that pinned lines and others leave them. They are not needed while a cache of the
        limit, which a full disk lowers, keeps all that the reader reads: `is_held` tells whether one of so many bytes does.
        """
        self._needs[reader] = needed, is_held
        self._spare = max(self._spare, sum(needed.values()))
        self.regrow()
        if not self._space.grow_to(min(self._spare, self.limit) - self.room.ring()):
            self.limit = min(self.limit, max(LEAST_BYTES, self._bytes_on_disk() - _SPARE_BYTES))

    def _bytes_on_disk(self) -> int:
        """Return the bytes that the cache has on its disk, and those that are free there."""
        return self.room.used() + self._space.num_bytes + shutil.disk_usage(self.path).free

    def release_space(self) -> bool:
        """Free some of the space that is allocated for the ring, for lines that arrive; return False if there is none."""
        return self._space.shrink_to(self._space.num_bytes - RELEASED_AT_ONCE)

    def set_limit(self, limit: int) -> None:
        """Let the cache have up to `limit` bytes from now on, but no fewer than the least."""
        self.limit = self.asked_limit = self.given_limit = max(limit, LEAST_BYTES)

    def shrink(self) -> None:
        """Let the cache have no more bytes than now, and the space for the ring: the disk is full."""
        self.limit = min(self.limit, self.room.used() + self._space.num_bytes)

    def regrow(self) -> bool:
        """After `shrink`, let the limit follow the disk's free bytes; return whether it grew."""
        if self.limit >= self.asked_limit:
            return False
        before, self.limit = self.limit, max(self.limit, min(self.asked_limit, self._bytes_on_disk() - _SPARE_BYTES))
        return self.limit > before

    def open_store(self, key: str, url: str) -> StoreFolder:
        """Return a store's folder, made if it is missing; `key` is that of `store_key`."""
        try:
            folder = StoreFolder(self.path / key, url)
            self._opened.add(folder)
            self.unpin(folder)
        except OSError as error:
            raise StoreError(
                f"the cache {self.path} cannot be used: {error.strerror}; name another folder with --cache"
            ) from error
        return folder

    def unpin(self, folder: StoreFolder) -> None:
        """Leave lines of a store to the ring if more are pinned than may be now, and no other process relies on them.

        This process has opened no shard of it.
        """
        excess = self._kept() - (self.limit - self.ring_bytes)
        if excess > 0 and folder.locks.try_exclusive(_IN_USE):
            for path in sorted(folder.path.glob(f"*/*{PRESENT_SUFFIX}"), key=lambda path: path.name, reverse=True):
                excess -= unpin_lines(path, excess)
            self.recount()
            folder.locks.try_shared(_IN_USE)

    def _store_folders(self) -> list[Path]:
        return sorted(folder for folder in self.path.iterdir() if _FOLDER.fullmatch(folder.name) and (folder / LOCKS).is_file())

    def recount(self) -> None:
        """Count what the folder holds: a killed process may have left the counts behind what it did."""
        with self.room.locked():
            pinned = ring = sidecars = 0
            for folder in self._store_folders():
                own = _bytes_of(folder)
                pinned, ring, sidecars = pinned + own[0], ring + own[1], sidecars + own[2]
            self.room.recounted(pinned, ring, sidecars)

    def reserve(self, num_bytes: int) -> bool:
        """Reserve bytes, and free what nobody uses if there is no room for them; return False if that is not enough."""
        while not self.room.reserve(num_bytes, self.limit):
            if not self.regrow() and not self.make_room():
                return False
        return True

    def make_room(self) -> bool:
        """Free something in the cache that nobody uses; return False if there is nothing."""
        with self._making_room:
            if self.remove_oldest() or self.evictor.free():
                return True
        count = len(self._opened)
        if count > 1 and time.monotonic() > self._collects_at:
            gc.collect()  # closes stores that are open here only for loaders nobody has: their objects refer to each other
            self._collects_at, self._nothing_until = time.monotonic() + _LOOK_AGAIN_S, 0.0
        return len(self._opened) < count

    def put_sidecar(self, written: Path, path: Path) -> None:
        """Move a file that was written whole to its place, and count it instead of the bytes that were reserved for it.

        Another thread or process may have put the same file there.
        """
        with self.room.locked():
            num_bytes, before = written.stat().st_size, path.stat().st_size if path.exists() else 0
            written.replace(path)
            self.room.convert(SIDECARS, num_bytes)
            self.room.add(SIDECARS, -before)

    def may_pin(self, num_bytes: int) -> bool:
        """Return whether a line is to be pinned: as long as pinned ones leave the ring its share."""
        while self._kept() + num_bytes > self.limit - self.ring_bytes:
            if not self.remove_oldest():
                self._space.shrink_to(self._spare - self.room.ring() - num_bytes)
                return False
        return True

    def _kept(self) -> int:
        """Return the bytes that are not freed while they are in use: of pinned lines and sidecars, those to come included."""
        return self.room.pinned() + max(self.room.sidecars(), sum(folder.sidecar_bytes for folder in tuple(self._opened)))

    def remove_oldest(self) -> bool:
        """Remove the least recently used store that no process has open; return False if there is none."""
        if time.monotonic() < self._nothing_until:
            return False
        for folder in sorted(self._store_folders(), key=_last_used):
            if self._remove(folder):
                return True
        self._nothing_until = time.monotonic() + _LOOK_AGAIN_S
        return False

    def _remove(self, folder: Path) -> bool:
        """Remove a store's folder; return False if a process has it open."""
        with suppress(FileNotFoundError):
            locks = RangeLocks(folder / LOCKS)
            try:
                if not locks.try_exclusive(_IN_USE):
                    return False
                aside = self.path / f"{_REMOVED}{secrets.token_hex(4)}"
                folder.rename(aside)
            finally:
                locks.close()
            shutil.rmtree(aside, ignore_errors=True)
            self.recount()
            return True
        return False

    def clear(self) -> tuple[list[CachedStore], list[CachedStore]]:
        """Remove every store that no process has open; return what was removed, and what is in use."""
        removed: list[CachedStore] = []
        kept: list[CachedStore] = []
        for store in self.stores():
            (removed if self._remove(self.path / store.folder) else kept).append(store)
        if not kept:
            self._space.shrink_to(0)
        self.recount()
        return removed, kept

    def stores(self) -> Iterator[CachedStore]:
        for folder in self._store_folders():
            pinned, ring, sidecars = _bytes_of(folder)
            try:
                url = str(json.loads((folder / ABOUT).read_bytes())["url"])
            except (OSError, ValueError, KeyError, TypeError):
                url = "?"
            locks = RangeLocks(folder / LOCKS)
            is_open = not locks.try_exclusive(_IN_USE)
            locks.close()
            yield CachedStore(
                folder=folder.name,
                url=url,
                pinned_bytes=pinned,
                ring_bytes=ring,
                sidecar_bytes=sidecars,
                last_used_s=_last_used(folder),
                is_open=is_open,
            )

    def full(self, error: OSError | None = None) -> StoreError:
        free = shutil.disk_usage(self.path).free
        why = f": {error.strerror}" if error else ""
        return StoreError(
            f"the cache {self.path} has no room for another line or file{why}; it holds {human_bytes(self.room.used())} of at "
            f"most {human_bytes(self.limit)}, {human_bytes(self.room.pinned())} of them pinned, and {human_bytes(free)} of the "
            "disk are free; make room on the disk, give --cache-bytes, or name another folder with --cache"
        )


_opened: dict[tuple[int, Path], CacheFolder] = {}
_opening = ForkSafeLock()


def cache_folder(path: Path, limit: int | None = None) -> CacheFolder:
    """Return the process's cache in a folder; the first limit that is given to it counts, or a later one that differs.

    If somebody has removed the folder since, it is made again; who has it open keeps what was removed.
    """
    path = path.expanduser().absolute()
    with _opening:
        key = os.getpid(), path
        found = _opened.get(key)
        if found is None or not found.room.is_there:
            limit = limit or (None if found is None else found.given_limit)
            for other in [other for other in _opened if other[0] != key[0]]:
                del _opened[other]  # a parent's, whose locks are closed here
            _opened[key] = CacheFolder(path, limit)
        elif limit is not None:
            found.set_limit(limit)
        return _opened[key]


def forget_cache(path: Path) -> None:
    """Let go of a cache whose folder is temporary, and about to be removed."""
    with _opening:
        _opened.pop((os.getpid(), path.expanduser().absolute()), None)


def is_cache(path: Path) -> bool:
    try:
        return bool(json.loads((path / MARK).read_bytes()).get("format") == MARK_FORMAT)
    except (OSError, ValueError, AttributeError):
        return False


def _is_own(path: Path) -> bool:
    """Return True if only a cache has this: a removal may take the mark and leave what is written meanwhile."""
    if path.name in (_ROOM, _SPACE):
        return path.is_file() and (path.name == _SPACE or path.stat().st_size == NUM_BYTES)
    if not _OWN_FOLDER.fullmatch(path.name):
        return False
    return (path / LOCKS).is_file() or any(path.glob(f"*/*{PRESENT_SUFFIX}"))


def _mark(path: Path) -> None:
    was_cache = is_cache(path)
    if not was_cache:
        path.mkdir(parents=True, exist_ok=True)
        left = [found.name for found in path.iterdir() if not found.name.startswith(MARK) and not _is_own(found)]
        if left and not is_cache(path):  # looked up again: another process may have begun the cache meanwhile, its mark first
            raise StoreError(
                f"{path} is not a cache and not empty: it has {min(left)!r:.80}; name an empty folder, or one that does not "
                "exist, with --cache"
            )
        write_durably(path / MARK, json.dumps({"format": MARK_FORMAT}).encode())
    for folder in path.glob(f"{_REMOVED}*"):  # of a process that was killed while it removed a store
        if was_cache and re.fullmatch(f"{_REMOVED}[0-9a-f]{{8}}", folder.name) and not folder.is_symlink():
            shutil.rmtree(folder, ignore_errors=True)


def _make_once(path: Path, data: bytes) -> None:
    """Make a file, complete from the first moment; do nothing if it is there."""
    if path.exists():
        return
    aside = path.with_name(f"{MARK}.{secrets.token_hex(4)}.tmp")
    try:
        aside.write_bytes(data)
        with suppress(FileExistsError):
            os.link(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def _bytes_of(folder: Path) -> tuple[int, int, int]:
    """Return a store's bytes: pinned, in the ring, and of the files that are there whole."""
    pinned = ring = sidecars = 0
    with suppress(FileNotFoundError):
        for path in folder.rglob("*"):
            if path.suffix == PRESENT_SUFFIX:
                own = count_lines(path)
                pinned, ring = pinned + own[0], ring + own[1]
            if path.suffix not in _BOOKKEEPING and path.name not in (LOCKS, ABOUT) and path.is_file():
                with suppress(FileNotFoundError):
                    sidecars += path.lstat().st_size
    return pinned, ring, sidecars


def _last_used(folder: Path) -> float:
    try:
        return (folder / LOCKS).stat().st_mtime
    except OSError:
        return 0.0
