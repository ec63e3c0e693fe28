"""The lines that somebody is going to read: held, fetched by threads if they are absent, waited for, released.

A line is *held* while somebody is going to read it: then it is fetched if it is absent, and not freed once it is there. Pinned
lines stay as long as the store is open, and are not recorded. Everything here is of one store and one process. Threads fetch
the lines (`fetch_threads`), each of them by one request.
"""

from __future__ import annotations

import heapq
import math
import threading
import time
from bisect import bisect_left
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from bucketline.errors import CorruptError, StoreError
from bucketline.forks import OwnerProcess
from bucketline.store.folder import DeniedError
from bucketline.store.format.block import LINE_BYTES, LineSums, checksum
from bucketline.store.remote.cache import room
from bucketline.store.remote.cache.cached_shard import ABSENT, OLD_PINNED, OLD_RING, PINNED, RING, CacheRemovedError
from bucketline.store.remote.objects import IN_TIME, is_wrong, pause_after

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from bucketline.store.remote.cache.cached_shard import CachedShard
    from bucketline.store.remote.cache.folder import CacheFolder
    from bucketline.store.remote.objects import ObjectFolder


# --------------------------------------------------------------------------------------------------------------- fetch threads
# The threads that fetch lines: which line is next, how many bytes are requested at a time, and a line's state.


class State(Enum):
    """The progress of a line."""

    QUEUED = auto()
    FETCHING = auto()
    READY = auto()
    FAILED = auto()


@dataclass(slots=True, eq=False)
class HeldLine:
    """A line that somebody is going to read."""

    shard: CachedShard
    number: int
    priority: int
    state: State = State.QUEUED
    holders: int = 1
    tries: int = 0  # requests that failed
    wrong: int = 0  # those of them whose bytes were wrong
    error: Exception | None = None  # of the last try
    requested_at: float | None = None  # of the first try
    not_before: float = 0.0
    lacked_room_at: float = -math.inf  # of the last try that found no room, since the last request
    reserved: int = 0  # bytes

    @property
    def num_bytes(self) -> int:
        begin, end = self.shard.place(self.number)
        return end - begin

    @property
    def is_without_room(self) -> bool:
        """Return whether it waits for room in the cache."""
        return self.state is State.QUEUED and self.lacked_room_at > -math.inf

    def is_stuck(self, now: float, seconds: float) -> bool:
        """Return whether a request of it has failed, or has been under way for longer than so many seconds."""
        return self.tries > 0 or (self.requested_at is not None and now - self.requested_at > seconds)


LATENCY_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


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
    fetch_s: float = 0.0  # from the request of a line to its arrival, added up over the lines that arrived
    fetch_latencies: tuple[int, ...] = (0,) * (len(LATENCY_BOUNDS_S) + 1)  # such lines up to each bound, and the slower ones


MAX_REQUESTS = 16  # of one line each: joined lines cost more, in memory that is new for every request
MAX_BYTES_IN_FLIGHT = 128 << 20
LEAST_IN_FLIGHT = 2 * LINE_BYTES  # so that one which stalls does not hold up all
FIRST_BYTES_S = 2 << 20  # of a link of which nothing is known yet
PART_OF_DEADLINE = 16  # within which a line should arrive
LOOK_AGAIN_S = 0.02  # at a line that another process fetches, or for room
IDLE_S = 30.0  # after which a thread ends


class FetchThreads:
    """Threads that claim lines in the order of their priorities and fetch them. All methods but `_run` need the lock held."""

    def __init__(
        self,
        lock: threading.RLock,
        claim: Callable[[HeldLine], bool],
        fetch: Callable[[HeldLine], None],
        *,
        deadline_s: float,
    ) -> None:
        """`claim` is called with the lock held, `fetch` without it, in a thread, for a line that was claimed."""
        self._work = threading.Condition(lock)
        self._claim, self._fetch, self._deadline_s = claim, fetch, deadline_s
        self._queue: list[tuple[int, int, HeldLine]] = []
        self._sequence = 0
        self.bytes_in_flight = self._num_threads = self._num_idle = 0
        self._most_in_flight = min(MAX_BYTES_IN_FLIGHT, max(LEAST_IN_FLIGHT, int(FIRST_BYTES_S * deadline_s)))
        self._look_at = math.inf  # when a thread looks again for all
        self._is_closed = False

    def add(self, line: HeldLine) -> None:
        self._sequence += 1
        heapq.heappush(self._queue, (line.priority, self._sequence, line))
        self._work.notify()

    def start(self) -> None:
        """Start as many threads as the queue needs."""
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

    def close(self) -> None:
        """End the threads, without waiting for requests that are under way."""
        self._is_closed = True
        self._queue.clear()
        self._work.notify_all()

    def arrived(self, in_flight: float, seconds: float) -> None:
        """Have as much in flight as arrives within a part of the deadline: a slow link is not a store that stalls."""
        fitting = in_flight * self._deadline_s / PART_OF_DEADLINE / max(seconds, 1e-3)
        self._most_in_flight = int(min(MAX_BYTES_IN_FLIGHT, max(LEAST_IN_FLIGHT, min(fitting, 2 * self._most_in_flight))))

    def failed(self, in_flight: int, seconds: float) -> None:
        """Have less in flight after a request that took long and failed."""
        if seconds > self._deadline_s / 4:
            self._most_in_flight = max(LEAST_IN_FLIGHT, min(self._most_in_flight, in_flight // 2))

    def ended(self, line: HeldLine) -> None:
        self.bytes_in_flight -= line.num_bytes
        self._work.notify()

    def _run(self) -> None:
        while True:
            with self._work:
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
            while self._queue and claimed is None and self.bytes_in_flight < self._most_in_flight:
                entry = heapq.heappop(self._queue)
                line = entry[2]
                if line.state is not State.QUEUED or entry[0] != line.priority:
                    continue  # fetched, released, or queued again
                if line.not_before > now:
                    later.append(entry)
                    pause = min(pause, line.not_before - now)
                elif self._claim(line):
                    claimed = line
                elif line.state is State.QUEUED:
                    later.append(entry)
                    pause = min(pause, LOOK_AGAIN_S)
                    if line.is_without_room:
                        break  # those after it would take the room that it waits for
            for entry in later:
                heapq.heappush(self._queue, entry)
            if claimed is not None:
                self.bytes_in_flight += claimed.num_bytes
                if self._queue:
                    self._work.notify()
                return claimed
            if not self._queue and now - idle_since > IDLE_S:
                break
            self._wait(now + pause if later else math.inf, pause)
        return None

    def _wait(self, look_at: float, pause: float) -> None:
        """Wait for work; look again after a pause, unless another thread does so before."""
        is_first = look_at < self._look_at
        if is_first:
            self._look_at = look_at
        self._work.wait(pause if is_first else IDLE_S)
        if is_first and self._look_at == look_at:
            self._look_at = math.inf


# ---------------------------------------------------------------------------------------------------------------- line fetcher

_MAX_WRONG = 4  # answers that are not the line, or that its checksums are not there
STUCK_PART = 8  # of the deadline: a request under way for longer, once the deadline has passed, is not waited for


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
        self._threads = FetchThreads(lock, self._try_claim, self._fetch, deadline_s=deadline_s)
        self._lines: dict[tuple[int, int], HeldLine] = {}  # by (id of the shard, line): held, or being fetched
        self._last_arrival = 0.0
        self._lacked_room = -math.inf, 0  # when a line found no room, the last one, and its priority
        self._is_closed = False
        self._counts: Counter[str] = Counter()
        self._waited_s = self._fetch_s = 0.0
        self._latencies = [0] * (len(LATENCY_BOUNDS_S) + 1)
        self._owner = OwnerProcess()

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
                    if line.state is State.FAILED or (line.state is State.QUEUED and priority < line.priority):
                        line.state, line.priority = State.QUEUED, min(priority, line.priority)
                        self._threads.add(line)
                else:
                    line = HeldLine(shard, number, priority)
                    if self._is_there(line):
                        self._counts["hits"] += 1
                        if line.state is not State.READY:
                            continue  # pinned
                    else:
                        self._counts["misses"] += 1
                        self._threads.add(line)
                    self._lines[key] = line
                held.append(line)
            self._threads.start()
        return held

    def count_hits(self, count: int) -> None:
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
            line.state = State.READY
            shard.last_use[number] = self._cache.room.tick()
            return True
        shard.locks.unlock(shard.lock_of(number))
        return False

    def release(self, lines: Iterable[HeldLine]) -> None:
        """Release lines. Those that nobody else has requested either are not fetched any more."""
        if not self._owner.is_current:
            return
        with self._changed:
            for line in lines:
                line.holders -= 1
                if line.holders == 0 and line.state is not State.FETCHING:
                    self._forget(line)

    def _forget(self, line: HeldLine) -> None:
        if line.state is State.READY and not self._is_closed:
            line.shard.last_use[line.number] = self._cache.room.tick()  # batches that overlap may have held it for long
            line.shard.locks.unlock(line.shard.lock_of(line.number))
        line.state = State.FAILED
        self._lines.pop((id(line.shard), line.number), None)

    @staticmethod
    def are_ready(lines: Iterable[HeldLine]) -> bool:
        return all(line.state is State.READY for line in lines)

    def lack_room(self, lines: Iterable[HeldLine]) -> bool:
        return any(line.is_without_room for line in lines)

    def wait(
        self,
        lines: Sequence[HeldLine],
        *,
        is_over: Callable[[], bool] | None = None,
        on_no_room: Callable[[], bool] | None = None,
        begun: float | None = None,
    ) -> bool:
        """Wait until lines are present; return False if `is_over` becomes true before (`wake` makes this look again).

        `on_no_room` is called if one waits for room; it releases other lines and returns whether it could. `begun`: since when
        the caller waits (`time.monotonic`), if not since now. Just before the deadline, lines are given up unless others arrive
        and none of them is stuck: a slow link is not a store that stalls.
        """
        if self.are_ready(lines):
            return True
        now = time.monotonic()
        begun = now if begun is None else begun
        most_s = IN_TIME * self._deadline_s
        with self._changed:
            self._counts["waits"] += 1
            since = now
            try:
                while not self.are_ready(lines):
                    if is_over is not None and is_over():
                        return False
                    now = time.monotonic()
                    missing = [line for line in lines if line.state is not State.READY]
                    for line in missing:
                        if line.state is State.FAILED:
                            raise self._named(line, 0.0)
                    if on_no_room is not None and now - since > 2 * LOOK_AGAIN_S and self.lack_room(lines) and on_no_room():
                        begun = time.monotonic()
                    if now - begun >= most_s and self._is_stalled(missing, now):
                        raise self._named(max(missing, key=lambda line: (line.is_without_room, line.tries)), now - begun)
                    pause = min(0.5, self._deadline_s / (2 * STUCK_PART))
                    self._changed.wait(min(pause, begun + most_s - now) if now - begun < most_s else pause)
            finally:
                self._waited_s += time.monotonic() - since
        return True

    def _is_stalled(self, missing: Iterable[HeldLine], now: float) -> bool:
        """Return whether lines that have not arrived within the deadline are not going to."""
        patience_s = self._deadline_s / STUCK_PART
        return now - self._last_arrival > patience_s or any(line.is_stuck(now, patience_s) for line in missing)

    def _named(self, line: HeldLine, seconds: float) -> StoreError:
        if line.error is None and line.state is not State.FAILED and self._is_for_room(line):
            return self._cache.full()
        begin, end = line.shard.place(line.number)
        where = f"{self._objects.url}/shards/{line.shard.path.name}, line {line.number} (bytes {begin} to {end})"
        if line.state is State.FAILED:
            return type(line.error)(f"{where}: {line.error}") if isinstance(line.error, StoreError) else StoreError(f"{where}")
        why = f": {line.error}" if line.error is not None else ""
        return StoreError(f"{where} has not arrived within {seconds:.0f} s{why}; iterate again when the store answers")

    def _is_for_room(self, line: HeldLine) -> bool:
        """Return whether a line is missing for want of room: it or one queued before it waits for some, or it just got some."""
        at, priority = self._lacked_room
        if line.state is not State.QUEUED or priority > line.priority:
            at = line.lacked_room_at
        return line.is_without_room or time.monotonic() - at < self._deadline_s / STUCK_PART

    def wake(self) -> None:
        """Let everybody who waits look again."""
        with self._changed:
            self._changed.notify_all()

    def stats(self) -> FetchStats:
        """Return the counts so far; those of a forked process are 0."""
        if not self._owner.is_current:
            return FetchStats()
        with self._changed:
            return FetchStats(
                **self._counts, waited_s=self._waited_s, fetch_s=self._fetch_s, fetch_latencies=tuple(self._latencies)
            )

    def close(self) -> None:
        """End the threads, without waiting for requests that are under way."""
        with self._changed:
            self._is_closed = True
            self._threads.close()
            self._changed.notify_all()

    # what follows runs in the threads

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
        if line.requested_at is None:
            line.requested_at = time.monotonic()
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
            if not self._cache.reserve(line.num_bytes):
                line.lacked_room_at = time.monotonic()
                self._lacked_room = line.lacked_room_at, line.priority
                shard.locks.unlock(lock)
                return False
            line.reserved = line.num_bytes
        line.state = State.FETCHING
        return True

    def _fetch(self, line: HeldLine) -> None:
        """Fetch a claimed line; it is READY then, or queued to be tried again."""
        begun, in_flight = time.monotonic(), self._threads.bytes_in_flight
        try:
            if line.shard.present[line.number] == ABSENT:
                self._fetch_absent(line)
            else:
                self._check_old(line)
        except BaseException as error:  # noqa: BLE001 - raised by `wait`, after more tries
            with self._changed:
                self._threads.failed(in_flight, time.monotonic() - begun)
                if self._is_closed:  # the locks are gone
                    self._cache.room.give_back(line.reserved)
                    line.reserved, line.state = 0, State.FAILED
                else:
                    self._failed(line, error)
        finally:
            with self._changed:
                self._threads.ended(line)
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
                    self._cache.room.add(room.PINNED_BYTES if was == OLD_PINNED else room.RING_BYTES, -line.num_bytes)
            if is_right:
                self._arrived(line)
            else:
                shard.punch(number)
                shard.locks.unlock(shard.lock_of(number))
                self._again(line)

    def _fetch_absent(self, line: HeldLine) -> None:
        shard, number, num_bytes = line.shard, line.number, line.num_bytes
        with self._changed:
            self._counts["requests"] += 1
            in_flight, begun = self._threads.bytes_in_flight, time.monotonic()
        self._download(shard, number)
        with self._changed:
            seconds = time.monotonic() - begun
            self._threads.arrived((in_flight + self._threads.bytes_in_flight) / 2, seconds)
            self._fetch_s += seconds
            self._latencies[bisect_left(LATENCY_BOUNDS_S, seconds)] += 1
            if self._is_closed:
                raise StoreError("the store was closed")
            is_pinned = self._cache.may_pin(num_bytes)
            with self._cache.room.locked():
                shard.present[number] = PINNED if is_pinned else RING  # last: its bytes are in the file
                self._cache.room.convert(room.PINNED_BYTES if is_pinned else room.RING_BYTES, line.reserved)
            line.reserved = 0
            self._counts["bytes_fetched"] += num_bytes
            self._arrived(line)

    def _download(self, shard: CachedShard, number: int) -> None:
        """Write a line's bytes to the shard's file; its byte is not set yet. The caller has locked the line and has its room.

        On a full disk, the space that is allocated for the ring is used, then its lines are freed, and nothing is pinned.
        """
        expected = self._sums_of(shard)[number]
        while True:
            try:
                with shard.writing(number) as write:
                    try:
                        self._write(shard, number, expected, write)
                    except BaseException:
                        with suppress(OSError):
                            shard.punch(number)
                        raise
            except OSError as error:
                self._cache.shrink()
                if not (self._cache.release_space() or self._cache.make_room()):
                    raise self._cache.full(error) from error
            else:
                return

    def _write(self, shard: CachedShard, number: int, expected: int, write: Callable[[memoryview], None]) -> None:
        begin, end = shard.place(number)
        found, count = LineSums(), 0
        for piece in self._objects.pieces(f"shards/{shard.path.name}", begin, end):
            count += len(piece)
            if count > end - begin:
                break
            found.update(piece)
            write(piece)
        if count != end - begin:
            raise CorruptError(
                f"{count} bytes came, {end - begin} were requested; the object is shorter than its manifest says"
            )
        if found.finish() != [expected]:
            raise CorruptError("its bytes do not match the line's checksum; if this stays, run `store verify` on the original")

    def _arrived(self, line: HeldLine) -> None:
        """Make a line that is present READY; its claim becomes a shared one, which is released with it."""
        shard, number = line.shard, line.number
        line.error, line.tries, line.requested_at, line.lacked_room_at = None, 0, None, -math.inf
        line.state = State.READY
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
        line.reserved, line.lacked_room_at = 0, -math.inf
        line.shard.locks.unlock(line.shard.lock_of(line.number))
        line.wrong += is_wrong(error)
        line.not_before = time.monotonic() + pause_after(line.tries)
        if isinstance(error, DeniedError | CacheRemovedError) or line.wrong >= _MAX_WRONG:
            line.wrong = 0
            line.state = State.FAILED
            if line.holders <= 0:
                self._forget(line)
        else:
            self._again(line)

    def _again(self, line: HeldLine) -> None:
        line.state = State.QUEUED
        if line.holders <= 0:
            self._forget(line)
        else:
            self._threads.add(line)
