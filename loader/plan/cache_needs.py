"""The needs of an order from a machine's cache: room for the lines that it reads at a time, next to those that the cache keeps.

A window of `lines` reads a part of each shard of a group, and mixes its rows. So all lines of these parts are needed from the
window's first step to its last, while those of the next window arrive. They pass through the cache's ring, which must hold
both: a line that it could not keep is fetched again, many times if the ring is much too small.

All is computed from the manifest and from options that every rank has, so a window that is chosen by the size of the cache is
the same on every machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from bucketline.command_line import counted, human_bytes, machines_of
from bucketline.errors import UsageError
from bucketline.loader.config import LINES_WINDOW_BYTES, SHARDS_AT_ONCE, SHUFFLE_WINDOW, WINDOW_BLOCKS, Shuffle
from bucketline.store.format.hashing import LINE_BYTES
from bucketline.store.remote.cache.folder import USUAL_RING_BYTES, ring_share

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bucketline.store.read.store import OpenShards
    from bucketline.store.remote.cache.remote_source import RemoteSource

WINDOWS_AT_ONCE = 2  # whose lines a ring holds: with 1.5, 1 % were fetched again, with 1.1, 7 %
PARTS_OF_LINES = 2.0  # lines of a run of rows beyond its bytes: it begins and ends within one, and captions follow their rows
KEPT_BY_RING = 1 / 32  # of a cache that does not hold its stores; a window that is chosen by the cache needs no more
_AT_CUTS = 8  # lines of a machine that others read too
_SMALLER = 0.75  # of a window that needs too much


class SizedBucket(Protocol):
    """The rows of a bucket, and those of its global batch, as a plan has them."""

    @property
    def num_rows(self) -> int: ...
    @property
    def global_batch(self) -> int: ...


class Order(Protocol):
    """The part of a plan that decides which lines are read at a time. `Plan` is one; it chooses its window here."""

    @property
    def buckets(self) -> Sequence[SizedBucket]: ...
    @property
    def shuffle(self) -> Shuffle: ...
    @property
    def shuffle_window(self) -> int: ...
    @property
    def lanes(self) -> int: ...
    @property
    def digest(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneNeeds:
    """How the rows of a split are spread over shards and lanes; sizes are means over the shards."""

    num_shards: float  # of a lane
    shard_rows: float
    shard_bytes: float
    batch_rows: float  # of a lane, and all buckets: the rows read while one batch of the largest bucket is
    rare_rows: int  # of a lane in a batch of a bucket that has hardly more rows than a batch: anywhere in the store

    @classmethod
    def of(cls, store: OpenShards, split: str, buckets: Sequence[SizedBucket], lanes: int) -> LaneNeeds:
        """Count a store's rows. `buckets`: those of the split, in order."""
        rows = np.zeros(len(store.shards), dtype=np.int64)
        times = np.zeros(len(store.shards), dtype=np.int64)  # that a mixture repeats the shard
        for bucket in store.buckets(split):
            shard, repeat, num_rows = bucket.runs()
            np.add.at(rows, shard, num_rows)
            np.maximum.at(times, shard, repeat + 1)
        sizes = np.array([shard.entry.lmdb.num_bytes for shard in store.shards], dtype=np.int64)
        units, total = int(times.sum()), int(rows.sum())
        largest = max(buckets, key=lambda bucket: bucket.num_rows)
        rare = [min(one.global_batch, one.num_rows) for one in buckets if one.num_rows <= 2 * one.global_batch]
        return cls(
            num_shards=units / lanes + (lanes > 1),
            shard_rows=total / units,
            shard_bytes=float((sizes * times).sum()) / units,
            batch_rows=min(total, largest.global_batch * total / largest.num_rows) / lanes,
            rare_rows=-(-max(rare, default=0) // lanes),
        )

    def lines_at_once(self, window_rows: int) -> int:
        """Return the lines that a lane reads at a time, with such a window."""
        rows = self.num_shards * self.shard_rows
        groups = max(1, min(int(self.num_shards) // SHARDS_AT_ONCE, int(rows / window_rows)))
        shards = self.num_shards / groups
        windows = max(1, math.ceil(rows / groups / window_rows))
        whole = self.shard_bytes / LINE_BYTES
        part = whole * min(1.0, 1 / windows + self.batch_rows / (shards * self.shard_rows))
        lines = shards * (whole + 1 if windows == 1 else min(whole + 1, part + PARTS_OF_LINES))
        of_line = self.shard_rows / max(1.0, whole)  # rows: a line that has one is needed once
        return math.ceil(lines * min(1.0, of_line / 2)) + 2 * self.rare_rows

    def row_bytes(self) -> float:
        return self.shard_bytes / self.shard_rows


def num_bytes_of(store: OpenShards) -> int:
    """Return the bytes of all shards' files."""
    return sum(shard.entry.lmdb.num_bytes for shard in store.shards)


def sidecar_bytes_of(store: OpenShards) -> int:
    """Return the bytes of the files next to the shards that are needed to read rows; a cache holds them whole."""
    return sum(shard.entry.extents.num_bytes for shard in store.shards)


def holds(cache_bytes: int, store: OpenShards) -> bool:
    """Return whether a cache keeps all files of a store."""
    return cache_bytes - ring_share(cache_bytes) >= num_bytes_of(store) + sidecar_bytes_of(store)


def share_of(store: OpenShards, lanes: int, machines: int) -> int:
    """Return the bytes of the files that one of some machines reads by `lines`, lines that it shares with others included."""
    own = num_bytes_of(store) * -(-lanes // machines) // lanes
    return min(num_bytes_of(store), own + _AT_CUTS * LINE_BYTES) + sidecar_bytes_of(store)


def most_window(store: OpenShards) -> int:
    """Return the rows of the largest window of `lines`, by its bytes."""
    rows = sum(shard.entry.live_samples for shard in store.shards)
    return max(WINDOW_BLOCKS, LINES_WINDOW_BYTES * rows // max(1, num_bytes_of(store)))


def chosen_window(
    store: OpenShards, split: str, buckets: Sequence[SizedBucket], lanes: int, machines: int, cache_bytes: int
) -> int:
    """Return the rows of a window of `lines` if none are given: fewer than usual if a cache keeps more of the store then."""
    usual, most = SHUFFLE_WINDOW, most_window(store)
    if cache_bytes >= share_of(store, lanes, machines):
        return usual
    own, here = LaneNeeds.of(store, split, buckets, lanes), -(-lanes // machines)
    keeps = int(cache_bytes * KEPT_BY_RING) // here
    least = max(WINDOW_BLOCKS, math.ceil(own.batch_rows), int(SHARDS_AT_ONCE * LINE_BYTES / own.row_bytes()))
    window = _reduced(own, min(usual, most), keeps, least)
    window = _reduced(own, window, (cache_bytes - sidecar_bytes_of(store)) // here, WINDOW_BLOCKS)
    return window if window < min(usual, most) else usual


def _reduced(own: LaneNeeds, window: int, num_bytes: int, least: int) -> int:
    """Return the rows of a window whose ring has at most `num_bytes`, but no fewer than `least`."""
    while window > least and ring_bytes(own.lines_at_once(window)) > num_bytes:
        window = max(least, int(window * _SMALLER))
    return window


def ring_bytes(lines: int) -> int:
    """Return the bytes of a ring for so many lines at a time."""
    return WINDOWS_AT_ONCE * lines * LINE_BYTES


def bytes_at_once(store: OpenShards, plan: Order, split: str, machines: int) -> int:
    """Return the bytes of the ring that each of some machines needs, so that no line is fetched twice in an epoch by `lines`.

    By another order, those with which it can read a batch.
    """
    own = LaneNeeds.of(store, split, plan.buckets, plan.lanes)
    if plan.shuffle is Shuffle.LINES:
        needed = -(-plan.lanes // machines) * ring_bytes(own.lines_at_once(plan.shuffle_window))
        needed = min(needed, share_of(store, plan.lanes, machines) - sidecar_bytes_of(store))
    else:
        rows = -(-max(bucket.global_batch for bucket in plan.buckets) // machines)
        runs = {Shuffle.BLOCKS: WINDOW_BLOCKS + 1, Shuffle.NONE: 1}.get(plan.shuffle, rows)
        lines = min(runs, rows) * PARTS_OF_LINES + rows * own.row_bytes() / LINE_BYTES
        needed = ring_bytes(math.ceil(min(lines, 2.0 * rows)))
    return min(needed, num_bytes_of(store))


def ring_of(store: OpenShards, plan: Order, split: str, machines: int) -> Callable[[int], int]:
    """Return the function from the bytes of a cache to those of its ring, on each of some machines."""
    needed, share = bytes_at_once(store, plan, split, machines), share_of(store, plan.lanes, machines)
    return lambda cache_bytes: ring_share(cache_bytes, 0 if cache_bytes >= share else needed)


def reserve_ring(builder: object, store: OpenShards, plan: Order, split: str, rank: int, world_size: int) -> None:
    """Let the caches of stores in object storage leave as much to lines that pass through as the order needs.

    It counts while `builder` exists. Ranks of a machine that share a cache need the same, and count once.

    Raises:
        UsageError: if a cache is too small, or the order would fetch the store many times; the message has the numbers.
    """
    if not (sources := _sources_of(store)):
        return
    refuse_small_caches(store, plan, split, world_size)
    limit, machines = min(source.limit for source in sources), machines_of(world_size)
    machine = rank * machines // world_size
    lanes = range(machine * plan.lanes // machines, -(-(machine + 1) * plan.lanes // machines))
    each = bytes_at_once(store, plan, split, machines) // len(lanes)
    holds_all = holds(limit, store) or (plan.shuffle is Shuffle.LINES and limit >= share_of(store, plan.lanes, machines))
    for source in sources:
        source.reserve_ring(builder, {(plan.digest, lane): each for lane in lanes}, holds_all=holds_all)


def _sources_of(store: OpenShards) -> list[RemoteSource]:
    if all(shard.source is None for shard in store.shards):
        return []
    from bucketline.store.remote.cache.remote_source import RemoteSource

    return list({id(shard.source): shard.source for shard in store.shards if isinstance(shard.source, RemoteSource)}.values())


def refuse_small_caches(store: OpenShards, plan: Order, split: str, world_size: int) -> None:
    """Refuse an order that the caches of stores in object storage are too small for.

    Raises:
        UsageError: if a cache is too small, or the order would fetch the store many times; the message has the numbers.
    """
    if not (sources := _sources_of(store)):
        return
    limit = min(source.limit for source in sources)
    reason = why_not(plan.shuffle, store, limit, split=split)
    if reason := reason or why_too_small(store, plan, limit, split, machines_of(world_size)):
        raise UsageError(reason)


def why_too_small(store: OpenShards, plan: Order, cache_bytes: int, split: str, machines: int) -> str | None:
    """Return why a machine's cache cannot hold what the order reads at a time, and what would do; None if it can."""
    needed, limit = bytes_at_once(store, plan, split, machines), cache_bytes - sidecar_bytes_of(store)
    if needed <= limit or holds(cache_bytes, store):
        return None
    least = _rounded_up(needed + sidecar_bytes_of(store))
    may = f"the cache may hold {human_bytes(cache_bytes)}, and {store.where} has {human_bytes(num_bytes_of(store))}"
    if plan.shuffle is not Shuffle.LINES:
        return f"{may}: by shuffle {plan.shuffle}, two batches need {least}; give at least that (--cache-bytes)"
    lanes = -(-plan.lanes // machines)
    own = LaneNeeds.of(store, split, plan.buckets, plan.lanes)
    window = _reduced(own, plan.shuffle_window, limit // lanes, WINDOW_BLOCKS)
    fits = ring_bytes(own.lines_at_once(window)) <= limit // lanes
    fewer = f", or mix at most {window} rows at a time (--shuffle-window {window})" if fits else ""
    return (
        f"{may}: two windows of {plan.shuffle_window} rows of {counted(lanes, 'lane')} need {least}, because the lines of one "
        f"stay while those of the next arrive, or are fetched again and again; give at least that (--cache-bytes){fewer}"
    )


def cache_for(num_bytes: int) -> int:
    """Return the size of a cache that pins so many bytes.

    >>> cache_for(700 << 30) == (700 << 30) + (768 << 20)
    True
    """
    return num_bytes + min(num_bytes, USUAL_RING_BYTES)


def why_not(shuffle: Shuffle, store: OpenShards, cache_bytes: int, *, split: str = "train") -> str | None:
    """Return why a store is not read in this order through a cache that does not hold it all; None if it may be.

    By `full`, a row is anywhere in the store, so hardly a line that was fetched for one is still there for another: each of a
    row's pieces (its columns, and its caption) costs a line or more, unless it is among the share of lines in the cache.
    """
    num_bytes = num_bytes_of(store)
    if shuffle is not Shuffle.FULL or holds(cache_bytes, store):
        return None
    rows = sum(bucket.num_rows for bucket in store.buckets(split))
    fetched = rows_in_lines(store, split) * (1 - min(1.0, cache_bytes / num_bytes))
    return (
        f"the cache may hold {human_bytes(cache_bytes)} and {store.where} has {human_bytes(num_bytes)}: by shuffle full its "
        f"{rows:,} rows would be read one by one, and each epoch would fetch about {human_bytes(fetched)}, "
        f"{fetched / num_bytes:.1f} times the store; use shuffle lines (--shuffle lines), which fetches a line once an epoch, "
        f"or a cache of {_rounded_up(cache_for(num_bytes + sidecar_bytes_of(store)))} (--cache-bytes)"
    )


def _rounded_up(num_bytes: int) -> str:
    """Return bytes as text for an option; a cache of so many has no fewer.

    >>> _rounded_up(1 << 30), _rounded_up((1 << 30) + 1), _rounded_up(11 << 30)
    ('1024MiB', '1025MiB', '11GiB')
    """
    unit, name = (1 << 20, "MiB") if num_bytes < 10 << 30 else (1 << 30, "GiB")
    return f"{-(-num_bytes // unit)}{name}"


def rows_in_lines(store: OpenShards, split: str) -> int:
    """Return the bytes of the lines of each row, added up over the rows of a split: of its columns, and of one caption."""
    total, captions = 0.0, sum(shard.entry.groups["text"].rows for shard in store.shards)
    caption_bytes = sum(shard.entry.caption_bytes for shard in store.shards) / max(1, captions)
    for bucket in store.buckets(split):
        total += bucket.num_rows * sum(LINE_BYTES + piece - 1 for piece in (bucket.spec.row_bytes, caption_bytes))
    return int(total)
