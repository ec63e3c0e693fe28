"""Fetching lines: requested in the order of the plan, by threads that each wait for one range of the store's objects.

A line is *held* while somebody is going to read it: then it is fetched if it is absent, and not freed once it is there. Pinned
lines stay as long as the store is open, and are not recorded. Everything here is of one store and one process.
"""

from __future__ import annotations

import heapq
import os
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from bucketline.errors import CorruptError, StoreError
from bucketline.store.format.hashing import LINE_BYTES, checksum
from bucketline.store.remote.cache import room
from bucketline.store.remote.cache.cached_shard import ABSENT, OLD_PINNED, OLD_RING, PINNED, RING
from bucketline.store.remote.cache.pauses import pause_after
from bucketline.store.remote.objects import DeniedError, MissingObjectError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from bucketline.store.remote.cache.cached_shard import CachedShard
    from bucketline.store.remote.cache.folder import CacheFolder
    from bucketline.store.remote.objects import ObjectFolder

MAX_REQUESTS = 16  # of one line each: joined lines cost more, in memory that is new for every request
MAX_BYTES_IN_FLIGHT = 128 << 20
FIRST_BYTES_S = 2 << 20  # of a link of which nothing is known yet
LOOK_AGAIN_S = 0.02  # at a line that another process fetches, or for room
MAX_WRONG = 4  # times that a line's bytes may differ from its checksum
IDLE_S = 30.0  # after which a thread ends
EVICT_AT_ONCE = 8  # lines


class _State(Enum):
    QUEUED = auto()
    FETCHING = auto()
    READY = auto()
    FAILED = auto()


class HeldLine:
    """A line that somebody is going to read."""

    __slots__ = (
        "error",
        "holders",
        "is_without_room",
        "not_before",
        "number",
        "priority",
        "reserved",
        "shard",
        "state",
        "tries",
        "wrong",
    )

    def __init__(self, shard: CachedShard, number: int, priority: int) -> None:
        self.shard, self.number, self.priority = shard, number, priority
        self.state, self.holders = _State.QUEUED, 1
        self.tries = self.wrong = 0  # requests that failed, and those of them whose bytes were wrong
        self.error: Exception | None = None  # of the last try
        self.not_before = 0.0
        self.is_without_room = False
        self.reserved = 0  # bytes

    @property
    def num_bytes(self) -> int:
        begin, end = self.shard.place(self.number)
        return end - begin


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchStats:
    """Counts of what a process has fetched of a store, since it was opened."""

    bytes_fetched: int = 0
    requests: int = 0
    retries: int = 0
    hits: int = 0  # lines that were in the cache when they were requested
    misses: int = 0
    waits: int = 0  # batches that had to wait for a line
    waited_s: float = 0.0


class LineFetcher:
    """Fetches the lines of a store's shards, and keeps them while they are held. Safe for several threads."""

    def __init__(
        self,
        objects: ObjectFolder,
        cache: CacheFolder,
        sums_of: Callable[[CachedShard], Sequence[int]],
        *,
        deadline_s: float,
    ) -> None:
        """`sums_of` returns the checksums of a shard's lines; it may request objects itself."""
        self._objects, self._cache, self._sums_of, self._deadline_s = objects, cache, sums_of, deadline_s
        lock = threading.RLock()
        self._changed = threading.Condition(lock)  # for those that wait for a line
        self._work = threading.Condition(lock)  # for the threads
        self._lines: dict[tuple[int, int], HeldLine] = {}  # by (id of the shard, line): held, or being fetched
        self._queue: list[tuple[int, int, HeldLine]] = []
        self._sequence = 0
        self._bytes_in_flight = self._num_threads = self._num_idle = 0
        self._most_in_flight = min(MAX_BYTES_IN_FLIGHT, max(LINE_BYTES, int(FIRST_BYTES_S * deadline_s)))
        self._last_arrival = 0.0
        self._is_closed = self._is_looking = False
        self._counts: Counter[str] = Counter()
        self._waited_s = 0.0
        self._pid = os.getpid()

    def hold(self, lines: Iterable[tuple[CachedShard, int]], priority: int) -> list[HeldLine]:
        """Keep lines until they are released, and request those that are absent; return those that are not pinned.

        `priority`: the smaller comes first. Each record must be released.
        """
        held: list[HeldLine] = []
        with self._changed:
            for shard, number in lines:
                key = id(shard), number
                line = self._lines.get(key)
                if line is not None:
                    line.holders += 1
                    if line.state is _State.FAILED or (line.state is _State.QUEUED and priority < line.priority):
                        line.state, line.priority = _State.QUEUED, min(priority, line.priority)
                        self._enqueue(line)
                else:
                    line = HeldLine(shard, number, priority)
                    if self._is_there(line):
                        self._counts["hits"] += 1
                        if line.state is not _State.READY:
                            continue  # pinned
                    else:
                        self._counts["misses"] += 1
                        self._enqueue(line)
                    self._lines[key] = line
                held.append(line)
            self._start_threads()
        return held

    def count_hits(self, count: int) -> None:
        """Count lines that a caller has found pinned."""
        with self._changed:
            self._counts["hits"] += count

    def _is_there(self, line: HeldLine) -> bool:
        """Return whether a line is present and cannot be freed: a line of the ring is READY then, and held."""
        shard, number = line.shard, line.number
        if shard.present[number] == PINNED:
            return True
        if shard.present[number] != RING or not shard.locks.try_shared(shard.lock_of(number)):
            return False
        if shard.present[number] == RING:  # else it was freed a moment ago
            line.state = _State.READY
            shard.last_use[number] = self._cache.room.tick()
            return True
        shard.locks.unlock(shard.lock_of(number))
        return False

    def release(self, lines: Iterable[HeldLine]) -> None:
        """Release lines. Those that nobody else has requested either are not fetched any more."""
        if self._pid != os.getpid():
            return
        with self._changed:
            for line in lines:
                line.holders -= 1
                if line.holders == 0 and line.state is not _State.FETCHING:
                    self._forget(line)

    def _forget(self, line: HeldLine) -> None:
        """Drop a record that nobody holds."""
        if line.state is _State.READY and not self._is_closed:
            line.shard.locks.unlock(line.shard.lock_of(line.number))
        line.state = _State.FAILED
        self._lines.pop((id(line.shard), line.number), None)

    @staticmethod
    def are_ready(lines: Iterable[HeldLine]) -> bool:
        """Return whether all lines are present."""
        return all(line.state is _State.READY for line in lines)

    def lack_room(self, lines: Iterable[HeldLine]) -> bool:
        """Return whether one of the lines waits for room in the cache."""
        return any(line.is_without_room and line.state is _State.QUEUED for line in lines)

    def wait(
        self,
        lines: Sequence[HeldLine],
        *,
        is_over: Callable[[], bool] | None = None,
        on_no_room: Callable[[], bool] | None = None,
    ) -> bool:
        """Wait until lines are present; return False if `is_over` becomes true before (`wake` makes this look again).

        `on_no_room` is called if one waits for room; it releases other lines and returns whether it could.

        Raises:
            StoreError: if none arrives within the deadline, or one cannot be had; names URL, shard and line.
        """
        if self.are_ready(lines):
            return True
        begun = time.monotonic()
        with self._changed:
            self._counts["waits"] += 1
            try:
                while not self.are_ready(lines):
                    if is_over is not None and is_over():
                        return False
                    for line in lines:
                        if line.state is _State.FAILED:
                            raise self._named(line, 0.0)
                    waited = time.monotonic() - begun
                    if on_no_room is not None and waited > 2 * LOOK_AGAIN_S and self.lack_room(lines) and on_no_room():
                        begun = time.monotonic()
                    late = time.monotonic() - max(begun, self._last_arrival)
                    is_stuck = waited > self._deadline_s and any(line.tries for line in lines if line.state is not _State.READY)
                    if late > self._deadline_s or is_stuck:
                        missing = [line for line in lines if line.state is not _State.READY]
                        raise self._named(max(missing, key=lambda line: line.tries), waited)
                    self._changed.wait(min(1.0, self._deadline_s / 8))
            finally:
                self._waited_s += time.monotonic() - begun
        return True

    def _named(self, line: HeldLine, seconds: float) -> StoreError:
        if line.is_without_room and line.error is None:
            return self._cache.full()
        begin, end = line.shard.place(line.number)
        where = f"{self._objects.url}/shards/{line.shard.path.name}, line {line.number} (bytes {begin} to {end})"
        if line.state is _State.FAILED:
            return type(line.error)(f"{where}: {line.error}") if isinstance(line.error, StoreError) else StoreError(f"{where}")
        why = f": {line.error}" if line.error is not None else ""
        return StoreError(f"{where} has not arrived within {seconds:.0f} s{why}; iterate again when the store answers")

    def wake(self) -> None:
        """Let everybody who waits look again."""
        with self._changed:
            self._changed.notify_all()

    def stats(self) -> FetchStats:
        """Return the counts so far; those of a forked process are 0."""
        if self._pid != os.getpid():
            return FetchStats()
        with self._changed:
            return FetchStats(**self._counts, waited_s=self._waited_s)

    def close(self) -> None:
        """End the threads, without waiting for requests that are under way."""
        with self._changed:
            self._is_closed = True
            self._queue.clear()
            self._changed.notify_all()
            self._work.notify_all()

    # what follows runs in the threads

    def _enqueue(self, line: HeldLine) -> None:
        self._sequence += 1
        heapq.heappush(self._queue, (line.priority, self._sequence, line))
        self._work.notify()

    def _start_threads(self) -> None:
        wanted = min(MAX_REQUESTS, len(self._queue)) - self._num_idle
        for _ in range(min(wanted, MAX_REQUESTS - self._num_threads)):
            thread = threading.Thread(target=self._run, name="bucketline-fetch", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system refuses more threads
                if self._num_threads == 0:
                    raise
                return
            self._num_threads += 1

    def _run(self) -> None:
        while True:
            with self._changed:
                self._num_idle += 1
                line = self._next()
                self._num_idle -= 1
                if line is None:
                    self._num_threads -= 1
                    return
            self._fetch(line)
            del line

    def _next(self) -> HeldLine | None:
        """Wait for a line to fetch: claimed, with room reserved, and counted as in flight; None to end the thread."""
        idle_since = time.monotonic()
        while not self._is_closed:
            now, pause = time.monotonic(), IDLE_S
            later: list[tuple[int, int, HeldLine]] = []
            claimed: HeldLine | None = None
            while self._queue and claimed is None and self._bytes_in_flight < self._most_in_flight:
                entry = heapq.heappop(self._queue)
                line = entry[2]
                if line.state is not _State.QUEUED or entry[0] != line.priority:
                    continue  # fetched, released, or queued again
                if line.not_before > now:
                    later.append(entry)
                    pause = min(pause, line.not_before - now)
                elif self._try_claim(line):
                    claimed = line
                elif line.state is _State.QUEUED:
                    later.append(entry)
                    pause = min(pause, LOOK_AGAIN_S)
                    if line.is_without_room:
                        break  # those after it would take the room that it waits for
            for entry in later:
                heapq.heappush(self._queue, entry)
            if claimed is not None:
                self._bytes_in_flight += claimed.num_bytes
                if self._queue:
                    self._work.notify()
                return claimed
            if not self._queue and now - idle_since > IDLE_S:
                break
            is_first = later and not self._is_looking  # one thread looks again for all
            self._is_looking = self._is_looking or bool(is_first)
            self._work.wait(pause if is_first else IDLE_S)
            if is_first:
                self._is_looking = False
        return None

    def _try_claim(self, line: HeldLine) -> bool:
        try:
            return self._claim(line)
        except (StoreError, OSError) as error:  # of the cache's folder
            self._failed(line, error)
            return False

    def _claim(self, line: HeldLine) -> bool:
        """Claim a line for this process and reserve its room; FETCHING then. READY if another process has fetched it."""
        shard, number = line.shard, line.number
        lock = shard.lock_of(number)
        if self._is_there(line):
            self._arrived(line)
            return False
        if not shard.locks.try_exclusive(lock):
            return False  # another process is fetching or freeing it
        state = shard.present[number]
        if state in (PINNED, RING):  # it has just finished
            self._arrived(line)
            return False
        if state == ABSENT:
            if not self._reserve(line.num_bytes):
                line.is_without_room = True
                shard.locks.unlock(lock)
                return False
            line.reserved = line.num_bytes
        line.is_without_room = False
        line.state = _State.FETCHING
        return True

    def _reserve(self, num_bytes: int) -> bool:
        cache = self._cache
        while not cache.room.reserve(num_bytes, cache.limit):
            if not cache.regrow() and not cache.remove_oldest() and not cache.evictor.free(EVICT_AT_ONCE):
                return False
        return True

    def _fetch(self, line: HeldLine) -> None:
        """Fetch a claimed line; it is READY then, or queued to be tried again."""
        begun, in_flight = time.monotonic(), self._bytes_in_flight
        try:
            if line.shard.present[line.number] == ABSENT:
                self._fetch_absent(line)
            else:
                self._check_old(line)
        except BaseException as error:  # noqa: BLE001 - raised by `wait`, after more tries
            with self._changed:
                if time.monotonic() - begun > self._deadline_s / 4:
                    self._most_in_flight = max(LINE_BYTES, min(self._most_in_flight, in_flight // 2))
                if self._is_closed:  # the locks are gone
                    self._cache.room.give_back(line.reserved)
                    line.reserved, line.state = 0, _State.FAILED
                else:
                    self._failed(line, error)
        finally:
            with self._changed:
                self._bytes_in_flight -= line.num_bytes
                self._work.notify()
                self._changed.notify_all()

    def _check_old(self, line: HeldLine) -> None:
        """Compare a line that was written before the machine was started: its bytes may not have reached the disk."""
        shard, number = line.shard, line.number
        is_right = checksum(memoryview(shard.read(number))) == self._sums_of(shard)[number]
        with self._changed:
            was = int(shard.present[number])
            with self._cache.room.locked():
                shard.present[number] = {OLD_PINNED: PINNED, OLD_RING: RING}[was] if is_right else ABSENT
                if not is_right:
                    self._cache.room.add(room.PINNED if was == OLD_PINNED else room.RING, -line.num_bytes)
            if is_right:
                self._arrived(line)
            else:
                shard.punch(number)
                shard.locks.unlock(shard.lock_of(number))
                self._again(line)

    def _fetch_absent(self, line: HeldLine) -> None:
        shard, number = line.shard, line.number
        expected = self._sums_of(shard)[number]
        begin, end = shard.place(number)
        with self._changed:
            self._counts["requests"] += 1
            in_flight, begun = self._bytes_in_flight, time.monotonic()
        data = memoryview(self._objects.read_range(f"shards/{shard.path.name}", begin, end)).cast("B")
        with self._changed:
            self._adapt((in_flight + self._bytes_in_flight) / 2, time.monotonic() - begun)
        if len(data) != end - begin:
            raise CorruptError(
                f"{len(data)} bytes came, {end - begin} were requested; the object is shorter than its manifest says"
            )
        if checksum(data) != expected:
            line.wrong += 1
            raise CorruptError("its bytes do not match the line's checksum; if this stays, run `store verify` on the original")
        self._write(line, data)
        with self._changed:
            if self._is_closed:
                raise StoreError("the store was closed")
            is_pinned = self._cache.may_pin(len(data))
            with self._cache.room.locked():
                shard.present[number] = PINNED if is_pinned else RING  # last: its bytes are in the file
                self._cache.room.convert(room.PINNED if is_pinned else room.RING, line.reserved)
            line.reserved = 0
            self._counts["bytes_fetched"] += len(data)
            self._arrived(line)

    def _adapt(self, in_flight: float, seconds: float) -> None:
        """Have as much in flight as arrives within a quarter of the deadline: a slow link is not a store that stalls."""
        fitting = in_flight * self._deadline_s / 4 / max(seconds, 1e-3)
        self._most_in_flight = int(min(MAX_BYTES_IN_FLIGHT, max(LINE_BYTES, min(fitting, 2 * self._most_in_flight))))

    def _write(self, line: HeldLine, data: memoryview) -> None:
        """Write a line; on a full disk, free lines of the ring, and take no more than there is now."""
        while True:
            try:
                line.shard.write(line.number, data)
            except OSError as error:
                with self._changed:
                    cache = self._cache
                    cache.shrink()
                    if not cache.remove_oldest() and not cache.evictor.free(EVICT_AT_ONCE):
                        with suppress(OSError):
                            line.shard.punch(line.number)
                        raise cache.full(error) from error
            else:
                return

    def _arrived(self, line: HeldLine) -> None:
        """Make a line that is present READY; its claim becomes a shared one, which is released with it."""
        shard, number = line.shard, line.number
        line.error, line.tries, line.is_without_room = None, 0, False
        line.state = _State.READY
        self._last_arrival = time.monotonic()
        shard.last_use[number] = self._cache.room.tick()
        shard.locks.try_shared(shard.lock_of(number))
        if line.holders <= 0:
            self._forget(line)
        self._changed.notify_all()

    def _failed(self, line: HeldLine, error: BaseException) -> None:
        """Queue a line again after a pause, or give it up; the next `hold` tries it again then."""
        line.tries += 1
        self._counts["retries"] += 1
        line.error = error if isinstance(error, StoreError) else StoreError(f"it cannot be fetched: {error!r}")
        self._cache.room.give_back(line.reserved)
        line.reserved = 0
        line.shard.locks.unlock(line.shard.lock_of(line.number))
        line.not_before = time.monotonic() + pause_after(line.tries)
        if isinstance(error, MissingObjectError | DeniedError) or line.wrong >= MAX_WRONG:
            line.wrong = 0
            line.state = _State.FAILED
            if line.holders <= 0:
                self._forget(line)
        else:
            self._again(line)

    def _again(self, line: HeldLine) -> None:
        line.state = _State.QUEUED
        if line.holders <= 0:
            self._forget(line)
        else:
            self._enqueue(line)
