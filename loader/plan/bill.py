"""The bill before the run: what machines fetch, keep, pay and wait for when they read a store in lines. A formula.

A line that is fetched while there is room in a machine's cache stays for good; the others pass through its ring, and are
fetched once an epoch. So in an epoch after the first, a machine fetches the share of its lines that the cache has no room for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bucketline.errors import PlanError, UsageError
from bucketline.loader.config import SHARDS_AT_ONCE
from bucketline.loader.plan.cache_needs import cache_for
from bucketline.store.format.columns import RAGGED_PREFIX, stored_name
from bucketline.store.format.hashing import LINE_BYTES
from bucketline.store.format.text_block import TEXT_GROUP
from bucketline.store.remote.cache.folder import LEAST_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bucketline.loader.plan.plan import Plan
    from bucketline.loader.plan.rates import Prices
    from bucketline.store.read.store import OpenShards

ASSUMED = (
    "every machine has an empty cache of this size at first, and an equal part of the store's lines",
    "requests are for one line of 8 MiB; the manifest, sidecars and retries are not counted",
    "a step waits if a machine's bytes of an epoch, divided by its steps, take longer than a step",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLines:
    """The lines of a store that an epoch reads, all machines together."""

    num_lines: int
    num_bytes: int
    bytes_again: int  # of lines that are read at another time of the epoch as well
    bytes_at_cut: int  # of lines that two neighbouring machines both read


def store_lines(
    store: OpenShards, plan: Plan, split: str, *, ragged: Sequence[str] = (), roles: Sequence[str] = ()
) -> StoreLines:
    """Return the lines that rows of a split are in, with their captions, named ragged groups and added columns, by the extents.

    A shard of several windows is read from some row on and around, so the line of that row is read at both ends of its visit:
    in each bucket, and in each group of what belongs to rows. A shard that is repeated is read as often.
    """
    if not plan.window or any(bucket.parts for bucket in plan.buckets):
        raise PlanError(
            f"{store.where} has no bill: it is of rows that are mixed in windows (--window), of stores that a pass reads whole "
            f"or several times; the plan's window is {plan.window}"
        )
    if unknown := [name for name in ragged if name not in store.ragged]:
        raise UsageError(f"{store.where} has no ragged group {unknown[0]!r:.80}, expected some of {list(store.ragged)}")
    sizes = np.array([file.entry.lmdb.num_bytes for file in store.files], dtype=np.int64)
    counts = -(-sizes // LINE_BYTES)
    first = np.cumsum(counts) - counts  # by file: number of its first line
    num_bytes = np.full(int(counts.sum()), LINE_BYTES, dtype=np.int64)  # by line
    num_bytes[first + counts - 1] = sizes - (counts - 1) * LINE_BYTES
    buckets = store.buckets(split)
    edges, times = np.zeros(len(num_bytes) + 1, dtype=np.int64), np.ones(len(sizes), dtype=np.int64)
    regions = np.zeros(len(sizes), dtype=np.int64)  # by file: in which rows are near their neighbours
    for name in (*(bucket.name for bucket in buckets), TEXT_GROUP, *(RAGGED_PREFIX + one for one in ragged)):
        blocks = store.table.every_block(name)
        at = first[blocks.shard]
        np.add.at(edges, at + blocks.offset // LINE_BYTES, 1)
        np.add.at(edges, at + (blocks.offset + np.maximum(blocks.length, 1) - 1) // LINE_BYTES + 1, -1)
        regions[np.unique(blocks.shard)] += 1
    for bucket in buckets:
        shard, repeat, _ = bucket.runs()
        np.maximum.at(times, shard, repeat + 1)
    for files in (store.added[name].shard for role in roles if (name := stored_name(role)) in store.added):
        own = files[files >= 0]
        edges[first[own]] += 1
        edges[first[own] + counts[own]] -= 1
        regions[own], times[own] = 1, times[: len(files)][files >= 0]
    is_read = np.cumsum(edges[:-1]) > 0
    per_file = np.add.reduceat(np.where(is_read, num_bytes, 0), first)
    rows, shards = sum(bucket.num_rows for bucket in plan.buckets), int(times[: len(store.shards)].sum())
    groups = max(1, min(shards // plan.lanes // SHARDS_AT_ONCE, rows // plan.lanes // plan.window))
    goes_around = rows // plan.lanes > 2 * groups * plan.window  # else its ends are in neighbouring windows
    ends = np.minimum(regions * LINE_BYTES, per_file)  # a line of each region
    return StoreLines(
        num_lines=int(is_read.sum()),
        num_bytes=int(per_file.sum()),
        bytes_again=int((ends * times * goes_around + per_file * (times - 1)).sum()),
        bytes_at_cut=int(ends.sum() // len(store.shards)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochBill:
    """Requests and bytes of all machines in one epoch."""

    epoch: int
    gets: int
    store_bytes: int  # fetched from the store
    cache_bytes: int  # of lines that the caches had when the epoch began
    times_store: float  # `store_bytes` by the bytes of the store's lines that any machine reads
    cost: float | None
    waits: bool | None  # whether steps wait for the store; None without a bandwidth


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """The bill of the first epochs."""

    machines: int
    lanes: int
    cache_bytes: int  # of each machine
    ring_bytes: int  # of that: for lines that are not kept
    read_bytes: int  # of the lines that any machine reads
    epochs: tuple[EpochBill, ...]
    smallest_cache_bytes: int  # with which no line is fetched twice and, with a bandwidth, no step waits after the first epoch
    assumed: tuple[str, ...] = ASSUMED


def make_bill(
    lines: StoreLines,
    plan: Plan,
    *,
    machines: int,
    epochs: int,
    cache_bytes: int,
    ring_bytes: int,
    kept_bytes: int = 0,
    step_bytes: float | None = None,
    prices: Prices | None = None,
) -> Bill:
    """Return what `machines` fetch and keep in the first epochs, each with a cache of `cache_bytes`.

    `ring_bytes` of a cache are for lines that are not kept, and `kept_bytes` for files that it holds whole. `step_bytes` are
    what a machine may fetch in a step.
    """
    if plan.lanes % machines:
        raise PlanError(f"{machines} machines do not divide {plan.lanes} lanes; expected a divisor, or as many lanes")
    share = min(lines.num_bytes, (lines.num_bytes + (machines - 1) * lines.bytes_at_cut) / machines)
    again, room = lines.bytes_again / machines, cache_bytes - kept_bytes
    passing = 0.0 if room >= share else min(share, share + ring_bytes - room)  # bytes that are not kept
    steps, found = plan.steps_before(1), []
    for epoch in range(epochs):
        kept = 0.0 if epoch == 0 else share - passing
        fetched = share - kept + again * passing / share
        gets, num_bytes = round(fetched * machines * lines.num_lines / lines.num_bytes), round(fetched * machines)
        found.append(
            EpochBill(
                epoch=epoch,
                gets=gets,
                store_bytes=num_bytes,
                cache_bytes=round(kept * machines),
                times_store=num_bytes / lines.num_bytes,
                cost=None if prices is None else gets / 1000 * prices.per_1000_gets + num_bytes / 1e9 * prices.per_gb_out,
                waits=None if step_bytes is None else fetched > step_bytes * steps,
            )
        )
    may_pass = share if step_bytes is None else min(share, step_bytes * steps * share / (share + again))
    smallest = min(kept_bytes + ring_bytes + round(share - may_pass), cache_for(round(share) + kept_bytes))
    return Bill(
        machines=machines,
        lanes=plan.lanes,
        cache_bytes=cache_bytes,
        ring_bytes=ring_bytes,
        read_bytes=lines.num_bytes,
        epochs=tuple(found),
        smallest_cache_bytes=max(smallest, LEAST_BYTES),
    )
