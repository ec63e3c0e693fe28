"""The needs of an order from a machine's cache: room for the lines that it reads at a time, next to those that the cache keeps.

A window of `lines` reads a part of each shard of a group, and mixes its rows. So all lines of these parts are needed from the
window's first step to its last, while those of the next window arrive. They pass through the cache's ring, which must hold
both: a line that it could not keep is fetched again, many times if the ring is too small, because the least recently used goes
first. So what counts is the most that is in use at any time, and it depends on where the blocks of each bucket are.

All is computed from the manifest, the extents and options that every rank has, so a window that is chosen by the size of the
cache is the same on every machine.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from bucketline.command_line import counted, human_bytes, machines_of
from bucketline.errors import UsageError
from bucketline.loader.config import LINES_WINDOW_BYTES, SHARDS_AT_ONCE, SHUFFLE_WINDOW, WINDOW_BLOCKS, Shuffle
from bucketline.loader.plan.line_uses import LineUses
from bucketline.store.format.columns import RAGGED_PREFIX
from bucketline.store.format.hashing import LINE_BYTES
from bucketline.store.format.text_block import TEXT_GROUP
from bucketline.store.remote.cache.folder import USUAL_RING_BYTES, ring_share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bucketline.loader.plan.plan import Plan
    from bucketline.store.read.store import OpenShards
    from bucketline.store.remote.cache.remote_source import RemoteSource

RING_OF_USE = 1.5  # bytes of a ring by those of the lines in use at a time, the most in an epoch: others arrive meanwhile
AMPLE_RING = 2.0  # likewise, if it has more than an eighth of the cache: 5 % were fetched again with 1.5, and none with this
LEAST_RING = 1.1  # likewise: with less the order is refused, since lines would be fetched again at nearly each use
BATCHES_AT_ONCE = 2  # by an order that is not `lines`
LINES_OF_RUN = 2.0  # of a run of rows beyond its bytes: it begins and ends within one, and captions follow their rows
EPOCHS = 2  # that are looked at
SAME_USE = 2.0  # windows: a line that is used again so soon stays meanwhile
MOST_SHARDS = 64  # of a machine, whose extents are read to see what is in use
KEPT_BY_RING = 1 / 32  # of a cache that does not hold its stores; a window that is chosen by the cache needs no more
_AT_CUTS = 8  # lines of a machine that others read too
_SMALLER = 0.75  # of a window that needs too much
_HARDLY_MORE = 1.1
_SMALL_PART = 8


class InUse:
    """The bytes of the lines that a machine has in use at a time, at most, by the rows of a window of `lines`."""

    def __init__(self, store: OpenShards, plan: Plan, split: str, machines: int) -> None:
        """Read the extents of the shards, or of those of the first windows if the store is large."""
        groups = (TEXT_GROUP, *(RAGGED_PREFIX + name for name in store.ragged), *_complete(store, split))
        self._parts = machines if plan.lanes % machines == 0 else math.gcd(plan.lanes, machines)
        self._per_machine = -(-plan.lanes // machines) / (plan.lanes // self._parts)  # of a part's lanes
        self._uses = LineUses(store, plan, split, self._parts, groups=groups, line_bytes=LINE_BYTES, most_shards=MOST_SHARDS)
        self._steps_a_row = plan.steps_before(1) * plan.lanes / sum(bucket.num_rows for bucket in plan.buckets)
        part = self._uses.part
        rare = [one.global_batch for one in plan.buckets if part < 1.0 and part * one.num_rows <= 2 * one.global_batch]
        self._rare_bytes = 2 * max(rare, default=0) // machines * LINE_BYTES  # of batches whose rows are anywhere
        self._found: dict[int, int] = {}

    def of(self, window_rows: int) -> int:
        """Return the most bytes by such a window, over the first epochs."""
        if window_rows not in self._found:
            uses = self._uses.with_window(window_rows)
            asked = [(part, epoch) for part in range(self._parts) for epoch in range(EPOCHS)]
            apart = SAME_USE * window_rows * self._steps_a_row
            own = [uses.of(*one).joined(apart) for one in (asked if self._uses.part == 1.0 else asked[:1])]
            most = max(one.most_at_once(uses.num_bytes[one.line]) for one in own)
            self._found[window_rows] = int(most * min(1.0, self._per_machine)) + self._rare_bytes
        return self._found[window_rows]

    def ring(self, window_rows: int, cache_bytes: int) -> int:
        """Return the bytes of a ring that keeps these lines, while those of later batches arrive."""
        ample = int(AMPLE_RING * self.of(window_rows))
        return ample if ample > cache_bytes // _SMALL_PART else int(RING_OF_USE * self.of(window_rows))

    def largest(self, windows: Sequence[int], num_bytes: int, cache_bytes: int) -> int | None:
        """Return the first of some windows whose ring has at most `num_bytes`; None if there is none."""
        return next((window for window in windows if self.ring(window, cache_bytes) <= num_bytes), None)


def _complete(store: OpenShards, split: str) -> list[str]:
    """Return the added columns that all rows of a split have: a loader may request them."""
    return [name for name in store.added if not any(bucket.rows_without(name) for bucket in store.buckets(split))]


def num_bytes_of(store: OpenShards) -> int:
    """Return the bytes of all shards' files, those of added columns too."""
    return sum(file.entry.lmdb.num_bytes for file in store.files)


def sidecar_bytes_of(store: OpenShards) -> int:
    """Return the bytes of the files next to the shards that are needed to read rows; a cache holds them whole."""
    return sum(file.entry.extents.num_bytes for file in store.files)


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


def chosen_window(store: OpenShards, plan: Plan, split: str, machines: int, cache_bytes: int) -> int:
    """Return the rows of a window of `lines` if none are given: fewer than usual if a cache keeps more of the store then."""
    usual = SHUFFLE_WINDOW
    if cache_bytes >= share_of(store, plan.lanes, machines):
        return usual
    in_use, limit = InUse(store, plan, split, machines), cache_bytes - sidecar_bytes_of(store)
    windows = _windows(min(usual, most_window(store)))
    rows = sum(bucket.num_rows for bucket in plan.buckets)
    # smaller ones have the lines of a batch, and one of each shard, in use anyway
    of_batch = max(bucket.global_batch / bucket.num_rows for bucket in plan.buckets) * rows / plan.lanes
    of_lines = SHARDS_AT_ONCE * LINE_BYTES * rows / num_bytes_of(store)
    usable = [window for window in windows if window >= min(windows[0], max(of_batch, of_lines))]
    rings = {window: in_use.ring(window, cache_bytes) for window in usable}
    # if none needs as little as it should, the largest that needs hardly more than the least
    most = max(int(cache_bytes * KEPT_BY_RING), int(min(rings.values()) * _HARDLY_MORE))
    window = next(window for window, ring in rings.items() if ring <= most)
    if rings[window] > limit:
        window = in_use.largest(windows, limit, cache_bytes) or min(windows, key=in_use.of)
    return window if window < windows[0] else usual


def _windows(most: int) -> list[int]:
    """Return the windows to choose from, from the largest on.

    >>> _windows(40)
    [40, 30, 22, 16]
    """
    found = [most]
    while found[-1] > WINDOW_BLOCKS:
        found.append(max(WINDOW_BLOCKS, int(found[-1] * _SMALLER)))
    return found


def bytes_at_once(store: OpenShards, plan: Plan, split: str, machines: int, cache_bytes: int = 0) -> int:
    """Return the bytes of the ring that each of some machines needs, so that no line is fetched again while it is in use.

    By another order than `lines`, those with which it can read a batch.
    """
    if plan.shuffle is Shuffle.LINES:
        needed = InUse(store, plan, split, machines).ring(plan.shuffle_window, cache_bytes)
        needed = min(needed, share_of(store, plan.lanes, machines) - sidecar_bytes_of(store))
    else:
        rows = -(-max(bucket.global_batch for bucket in plan.buckets) // machines)
        runs = {Shuffle.BLOCKS: WINDOW_BLOCKS + 1, Shuffle.NONE: 1}.get(plan.shuffle, rows)
        row_bytes = num_bytes_of(store) / sum(bucket.num_rows for bucket in plan.buckets)
        lines = min(runs, rows) * LINES_OF_RUN + rows * row_bytes / LINE_BYTES
        needed = BATCHES_AT_ONCE * math.ceil(min(lines, 2.0 * rows)) * LINE_BYTES
    return min(needed, num_bytes_of(store))


def ring_of(store: OpenShards, plan: Plan, split: str, machines: int, cache_bytes: int) -> int:
    """Return the bytes of a cache's ring, on each of some machines, by `lines`."""
    holds_all = cache_bytes >= share_of(store, plan.lanes, machines)
    return ring_share(cache_bytes, 0 if holds_all else bytes_at_once(store, plan, split, machines, cache_bytes))


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
    each = bytes_at_once(store, plan, split, machines, limit) // len(lanes)
    holds_all = holds(limit, store) or (plan.shuffle is Shuffle.LINES and limit >= share_of(store, plan.lanes, machines))
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
    if not (sources := _sources_of(store)):
        return
    limit = min(source.limit for source in sources)
    reason = why_not(plan.shuffle, store, limit, split=split)
    if reason := reason or why_too_small(store, plan, limit, split, machines_of(world_size)):
        raise UsageError(reason)


def why_too_small(store: OpenShards, plan: Plan, cache_bytes: int, split: str, machines: int) -> str | None:
    """Return why a machine's cache cannot hold what the order reads at a time, and what would do; None if it can."""
    sidecars, share = sidecar_bytes_of(store), share_of(store, plan.lanes, machines)
    if holds(cache_bytes, store) or (plan.shuffle is Shuffle.LINES and cache_bytes >= share):
        return None
    may = f"the cache may hold {human_bytes(cache_bytes)}, and {store.where} has {human_bytes(num_bytes_of(store))}"
    if plan.shuffle is not Shuffle.LINES:
        least = bytes_at_once(store, plan, split, machines) + sidecars
        if least <= cache_bytes:
            return None
        return f"{may}: by shuffle {plan.shuffle}, two batches need {_rounded_up(least)}; give at least that (--cache-bytes)"
    in_use = InUse(store, plan, split, machines)
    most = in_use.of(plan.shuffle_window)
    if most * LEAST_RING + sidecars <= cache_bytes:
        return None
    windows = [window for window in _windows(most_window(store)) if window < plan.shuffle_window]
    window = next((one for one in windows if in_use.of(one) * RING_OF_USE + sidecars <= cache_bytes), None)
    fewer = f", or mix at most {window} rows at a time (--shuffle-window {window})" if window is not None else ""
    return (
        f"{may}: windows of {plan.shuffle_window} rows of {counted(-(-plan.lanes // machines), 'lane')} have up to "
        f"{human_bytes(most)} in use at a time, and need {_rounded_up(min(int(most * RING_OF_USE) + sidecars, share))}, "
        f"because these stay while others arrive, or are fetched again and again; give at least that (--cache-bytes){fewer}"
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
