"""The threads that fetch lines: which line is next, how many bytes are requested at a time, and a line's state."""

from __future__ import annotations

import heapq
import math
import threading
import time
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from bucketline.store.format.hashing import LINE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from bucketline.store.remote.cache.cached_shard import CachedShard


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
        """Queue a line."""
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
        """Count a line as in flight no longer."""
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
