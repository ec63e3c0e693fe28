"""A line that somebody is going to read, and the counts of a process's fetching."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bucketline.store.remote.cache.cached_shard import CachedShard


class State(Enum):
    """The progress of a line."""

    QUEUED = auto()
    FETCHING = auto()
    READY = auto()
    FAILED = auto()


class HeldLine:
    """A line that somebody is going to read."""

    __slots__ = (
        "error",
        "holders",
        "lacked_room_at",
        "not_before",
        "number",
        "priority",
        "requested_at",
        "reserved",
        "shard",
        "state",
        "tries",
        "wrong",
    )

    def __init__(self, shard: CachedShard, number: int, priority: int) -> None:
        self.shard, self.number, self.priority = shard, number, priority
        self.state, self.holders = State.QUEUED, 1
        self.tries = self.wrong = 0  # requests that failed, and those of them whose bytes were wrong
        self.error: Exception | None = None  # of the last try
        self.requested_at: float | None = None  # of the first try
        self.not_before = 0.0
        self.lacked_room_at = -math.inf  # of the last try that found no room, since the last request
        self.reserved = 0  # bytes

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
