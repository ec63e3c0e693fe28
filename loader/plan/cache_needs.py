"""The needs of an order from a machine's cache: room for the lines that it reads at a time, next to those that the cache keeps.

A window is read as a part of each shard of a group, and its rows are mixed. So all lines of these parts are needed from the
window's first step to its last, while those of the next window arrive. They pass through the cache's ring, which must hold
both: a line that it could not keep is fetched again, many times if the ring is too small, because the least recently used goes
first.

All is computed from the manifest and options that every rank has, so a window that is chosen by the size of the cache is the
same on every machine.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from bucketline.command_line import human_bytes, machines_of
from bucketline.errors import UsageError
from bucketline.loader.config import LEAST_WINDOW, MOST_WINDOW_BYTES, SHARDS_AT_ONCE, USUAL_WINDOW
from bucketline.store.format.hashing import LINE_BYTES
from bucketline.store.format.text_block import is_bucket
from bucketline.store.remote.cache.folder import USUAL_RING_BYTES, ring_share

if TYPE_CHECKING:
    from bucketline.loader.plan.plan import Plan
    from bucketline.store.read.store import OpenShards
    from bucketline.store.remote.cache.remote_source import RemoteSource

RING_OF_USE = 2.0  # bytes of a ring by those of the lines in use at a time: others arrive meanwhile
LEAST_RING = 1.1  # likewise: with less the order is refused, since lines would be fetched again at nearly each use
_AT_ONCE = 2  # windows or batches
LINES_OF_RUN = 2.0  # of a run of rows beyond its bytes: it begins and ends within one, and captions follow their rows
KEPT_BY_RING = 1 / 32  # of a cache that does not hold its stores; a window that is chosen by the cache needs no more
_AT_CUTS = 8  # lines of a machine that others read too
_SMALLER = 0.75  # of a window that needs too much


class CacheNeeds:
    """The needs of each of some machines from its cache, to read a store by a plan."""

    def __init__(self, store: OpenShards, plan: Plan, machines: int) -> None:
        self._store, self._plan, self._machines = store, plan, machines
        self.num_bytes = sum(file.entry.lmdb.num_bytes for file in store.files)  # of shards and added columns
        self.kept_bytes = sum(file.entry.extents.num_bytes for file in store.files)  # next to the shards; held whole
        self.whole_bytes = self.num_bytes + self.kept_bytes
        self._lanes = -(-plan.lanes // machines)  # of a machine
        own = self.num_bytes * self._lanes // plan.lanes + _AT_CUTS * LINE_BYTES if plan.window else self.num_bytes
        self.share_bytes = min(self.num_bytes, own) + self.kept_bytes  # that one machine reads, shared lines included
        self._row_bytes = self.num_bytes / max(1, sum(shard.entry.live_samples for shard in store.shards))
        names = {one.name for one in plan.buckets}
        groups_read = [sum(name in names or not is_bucket(name) for name in shard.entry.groups) for shard in store.shards]
        self._regions = (sum(groups_read) + sum(len(shard.entry.added) for shard in store.shards)) / len(store.shards)
        self.most_window = max(LEAST_WINDOW, int(MOST_WINDOW_BYTES / max(1.0, self._row_bytes)))  # by its bytes

    def in_use(self, window: int | None) -> int:
        """Return the bytes of the lines that a machine has in use at a time: those of two windows of each lane, or two batches.

        Of a window, in each shard of a group a run of rows of each bucket, and of what belongs to rows, which begins and ends
        within a line. A batch of a bucket may take more rows than a window has of it. In stored order, one such run of a batch;
        if all rows are shuffled, a line or two of each row.
        """
        plan, rows = self._plan, sum(one.num_rows for one in self._plan.buckets)
        if not window:
            batch = -(-max(one.global_batch for one in plan.buckets) // self._machines)
            lines = (1 if window == 0 else batch) * LINES_OF_RUN + batch * self._row_bytes / LINE_BYTES
            return min(_AT_ONCE * math.ceil(lines) * LINE_BYTES, self.num_bytes)
        shards = max(1, plan.lane_order.num_units // plan.lanes)
        num_groups = max(1, min(shards // SHARDS_AT_ONCE, rows // plan.lanes // window))
        of_window = sum(max(window * one.num_rows / rows, one.global_batch / plan.lanes) for one in plan.buckets)
        # rows of a bucket of at most a batch are anywhere
        rare = max((one.global_batch for one in plan.buckets if one.num_rows <= one.global_batch), default=0) / plan.lanes
        lines = shards / num_groups * self._regions + LINES_OF_RUN * rare
        return int(self._lanes * (_AT_ONCE * of_window * self._row_bytes + lines * LINE_BYTES))

    @property
    def ring_bytes(self) -> int:
        """The bytes of a ring with which no line is fetched again while it is in use."""
        ring = RING_OF_USE if self._plan.window else LEAST_RING
        return min(int(ring * self.in_use(self._plan.window)), self.share_bytes - self.kept_bytes)

    def is_held(self, cache_bytes: int) -> bool:
        """Return whether a cache keeps all that a machine reads."""
        if self._plan.window and cache_bytes >= self.share_bytes:
            return True
        return cache_bytes - ring_share(cache_bytes) >= self.whole_bytes

    def window_for(self, cache_bytes: int) -> int | None:
        """Return the rows of a window if none are given: fewer than usual if a cache keeps more of the store then.

        None if it keeps all of the store, so that all rows may be shuffled. A window that has less than a line of each shard,
        or than a batch, hardly needs less room.
        """
        if cache_bytes - ring_share(cache_bytes) >= self.whole_bytes:
            return None
        most = min(USUAL_WINDOW, self.most_window)
        if cache_bytes >= self.share_bytes:
            return most
        buckets, lanes = self._plan.buckets, self._plan.lanes
        of_batch = sum(one.num_rows for one in buckets) / lanes * max(one.global_batch / one.num_rows for one in buckets)
        least = self.in_use(min(most, int(max(of_batch, SHARDS_AT_ONCE * LINE_BYTES / self._row_bytes, LEAST_WINDOW))))
        room = min(max(cache_bytes * KEPT_BY_RING, RING_OF_USE * least), cache_bytes - self.kept_bytes)
        window = most
        while window > LEAST_WINDOW and RING_OF_USE * self.in_use(window) > room:
            window = max(LEAST_WINDOW, int(window * _SMALLER))
        return window

    def why_too_small(self, cache_bytes: int) -> str | None:
        """Return why the store is not read in this order through a cache of this size, and what would do; None if it may be.

        If all rows are shuffled, hardly a line that was fetched for one row is still there for another, so the cache must hold
        all. In another order, it needs room for what is read at a time.
        """
        window = self._plan.window
        fits = window is not None and int(LEAST_RING * self.in_use(window)) <= cache_bytes - self.kept_bytes
        if fits or self.is_held(cache_bytes):
            return None
        order = {None: "with all rows shuffled", 0: "in stored order"}.get(window, f"in windows of {window} rows")
        needed = cache_for(self.whole_bytes) if window is None else self.ring_bytes + self.kept_bytes
        fewer = "mix fewer rows at a time (--window)" if window else "use smaller batches (--batch)"
        other = f"set a window (--window {USUAL_WINDOW})" if window is None else fewer
        return (
            f"the cache may hold {human_bytes(cache_bytes)}, and {self._store.where} has {human_bytes(self.num_bytes)}: "
            f"{order}, lines would be fetched again and again; have a cache of {-(-needed >> 20)}MiB (--cache-bytes), or "
            f"{other}"
        )


def reserve_ring(builder: object, store: OpenShards, plan: Plan, rank: int, world_size: int) -> None:
    """Let the caches of stores in object storage leave as much to lines that pass through as the order needs.

    It counts while `builder` exists. Ranks of a machine that share a cache need the same, and count once.
    """
    if (found := refuse_small_caches(store, plan, world_size)) is None:
        return
    needs, sources, limit = found
    machines = machines_of(world_size)
    machine = rank * machines // world_size
    lanes = range(machine * plan.lanes // machines, -(-(machine + 1) * plan.lanes // machines))
    each, holds_all = needs.ring_bytes // len(lanes), needs.is_held(limit)
    for source in sources:
        source.reserve_ring(builder, {(plan.digest, lane): each for lane in lanes}, holds_all=holds_all)


def refuse_small_caches(store: OpenShards, plan: Plan, world_size: int) -> tuple[CacheNeeds, list[RemoteSource], int] | None:
    """Return the plan's needs, the stores in object storage and the least limit of their caches; None without such stores."""
    if all(shard.source is None for shard in store.shards):
        return None
    from bucketline.store.remote.cache.remote_source import RemoteSource

    sources = {id(shard.source): shard.source for shard in store.shards if isinstance(shard.source, RemoteSource)}
    if not sources:
        return None
    limit = min(source.limit for source in sources.values())
    needs = CacheNeeds(store, plan, machines_of(world_size))
    if (reason := needs.why_too_small(limit)) is not None:
        raise UsageError(reason)
    return needs, list(sources.values()), limit


def cache_for(num_bytes: int) -> int:
    """Return the size of a cache that pins so many bytes.

    >>> cache_for(700 << 30) == (700 << 30) + (768 << 20)
    True
    """
    return num_bytes + min(num_bytes, USUAL_RING_BYTES)
