"""Windows of some rows: whole shards are dealt to lanes, and each lane mixes the rows of a few of its shards at a time.

A store that is read over a network is fetched in lines, 8 MiB of a shard's file. This order lets one machine fetch a line, once
an epoch, and need in each epoch what it has kept from the last one.

- A global batch of G positions has G / L for each of the L lanes, one lane after the other; ranks take consecutive positions,
  so M machines that divide L take whole lanes.
- The shards are put in an order that only the seed decides. Lane l reads the bucket's rows in this order from where lane l - 1
  ends: the number of its positions in a pass has a closed form. So a lane keeps its shards, up to those at its two ends.
- In each pass a lane visits its shards in a new order, `SHARDS_AT_ONCE` or more at a time (a group). All buckets share these
  groups, and their batches take turns, so that they read the same part of the same shards.
- A group is read in windows. Window j of q mixes, by a keyed bijection, one of q equal parts of every shard of the group. q is
  the same for all buckets; a window of all of them has about `window_rows` rows.
- A shard's parts begin at a row that a key of pass and shard decides, and go around: the rows before it come last. So windows
  differ from pass to pass, also of a lane that has no other shards to combine them with.

Only live row counts by shard are used, which the manifest has: no sidecar is read. A shard that a mixture repeats counts as
several, which are neighbours when they are dealt and apart when they are visited. Of a store of which a pass reads a share, the
runs are those of its first pass; in the others the rows of a run are as many that follow later (`shares`).

Letters: n rows of a bucket, G its global batch, L lanes, h = G / L, S shards of a bucket, U of all buckets, K of a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bucketline.loader.config import SHARDS_AT_ONCE
from bucketline.loader.plan.permutation import extend_key, key_of, mix, permute_all

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

_DEAL, _VISIT, _MIX, _TURN = 4, 5, 6, 7  # purposes of keys; the plan uses 1 and 2, draws use 3
TURNS = 8  # places in a part at which a shard may begin; with one, a lane of a single shard would have the same windows again


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive positions within one pass of one bucket."""

    n: int
    key: int  # of the pass
    first: int  # position in the pass
    count: int
    bucket: int  # index in the plan's list
    number: int  # of the pass


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardRuns:
    """How a bucket's rows are spread over shards: runs of consecutive row numbers, each in one shard."""

    shard: NDArray[np.int64]  # [S] ordinal of the shard
    repeat: NDArray[np.int64]  # [S] how often the shard has come before, in a mixture that repeats it
    num_rows: NDArray[np.int64]  # [S] 1 or more each


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Dealt:
    """A bucket's runs in the order in which they are dealt to lanes."""

    unit: NDArray[np.int64]  # [S] the shard's place in that order, over all buckets; ascending
    first_row: NDArray[np.int64]  # [S]
    starts: NDArray[np.int64]  # [S] rows before the run, in this order
    ends: NDArray[np.int64]  # [S]


@dataclass(frozen=True, slots=True, eq=False)
class _LaneWindow:
    """Rows of one bucket that one lane mixes: runs of consecutive rows, at most two of each shard of a group."""

    begin: int  # index of its first position in the lane
    end: int
    starts: NDArray[np.int64]  # [R] rows of the runs before each run
    shift: NDArray[np.int64]  # [R] row number of a run's first row, less `starts`
    key: int


class Lanes:
    """The rows at the positions of passes, for one seed and number of lanes."""

    def __init__(
        self,
        *,
        seed: int,
        lanes: int,
        window_rows: int,
        carries: bool,
        sizes: Sequence[tuple[int, int]],
        runs: Sequence[ShardRuns],
    ) -> None:
        """Deal the shards. `sizes`: each bucket's rows and global batch. `carries`: a pass begins where the last one ended."""
        self.seed, self.window_rows = seed, window_rows
        self._lanes, self._carries = lanes, carries
        self._sizes = tuple(sizes)
        # A bucket of at most a batch may read many passes at once, and they fill no window: it takes no part in the groups.
        self.is_small = [n <= size for n, size in self._sizes]
        stride = 1 + max(int(one.repeat.max()) for one in runs)
        codes = [one.shard * stride + one.repeat for one in runs]
        units = np.unique(np.concatenate(codes))
        hashed = mix((units // stride).astype(np.uint64) ^ np.uint64(key_of(seed, _DEAL)))
        places = np.empty(len(units), dtype=np.int64)
        places[np.lexsort((units % stride, hashed))] = np.arange(len(units))
        self.num_units = len(units)
        self._buckets = [_deal(one, places[np.searchsorted(units, own)]) for one, own in zip(runs, codes, strict=True)]
        self._passes: dict[tuple[int, int], LanePass] = {}
        self._last: dict[tuple[int, int], tuple[int, _LaneWindow]] = {}

    def lane_pass(self, number: int, lane: int) -> LanePass:
        """Return the rows that a lane reads in a pass."""
        if (found := self._passes.get((number, lane))) is None:
            for old in [at for at in list(self._passes) if abs(at[0] - number) > 1]:
                self._passes.pop(old, None)
            found = self._passes[number, lane] = LanePass(self, number, lane)
        return found

    def offset(self, bucket: int, number: int) -> int:
        """Return the place of a pass's first position in a global batch."""
        n, size = self._sizes[bucket]
        return number * n % size if self._carries else 0

    def cut(self, bucket: int, number: int, lane: int) -> int:
        """Return the number of a pass's positions that the lanes before `lane` have."""
        n, size = self._sizes[bucket]
        begin, low = self.offset(bucket, number), size // self._lanes * lane
        end = begin + n
        return end // size * low + min(end % size, low) - min(begin, low)

    def owned(self, bucket: int, number: int, lane: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return a lane's runs of a bucket in a pass: (unit, first row, number of rows), `[S]` each, in dealt order."""
        dealt = self._buckets[bucket]
        low, high = self.cut(bucket, number, lane), self.cut(bucket, number, lane + 1)
        begin = int(np.searchsorted(dealt.ends, low, side="right"))
        end = begin if low == high else int(np.searchsorted(dealt.ends, high, side="left")) + 1
        starts, ends = dealt.starts[begin:end], dealt.ends[begin:end]
        inner = np.maximum(starts, low)
        return dealt.unit[begin:end], dealt.first_row[begin:end] + inner - starts, np.minimum(ends, high) - inner

    def rows_of(self, spans: Sequence[Span]) -> NDArray[np.int64]:
        """Return the rows at the spans' positions, one span after the other."""
        parts, windows, base, bases = [], [], 0, []  # by window that a span touches
        for span in spans:
            for lane, begin, count in self._lane_runs(span):
                index, end = begin, begin + count
                while index < end:
                    window = self._window(span, lane, index)
                    until, size = min(end, window.end), window.end - window.begin
                    parts.append((np.arange(index - window.begin, until - window.begin), size, window.key))
                    windows.append(window)
                    bases.append(base)
                    base += size
                    index = until
        offsets = np.array(bases, dtype=np.int64)
        values = permute_all(parts) + np.repeat(offsets, [len(index) for index, _, _ in parts])
        starts = np.concatenate([window.starts for window in windows])
        shifts = np.concatenate([window.shift for window in windows])
        base_of = np.repeat(offsets, [len(window.starts) for window in windows])
        return values + (shifts - base_of)[np.searchsorted(starts + base_of, values, side="right") - 1]

    def _lane_runs(self, span: Span) -> Iterator[tuple[int, int, int]]:
        """Yield (lane, index in the lane's part of the pass, count) of a span's positions."""
        size = self._sizes[span.bucket][1]
        share, begin = size // self._lanes, self.offset(span.bucket, span.number)
        at, end = begin + span.first, begin + span.first + span.count
        while at < end:
            of_batch, within = divmod(at, size)
            lane, in_lane = divmod(within, share)
            count = min(end - at, share - in_lane)
            yield lane, of_batch * share + in_lane - min(max(begin - lane * share, 0), share), count
            at += count

    def _window(self, span: Span, lane: int, index: int) -> _LaneWindow:
        """Return the window that holds an index of the lane's part of the pass."""
        at = (span.bucket, lane)
        last = self._last.get(at)
        if last is not None and last[0] == span.number and last[1].begin <= index < last[1].end:
            return last[1]
        if self.is_small[span.bucket]:
            window = self._whole(span, lane)
        else:
            window = self.lane_pass(span.number, lane).window(span.bucket, index, span.key)
        self._last[at] = (span.number, window)
        return window

    def _whole(self, span: Span, lane: int) -> _LaneWindow:
        """Return the one window of a small bucket: the rows that the lane has in the pass."""
        _, first_row, count = self.owned(span.bucket, span.number, lane)
        starts = np.cumsum(count) - count
        key = extend_key(extend_key(span.key, _MIX), lane)
        return _LaneWindow(begin=0, end=int(count.sum()), starts=starts, shift=first_row - starts, key=key)


class LanePass:
    """The rows that one lane reads in one pass: its shards in the order of their visits, cut into groups and windows."""

    def __init__(self, lanes: Lanes, number: int, lane: int) -> None:
        self._lanes, self._number, self._lane = lanes, number, lane
        rows = np.zeros(lanes.num_units, dtype=np.int64)
        for bucket in np.flatnonzero(~np.array(lanes.is_small)).tolist():
            unit, _, count = lanes.owned(bucket, number, lane)
            rows[unit] += count
        units = np.flatnonzero(rows)
        key = np.uint64(key_of(lanes.seed, _VISIT, number))
        units = units[np.argsort(mix(units.astype(np.uint64) ^ key))]
        self._turns = mix(units.astype(np.uint64) ^ np.uint64(key_of(lanes.seed, _TURN, number)))  # of each that is visited
        self.num_groups = max(1, min(len(units) // SHARDS_AT_ONCE, int(rows.sum()) // lanes.window_rows))
        group = np.arange(len(units)) * self.num_groups // max(1, len(units))
        of_group = np.bincount(group, rows[units], minlength=self.num_groups).astype(np.int64)
        self.num_windows = np.maximum(1, -(-of_group // lanes.window_rows))  # [groups] of each group
        self._place = np.full(lanes.num_units, -1, dtype=np.int64)  # [U] of a shard among the visited
        self._place[units] = np.arange(len(units))
        self._group_ends = np.searchsorted(group, np.arange(self.num_groups), side="right")
        self._runs: dict[int, _Runs] = {}

    def runs(self, bucket: int) -> _Runs:
        """Return the lane's runs of a bucket."""
        if (found := self._runs.get(bucket)) is None:
            unit, first_row, count = self._lanes.owned(bucket, self._number, self._lane)
            place = self._place[unit]
            order = np.argsort(place)
            group_ends = np.searchsorted(place[order], self._group_ends, side="left")
            group = np.searchsorted(group_ends, np.arange(len(order)), side="right")
            turns = self._turns[place[order]] % (self.num_windows[group] * TURNS).astype(np.uint64)
            found = self._runs[bucket] = _Runs(
                first_row=first_row[order],
                num_rows=count[order],
                turn=turns.astype(np.int64),
                group_ends=group_ends,
                row_ends=np.concatenate([[0], np.cumsum(count[order])])[group_ends],
            )
        return found

    def window(self, bucket: int, index: int, pass_key: int) -> _LaneWindow:
        """Return the window that holds an index of the lane's part of the pass."""
        runs = self.runs(bucket)
        group = self._group(runs, int(np.searchsorted(runs.row_ends, index, side="right")))
        first, past = 0, group.num_windows
        while past - first > 1:  # by bisection, the last window that begins at or before the index
            middle = (first + past) // 2
            if int((group.edges(middle) - group.edges(0)).sum()) <= index - group.before:
                first = middle
            else:
                past = middle
        begins, ends = group.edges(first), group.edges(first + 1)
        begin = group.before + int((begins - group.edges(0)).sum())
        first_row, count = group.stretches(begins, ends)
        starts = np.cumsum(count) - count
        return _LaneWindow(
            begin=begin,
            end=begin + int(count.sum()),
            starts=starts,
            shift=first_row - starts,
            key=extend_key(extend_key(extend_key(extend_key(pass_key, _MIX), self._lane), group.number), first),
        )

    def _group(self, runs: _Runs, number: int) -> _LaneBucket:
        low, high = (int(runs.group_ends[number - 1]) if number else 0), int(runs.group_ends[number])
        return _LaneBucket(
            number=number,
            num_windows=int(self.num_windows[number]),
            before=int(runs.row_ends[number - 1]) if number else 0,
            first_row=runs.first_row[low:high],
            num_rows=runs.num_rows[low:high],
            turn=runs.turn[low:high],
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Runs:
    """A bucket's runs of one lane and pass, in the order in which their shards are visited."""

    first_row: NDArray[np.int64]  # [S]
    num_rows: NDArray[np.int64]  # [S]
    turn: NDArray[np.int64]  # [S] where its first part begins, in parts / `TURNS`
    group_ends: NDArray[np.int64]  # [groups] number of runs up to and including each group's
    row_ends: NDArray[np.int64]  # [groups] likewise, of rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _LaneBucket:
    """A bucket's runs of the shards that are read at a time."""

    number: int
    num_windows: int
    before: int  # index of its first position in the lane
    first_row: NDArray[np.int64]  # [K]
    num_rows: NDArray[np.int64]  # [K]
    turn: NDArray[np.int64]  # [K]

    def edges(self, window: int) -> NDArray[np.int64]:
        """Return the row of each shard at which a window begins, `[K]`; from `num_rows` on, it has gone around."""
        return cuts(self.num_rows, self.turn + window * TURNS, self.num_windows * TURNS)

    def stretches(self, begin: NDArray[np.int64], end: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (first row, number of rows) of the shards' rows between two edges, `[2 K]`: to their ends, then around."""
        here, there = np.minimum(begin, self.num_rows), np.maximum(begin, self.num_rows)
        first_row = np.concatenate([self.first_row + here, self.first_row + there - self.num_rows])
        count = np.concatenate([np.minimum(end, self.num_rows) - here, np.maximum(end, self.num_rows) - there])
        return first_row, count


def _deal(runs: ShardRuns, places: NDArray[np.int64]) -> _Dealt:
    order = np.argsort(places)
    num_rows = runs.num_rows[order]
    ends = np.cumsum(num_rows)
    return _Dealt(
        unit=places[order],
        first_row=(np.cumsum(runs.num_rows) - runs.num_rows)[order],
        starts=ends - num_rows,
        ends=ends,
    )


def cuts(num_rows: NDArray[np.int64], part: int | NDArray[np.int64], parts: int | NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where part `part` of `parts` of each run begins, `[K]`: `part` x rows / `parts`, rounded to the nearest row.

    Part `parts` + n begins the run's rows after part n.

    >>> [cuts(np.array([10, 1]), part, 4).tolist() for part in range(6)]
    [[0, 0], [3, 0], [5, 1], [8, 1], [10, 1], [13, 1]]
    """
    whole = num_rows // parts
    rest = num_rows - whole * parts
    result: NDArray[np.int64] = whole * part + (2 * part * rest + parts) // (2 * parts)
    return result
