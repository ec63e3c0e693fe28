"""The bill before the run: what machines fetch, keep, pay and wait for when they read a store in lines.

A line that is fetched while there is room in a machine's cache is pinned for good, and the rest passes through a ring, least
recently used first. `line_uses` says which lines a machine reads, and when.

Letters: N uses of lines, or lines, of one machine.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections import OrderedDict
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from bucketline.errors import UsageError
from bucketline.loader.plan.cache_needs import RING_OF_USE, cache_for
from bucketline.store.remote.cache.folder import LEAST_BYTES, ring_share
from bucketline.typed_json import TypedJsonError, decode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from bucketline.loader.plan.line_uses import LineUses, Uses
    from bucketline.loader.plan.plan import Plan

ASSUMED = (
    "every machine has an empty cache of this size at first, and this bandwidth",
    "ranks are numbered machine after machine, as torchrun does",
    "requests are for {lines_per_get} of 8 MiB; the manifest, sidecars and retries are not counted",
    "all rows of a window are needed from its first step to its last; captions are stored near their rows, in the same order",
    "lines are fetched ahead in the plan's order, as far as half of the ring",
)
_CLOSE = 0.01  # of the smallest cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """One machine's requests and bytes in one epoch."""

    gets: int
    store_bytes: int  # fetched from the store
    cache_bytes: int  # of lines that were there when the epoch began
    again_bytes: int  # of `store_bytes`: of lines that the ring could not keep until their next use
    ring_bytes: int  # the most that the ring's lines had at once, from a line's first use to its last
    waits_at: int | None  # the first step that waits, after the first one of the run; None without a bandwidth, or if none does


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """How fast a machine is."""

    bytes_per_s: float
    step_s: float


class MachineCache:
    """One machine's cache, from epoch to epoch."""

    def __init__(self, num_bytes: NDArray[np.int64], shard: NDArray[np.int64], cache_bytes: int, ring_bytes: int) -> None:
        """Begin with an empty cache. `num_bytes` and `shard` are by line."""
        self._num_bytes, self._shard = num_bytes, shard
        self._room, self._ring = cache_bytes - ring_bytes, ring_bytes
        self._is_pinned = np.zeros(len(num_bytes), dtype=bool)
        self._idle: OrderedDict[int, int] = OrderedDict()  # bytes of the ring's lines that are not in use, by their last use
        self._idle_bytes = 0

    def run(
        self, uses: Uses, speed: Speed | None, *, lines_per_get: int = 1, first_step: int = 0, num_steps: int = 1
    ) -> Fetched:
        """Return what an epoch of so many steps fetches, and pin what there is room for."""
        own = self._num_bytes[uses.line]
        is_first = np.concatenate([[True], uses.line[1:] != uses.line[:-1]]) if len(uses.line) else np.empty(0, dtype=bool)
        is_there = self._is_pinned[uses.line] & is_first
        was_fetched = self._pass_by(uses, is_there, is_first)
        fetched = was_fetched[np.argsort(uses.first[was_fetched], kind="stable")]
        waits_at = None
        if speed is not None:
            waits_at = _first_wait(
                uses.first[fetched] - first_step, own[fetched], speed, self._ring, first_step=first_step, num_steps=num_steps
            )
        return Fetched(
            gets=_count_gets(uses.line[fetched], self._shard, lines_per_get),
            store_bytes=int(own[fetched].sum()),
            cache_bytes=int(own[is_there].sum()),
            again_bytes=int(own[fetched][~is_first[fetched]].sum()),
            ring_bytes=uses.most_at_once(np.where(self._is_pinned[uses.line], 0, own)),
            waits_at=waits_at,
        )

    def _pass_by(self, uses: Uses, is_there: NDArray[np.bool_], is_first: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Let the uses begin and end in their order; return those whose lines are fetched, and note which are there.

        A line in use stays, and of the others the least recently used goes first.
        """
        lines, sizes, firsts = uses.line.tolist(), self._num_bytes[uses.line].tolist(), is_first.tolist()
        in_use, fetched = 0, list[int]()
        for event in uses.events().tolist():
            use, is_end = (event, False) if event < len(lines) else (event - len(lines), True)
            line, size = lines[use], sizes[use]
            if self._is_pinned[line]:
                continue
            if is_end:
                self._idle[line] = size
                in_use, self._idle_bytes = in_use - size, self._idle_bytes + size
            elif line in self._idle:
                self._idle_bytes -= self._idle.pop(line)
                in_use += size
                is_there[use] = firsts[use]
            else:
                fetched.append(use)
                if size <= self._room:
                    self._is_pinned[line] = True
                    self._room -= size
                    continue
                in_use += size
            while in_use + self._idle_bytes > self._ring and self._idle:
                self._idle_bytes -= self._idle.popitem(last=False)[1]
        return np.array(fetched, dtype=np.int64)


def _count_gets(line: NDArray[np.int64], shard: NDArray[np.int64], lines_per_get: int) -> int:
    """Return the requests for lines, in the order of fetching; neighbours of a shard that follow one another are joined."""
    if lines_per_get == 1 or len(line) == 0:
        return len(line)
    ordered = np.sort(line)
    is_new = np.concatenate([[True], (np.diff(ordered) != 1) | (shard[ordered[1:]] != shard[ordered[:-1]])])
    lengths = np.diff(np.append(np.flatnonzero(is_new), len(ordered)))
    return int((-(-lengths // lines_per_get)).sum())


def _first_wait(
    first: NDArray[np.float64],
    num_bytes: NDArray[np.int64],
    speed: Speed,
    ring_bytes: int,
    *,
    first_step: int,
    num_steps: int,
) -> int | None:
    """Return the first step after the run's first that lines arrive too late for. They are fetched in order of use.

    Fetching runs ahead of the steps by half of the ring, but not into the time before the run. `first` counts from the epoch's
    start; the epoch before is taken to have fetched at the same pace.
    """
    if len(first) == 0:
        return None
    in_advance = max(1, int(ring_bytes // 2 // num_bytes.max()))
    ahead = min(len(first), in_advance)
    transfer = np.cumsum(num_bytes) / speed.bytes_per_s
    is_start = first_step == 0  # its first batch is waited for in any case
    due = first * speed.step_s if not is_start else transfer[first <= first[0]][-1] + (first - first[0]) * speed.step_s
    pace = 0.0 if is_start else num_steps * speed.step_s / len(first)
    early = (np.arange(ahead) - in_advance) * pace
    opens = np.concatenate([early, due[: len(due) - ahead]])
    if is_start:
        opens[first <= first[0]] = 0.0
    arrives = transfer + np.maximum.accumulate(opens - np.concatenate([[0.0], transfer[:-1]]))
    late = np.flatnonzero((arrives > due + speed.step_s) & (first_step + first >= 1))  # to a step, as `line_uses` is
    return int(first_step + first[late[0]]) if len(late) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices of an object store, as in a file of prices."""

    per_1000_gets: float
    per_gb_out: float  # of 10^9 bytes
    currency: str


def read_prices(path: Path) -> Prices:
    """Read a file of prices: TOML, or JSON by its name.

    Raises:
        UsageError: if it cannot be read, or is not such a file.
    """
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        prices = decode(Prices, found, "prices")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; name a file of prices with --prices") from error
    except (ValueError, TypedJsonError) as error:
        raise UsageError(f"{path} is not a file of prices: {error}; expected per_1000_gets, per_gb_out and currency") from error
    if not (0 <= prices.per_1000_gets < math.inf and 0 <= prices.per_gb_out < math.inf):
        raise UsageError(f"{path} has a price that is not a number of 0 or more")
    return prices


_BANDWIDTH = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([KMGT]?)(bit|B|iB)(?:/s)?")


def parse_bandwidth(text: str, option: str) -> float:
    """Return the bytes per second of a text such as `10Gbit` or `1.2GB`.

    Raises:
        UsageError: if the text is not a bandwidth above 0.

    >>> parse_bandwidth("10Gbit", "--bandwidth"), parse_bandwidth("1.5 MiB/s", "--bandwidth")
    (1250000000.0, 1572864.0)
    """
    match = _BANDWIDTH.fullmatch(text.strip())
    value = 0.0
    if match is not None:
        base = 1024 if match[3] == "iB" else 1000
        value = float(match[1]) * base ** " KMGT".index(match[2] or " ") / (8 if match[3] == "bit" else 1)
    if value <= 0:
        raise UsageError(f"{option} is {text!r:.40}, expected a bandwidth above 0, such as 10Gbit or 1.2GB")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochBill:
    """Requests and bytes of all machines in one epoch."""

    epoch: int
    gets: int
    store_bytes: int  # fetched from the store
    cache_bytes: int  # of lines that the caches had when the epoch began
    times_store: float  # `store_bytes` by the bytes of the store's lines that any machine reads
    ring_bytes: int  # the most that the lines in use, but not pinned, have at once on one machine
    is_least: bool  # the ring has less than 1.5 of that: lines are fetched again, and the other figures are lower bounds
    cost: float | None
    waits_at: int | None  # the first step that waits on any machine; the run's first step always does, and is not counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """The bill of the first epochs."""

    machines: int
    lanes: int
    cache_bytes: int  # of each machine
    ring_bytes: int  # of that: never pinned
    read_bytes: int  # of the lines that any machine reads
    epochs: tuple[EpochBill, ...]
    is_timed: bool  # a bandwidth and the time of a step were given
    currency: str | None
    smallest_cache_bytes: int  # by which the ring is large enough and, with a bandwidth, no step waits after the first epoch
    assumed: tuple[str, ...]


def make_bill(
    lines: LineUses,
    plan: Plan,
    *,
    machines: int,
    epochs: int,
    cache_bytes: int,
    speed: Speed | None = None,
    prices: Prices | None = None,
    lines_per_get: int = 1,
    kept_bytes: int = 0,
    ring_of: Callable[[int], int] = ring_share,
) -> Bill:
    """Return what `machines` fetch and keep in the first epochs, each with a cache of `cache_bytes`.

    `ring_of` returns the share of a cache's bytes that is never pinned. `kept_bytes` are those of files that it holds whole.
    """
    uses = [[lines.of(machine, epoch) for epoch in range(epochs)] for machine in range(machines)]
    steps = [plan.steps_before(epoch) for epoch in range(epochs + 1)]

    def run(cache: int) -> list[list[Fetched]]:
        own = max(0, cache - kept_bytes)
        caches = [MachineCache(lines.num_bytes, lines.shard, own, min(own, ring_of(cache))) for _ in range(machines)]
        return [
            [
                one.run(use, speed, lines_per_get=lines_per_get, first_step=begin, num_steps=end - begin)
                for use, (begin, end) in zip(own, pairwise(steps), strict=True)
            ]
            for one, own in zip(caches, uses, strict=True)
        ]

    def suffices(cache: int) -> bool:
        found = run(cache)
        is_held = all(one.ring_bytes * RING_OF_USE <= ring_of(cache) for own in found for one in own)
        return is_held and all(one.waits_at is None for own in found for one in own[1:])

    read = np.unique(np.concatenate([use.line for own in uses for use in own]))
    read_bytes = int(lines.num_bytes[read].sum())
    found = run(cache_bytes)
    return Bill(
        machines=machines,
        lanes=plan.lanes,
        cache_bytes=cache_bytes,
        ring_bytes=ring_of(cache_bytes),
        read_bytes=read_bytes,
        epochs=tuple(
            _epoch_bill(epoch, [own[epoch] for own in found], read_bytes, ring_of(cache_bytes), prices)
            for epoch in range(epochs)
        ),
        is_timed=speed is not None,
        currency=None if prices is None else prices.currency,
        smallest_cache_bytes=_smallest(suffices, cache_for(read_bytes + kept_bytes)),
        assumed=tuple(
            line.format(lines_per_get=f"up to {lines_per_get} neighbouring lines" if lines_per_get > 1 else "one line")
            for line in ASSUMED
        ),
    )


def _epoch_bill(epoch: int, found: Sequence[Fetched], read_bytes: int, ring_bytes: int, prices: Prices | None) -> EpochBill:
    gets, num_bytes = sum(one.gets for one in found), sum(one.store_bytes for one in found)
    waits = [one.waits_at for one in found if one.waits_at is not None]
    most = max(one.ring_bytes for one in found)
    return EpochBill(
        epoch=epoch,
        gets=gets,
        store_bytes=num_bytes,
        cache_bytes=sum(one.cache_bytes for one in found),
        times_store=num_bytes / max(1, read_bytes),
        ring_bytes=most,
        is_least=most * RING_OF_USE > ring_bytes,
        cost=None if prices is None else gets / 1000 * prices.per_1000_gets + num_bytes / 1e9 * prices.per_gb_out,
        waits_at=min(waits, default=None),
    )


def _smallest(suffices: Callable[[int], bool], high: int) -> int:
    """Return the smallest cache that suffices, to a hundredth, rounded up; one of `high` bytes holds everything."""
    low = 0
    while high - low > max(1, int(_CLOSE * high)):
        middle = (low + high) // 2
        if suffices(middle):
            high = middle
        else:
            low = middle
    return max(high, LEAST_BYTES)
