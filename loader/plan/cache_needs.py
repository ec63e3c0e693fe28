"""The needs of an order from a machine's cache: room for the lines that it reads at a time, next to those that the cache keeps.

A window of `lines` reads a part of each shard of a group, and mixes its rows. So all lines of these parts are needed from the
window's first step to its last, while those of the next window arrive. They pass through the cache's ring, which must hold
both: a line that it could not keep is fetched again, many times if the ring is too small, because the least recently used goes
first.

All is computed from the manifest and options that every rank has, so a window that is chosen by the size of the cache is the
same on every machine.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from bucketline.command_line import counted, human_bytes, machines_of
from bucketline.errors import UsageError
from bucketline.loader.config import LINES_WINDOW_BYTES, SHARDS_AT_ONCE, SHUFFLE_WINDOW, WINDOW_BLOCKS, Shuffle
from bucketline.store.format.hashing import LINE_BYTES
from bucketline.store.format.text_block import is_bucket
from bucketline.store.remote.cache.folder import USUAL_RING_BYTES, ring_share

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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


def in_use(store: OpenShards, plan: Plan, machines: int) -> Callable[[int], int]:
    """Return the function from the rows of a window of `lines` to the bytes of the lines that a machine has in use at a time.

    They are those of two windows of each lane: in each shard of a group a run of rows of each bucket, and of what belongs to
    rows, which begins and ends within a line. A batch of a bucket may take more rows than a window has of it.
    """
    lanes, rows, row_bytes = -(-plan.lanes // machines), sum(one.num_rows for one in plan.buckets), row_bytes_of(store)
    names = {one.name for one in plan.buckets}
    groups_read = [sum(name in names or not is_bucket(name) for name in shard.entry.groups) for shard in store.shards]
    regions = (sum(groups_read) + sum(len(shard.entry.added) for shard in store.shards)) / len(store.shards)
    shards = max(1, plan.lane_order.num_units // plan.lanes)
    # rows of a bucket of at most a batch are anywhere
    rare = max((one.global_batch for one in plan.buckets if one.num_rows <= one.global_batch), default=0) / plan.lanes

    def num_bytes(window_rows: int) -> int:
        num_groups = max(1, min(shards // SHARDS_AT_ONCE, rows // plan.lanes // window_rows))
        of_window = sum(max(window_rows * one.num_rows / rows, one.global_batch / plan.lanes) for one in plan.buckets)
        lines = shards / num_groups * regions + LINES_OF_RUN * rare
        return int(lanes * (_AT_ONCE * of_window * row_bytes + lines * LINE_BYTES))

    return num_bytes


def num_bytes_of(store: OpenShards) -> int:
    """Return the bytes of all shards' files, those of added columns too."""
    return sum(file.entry.lmdb.num_bytes for file in store.files)


def row_bytes_of(store: OpenShards) -> float:
    """Return the bytes of these files for each row."""
    return num_bytes_of(store) / max(1, sum(shard.entry.live_samples for shard in store.shards))


def sidecar_bytes_of(store: OpenShards) -> int:
    """Return the bytes of the files next to the shards that are needed to read rows; a cache holds them whole."""
    return sum(file.entry.extents.num_bytes for file in store.files)


def share_of(store: OpenShards, lanes: int, machines: int) -> int:
    """Return the bytes of the files that one of some machines reads by `lines`, lines that it shares with others included."""
    own = num_bytes_of(store) * -(-lanes // machines) // lanes
    return min(num_bytes_of(store), own + _AT_CUTS * LINE_BYTES) + sidecar_bytes_of(store)


def holds(cache_bytes: int, store: OpenShards, plan: Plan, machines: int) -> bool:
    """Return whether a cache keeps all that a machine reads by a plan."""
    if plan.shuffle is Shuffle.LINES and cache_bytes >= share_of(store, plan.lanes, machines):
        return True
    return cache_bytes - ring_share(cache_bytes) >= num_bytes_of(store) + sidecar_bytes_of(store)


def most_window(store: OpenShards) -> int:
    """Return the rows of the largest window of `lines`, by its bytes."""
    return max(WINDOW_BLOCKS, int(LINES_WINDOW_BYTES / max(1.0, row_bytes_of(store))))


def window_for(store: OpenShards, plan: Plan, machines: int, cache_bytes: int) -> int:
    """Return the rows of a window of `lines` if none are given: fewer than usual if a cache keeps more of the store then.

    A window that has less than a line of each shard, or than a batch, hardly needs less room.
    """
    most = min(SHUFFLE_WINDOW, most_window(store))
    if cache_bytes >= share_of(store, plan.lanes, machines):
        return most
    of_batch = sum(bucket.num_rows for bucket in plan.buckets) / plan.lanes
    of_batch *= max(bucket.global_batch / bucket.num_rows for bucket in plan.buckets)
    needed = in_use(store, plan, machines)
    least = needed(min(most, int(max(of_batch, SHARDS_AT_ONCE * LINE_BYTES / row_bytes_of(store), WINDOW_BLOCKS))))
    room = min(max(cache_bytes * KEPT_BY_RING, RING_OF_USE * least), cache_bytes - sidecar_bytes_of(store))
    return next((window for window in _windows(most) if RING_OF_USE * needed(window) <= room), WINDOW_BLOCKS)


def _windows(most: int) -> Iterator[int]:
    """Yield the windows to choose from, from the largest on.

    >>> list(_windows(40))
    [40, 30, 22, 16]
    """
    while most > WINDOW_BLOCKS:
        yield most
        most = max(WINDOW_BLOCKS, int(most * _SMALLER))
    yield most


def bytes_at_once(store: OpenShards, plan: Plan, machines: int) -> int:
    """Return the bytes of the ring that each of some machines needs, so that no line is fetched again while it is in use.

    By another order than `lines`, those with which it can read a batch.
    """
    if plan.shuffle is Shuffle.LINES:
        needed = int(RING_OF_USE * in_use(store, plan, machines)(plan.shuffle_window))
        return min(needed, share_of(store, plan.lanes, machines) - sidecar_bytes_of(store))
    rows = -(-max(bucket.global_batch for bucket in plan.buckets) // machines)
    runs = {Shuffle.BLOCKS: WINDOW_BLOCKS + 1, Shuffle.NONE: 1}.get(plan.shuffle, rows)
    row_bytes = num_bytes_of(store) / sum(bucket.num_rows for bucket in plan.buckets)
    lines = min(runs, rows) * LINES_OF_RUN + rows * row_bytes / LINE_BYTES
    return min(_AT_ONCE * math.ceil(min(lines, 2.0 * rows)) * LINE_BYTES, num_bytes_of(store))


def ring_of(store: OpenShards, plan: Plan, machines: int, cache_bytes: int) -> int:
    """Return the bytes of a cache's ring, on each of some machines."""
    return ring_share(cache_bytes, 0 if holds(cache_bytes, store, plan, machines) else bytes_at_once(store, plan, machines))


def reserve_ring(builder: object, store: OpenShards, plan: Plan, split: str, rank: int, world_size: int) -> None:
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
    each, holds_all = bytes_at_once(store, plan, machines) // len(lanes), holds(limit, store, plan, machines)
    for source in sources:
        source.reserve_ring(builder, {(plan.digest, lane): each for lane in lanes}, holds_all=holds_all)


def _sources_of(store: OpenShards) -> list[RemoteSource]:
    if all(shard.source is None for shard in store.shards):
        return []
    from bucketline.store.remote.cache.remote_source import RemoteSource

    return list({id(shard.source): shard.source for shard in store.shards if isinstance(shard.source, RemoteSource)}.values())


def refuse_small_caches(store: OpenShards, plan: Plan, split: str, world_size: int) -> None:
    """Refuse an order that the caches of stores in object storage are too small for.

    Raises:
        UsageError: if a cache is too small, or the order would fetch the store many times; the message has the numbers.
    """
    if sources := _sources_of(store):
        limit = min(source.limit for source in sources)
        if (reason := why_too_small(store, plan, limit, split, machines_of(world_size))) is not None:
            raise UsageError(reason)


def why_too_small(store: OpenShards, plan: Plan, cache_bytes: int, split: str, machines: int) -> str | None:
    """Return why a store is not read in this order through a machine's cache, and what would do; None if it may be.

    By `full`, a row is anywhere in the store, so hardly a line that was fetched for one is still there for another: each of a
    row's pieces (its columns, and its caption) costs a line or more, unless it is among the share of lines in the cache. The
    other orders need room for what they read at a time.
    """
    if holds(cache_bytes, store, plan, machines):
        return None
    num_bytes, sidecars = num_bytes_of(store), sidecar_bytes_of(store)
    may = f"the cache may hold {human_bytes(cache_bytes)}, and {store.where} has {human_bytes(num_bytes)}"
    if plan.shuffle is Shuffle.FULL:
        rows = sum(bucket.num_rows for bucket in store.buckets(split))
        fetched = rows_in_lines(store, split) * (1 - min(1.0, cache_bytes / num_bytes))
        return (
            f"{may}: by shuffle full its {rows:,} rows would be read one by one, and each epoch would fetch about "
            f"{human_bytes(fetched)}, {fetched / num_bytes:.1f} times the store; use shuffle lines (--shuffle lines), which "
            f"fetches a line once an epoch, or a cache of {_rounded_up(cache_for(num_bytes + sidecars))} (--cache-bytes)"
        )
    if plan.shuffle is not Shuffle.LINES:
        if (least := bytes_at_once(store, plan, machines) + sidecars) <= cache_bytes:
            return None
        return f"{may}: by shuffle {plan.shuffle}, two batches need {_rounded_up(least)}; give at least that (--cache-bytes)"
    needed, room = in_use(store, plan, machines), cache_bytes - sidecars
    if LEAST_RING * (most := needed(plan.shuffle_window)) <= room:
        return None
    fits = next((one for one in _windows(plan.shuffle_window) if RING_OF_USE * needed(one) <= room), None)
    fewer = f", or mix at most {fits} rows at a time (--shuffle-window {fits})" if fits is not None else ""
    return (
        f"{may}: windows of {plan.shuffle_window} rows of {counted(-(-plan.lanes // machines), 'lane')} have up to "
        f"{human_bytes(most)} in use at a time, and need {_rounded_up(bytes_at_once(store, plan, machines) + sidecars)}, "
        f"because these stay while others arrive, or are fetched again and again; give at least that (--cache-bytes){fewer}"
    )


def cache_for(num_bytes: int) -> int:
    """Return the size of a cache that pins so many bytes.

    >>> cache_for(700 << 30) == (700 << 30) + (768 << 20)
    True
    """
    return num_bytes + min(num_bytes, USUAL_RING_BYTES)


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
