"""Where an epoch's steps are: the bucket of each, and the rows of lanes and windows.

All is computed per step, from only the sizes of the buckets: a machine that has no store and no plan knows the steps, too.

Letters: n rows of a bucket, G its global batch, E the number of epochs if it is finite.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from operator import sub
from typing import TYPE_CHECKING

import numpy as np

from bucketline.command_line import counted
from bucketline.errors import PlanError
from bucketline.forks import cached_property
from bucketline.loader.config import SHARDS_AT_ONCE, Remainder
from bucketline.loader.plan.order import extend_key, key_of, mix, mix_word, permute, permute_all
from bucketline.store.shard.mapped import distinct

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray


_KEPT_EPOCHS = 8  # a window of steps touches two, or more if epochs have very few steps


@dataclass(frozen=True, slots=True)
class Epoch:
    """One epoch's steps and the number of batches in each bucket. With `carry`, an epoch of a few rows may have none."""

    number: int
    first: int  # step
    end: int  # the first step of the next epoch
    before: tuple[int, ...]  # by bucket: its batches in all earlier epochs
    ends: tuple[int, ...]  # by bucket: cumulative batches of this epoch, up to and including the bucket
    padded: tuple[int, ...]  # buckets with one more, padded batch at the end, in the order of these steps

    def batches_at(self, steps: Sequence[int], window: int | None, key: int) -> list[tuple[int, int]]:
        """Return (bucket, batch) for each step: the bucket's index in the plan's list, and the number of its batch.

        `key` is the epoch's.

        Without a window, by a keyed bijection on the epoch's steps, so that any batch may come at any step.

        With one, each bucket's batches come in order, and the buckets take turns as evenly as their counts allow.

        With window 0, all batches of the first bucket in order, then those of the next, sorted by name.

        The padded batches follow all others.
        """
        positions, full = [step - self.first for step in steps], self.ends[-1]
        ordered = iter(self._ordered([position for position in positions if position < full], window, key))
        return [next(ordered) if at < full else self._padded_batch(self.padded[at - full]) for at in positions]

    def _padded_batch(self, bucket: int) -> tuple[int, int]:
        """Return (bucket, batch) of a bucket's padded batch: the one after its last."""
        return bucket, self.before[bucket] + self.ends[bucket] - (self.ends[bucket - 1] if bucket else 0)

    def _ordered(self, positions: list[int], window: int | None, key: int) -> list[tuple[int, int]]:
        if not positions:
            return []
        if window:
            return [self._in_turn(position, key) for position in positions]
        if window is None:
            positions = permute(np.array(positions, dtype=np.int64), self.ends[-1], key).tolist()
        return [self._batch(position) for position in positions]

    def _batch(self, position: int) -> tuple[int, int]:
        bucket = bisect_right(self.ends, position)
        return bucket, self.before[bucket] + position - (self.ends[bucket - 1] if bucket else 0)

    def _in_turn(self, position: int, key: int) -> tuple[int, int]:
        """Walk down a binary tree of the buckets. The left half's batches are spread evenly over a node's `total` batches.

        With a shift s below `total`, floor((k x left + s) / total) of the first k batches belong to the left half. This count
        starts at 0, ends at `left`, and grows by 0 or 1 per step, so each half's batches are numbered without gaps.
        """
        low, high, number = 0, len(self.ends), position
        begin, end = 0, self.ends[-1]  # of the node's batches
        while high - low > 1:
            middle = (low + high) // 2
            split, total = self.ends[middle - 1], end - begin
            shift = mix_word(key ^ mix_word(low << 32 | high)) % total
            of_left = (number * (split - begin) + shift) // total
            if ((number + 1) * (split - begin) + shift) // total > of_left:
                high, end, number = middle, split, of_left
            else:
                low, begin, number = middle, split, number - of_left
        return low, self.before[low] + number


@dataclass(frozen=True, kw_only=True)
class EpochSteps:
    """Number of batches in each epoch.

    With `carry` and E epochs, E n mod G rows of a bucket fill no batch. The last epoch ends with one padded batch for each such
    bucket, after all other steps. So a step before these means the same, whatever E.
    """

    sizes: tuple[tuple[int, int], ...]  # by bucket: rows and global batch
    remainder: Remainder
    epochs: int | None = None  # E; None: endless

    def batches_before(self, epoch: int) -> list[int]:
        """Return the number of each bucket's batches in the epochs before `epoch`, without the padded ones of `carry`."""
        if self.remainder is Remainder.CARRY:
            return [epoch * n // size for n, size in self.sizes]
        return [epoch * per_pass for per_pass in self.per_pass]

    @cached_property
    def per_pass(self) -> list[int]:
        """Return the number of each bucket's batches in a pass; with `carry` a batch may be of two passes."""
        drops = self.remainder is Remainder.DROP
        return [n // size if drops else -(-n // size) for n, size in self.sizes]

    @cached_property
    def padded(self) -> tuple[int, ...]:
        """Return the indices of the buckets that the last epoch completes with a padded batch, in the order of these steps."""
        if self.epochs is None or self.remainder is not Remainder.CARRY:
            return ()
        return tuple(number for number, (n, size) in enumerate(self.sizes) if self.epochs * n % size)

    @cached_property
    def num_steps(self) -> int | None:
        """Return the number of steps in all epochs; None if they are endless."""
        return None if self.epochs is None else self.steps_before(self.epochs) + len(self.padded)

    @cached_property
    def has_steps(self) -> bool:
        """Return True if epochs have steps. With `drop`, they have none if every bucket is smaller than its global batch."""
        return self.remainder is not Remainder.DROP or any(self.per_pass)

    def steps_before(self, epoch: int) -> int:
        """Return the number of steps in the epochs before `epoch`, without the padded ones of `carry`."""
        return sum(self.batches_before(epoch))

    def without_batch(self) -> str:
        """Return a message that says why an epoch has no batch, and what to do."""
        rows, size = max(self.sizes, key=lambda bucket: bucket[0] / bucket[1])
        return (
            f"this epoch has no batch: by remainder='carry' its rows wait until they fill a global batch, which takes {size}, "
            f"and the bucket that is nearest to that has {counted(rows, 'row')}; use a smaller batch, fewer GPUs, or "
            "remainder='partial', or count steps over forever()"
        )

    def span(self, number: int) -> Epoch:
        """Return the steps of an epoch, counted from 0. After the last, one without steps."""
        before, after = self.batches_before(number), self.batches_before(number + 1)
        first, end, padded = sum(before), sum(after), self.padded if number + 1 == self.epochs else ()
        if self.epochs is not None and self.num_steps is not None and number >= self.epochs:
            first = end = self.num_steps
        return Epoch(number, first, end + len(padded), tuple(before), tuple(accumulate(map(sub, after, before))), padded)

    def at(self, step: int) -> Epoch:
        """Return the epoch that has a step: a cached one, the one after a cached one, or the result of a binary search."""
        cached = list(self._known.values())
        for epoch in cached:
            if epoch.first <= step < epoch.end:
                return epoch
        following = (self.span(epoch.number + 1) for epoch in cached if epoch.end == step)
        sought = next((epoch for epoch in following if step < epoch.end), None) or self.span(self.number_at(step))
        if len(self._known) >= _KEPT_EPOCHS:
            self._known.clear()
        self._known[sought.number] = sought
        return sought

    @cached_property
    def _known(self) -> dict[int, Epoch]:
        return {}

    def number_at(self, step: int) -> int:
        """Return the number of the epoch that has a step, by binary search."""
        if not self.has_steps or (self.num_steps is not None and step >= self.num_steps):
            raise PlanError(f"there is no step {step}: the plan has {self.num_steps or 0} steps (epochs={self.epochs})")
        past = 1
        while self.steps_before(past) <= step and past != self.epochs:
            past = min(2 * past, self.epochs or 2 * past)
        first = 0  # steps_before(first) <= step, and `step` is before the end of the epochs before `past`
        while past - first > 1:
            middle = (first + past) // 2
            first, past = (middle, past) if self.steps_before(middle) <= step else (first, middle)
        return first


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """A position among the plan's micro-batches."""

    step: int  # optimizer step of the next micro-batch, from 0
    micro_step: int  # its index within the step, 0 to accumulation - 1
    num_steps: int | None  # the iteration ends before this step; None: endless

    def micro_steps(self, accumulation: int) -> Iterator[tuple[int, int]]:
        """Yield the micro-batches from here to the end: (step, micro step).

        >>> list(Cursor(step=3, micro_step=1, num_steps=5).micro_steps(2))
        [(3, 1), (4, 0), (4, 1)]
        """
        step, micro_step = self.step, self.micro_step
        while self.num_steps is None or step < self.num_steps:
            yield step, micro_step
            micro_step += 1
            if micro_step == accumulation:
                step, micro_step = step + 1, 0

    def after(self, step: int, micro_step: int, accumulation: int) -> Cursor:
        """Return a cursor at the micro-batch that follows this one, with the same end.

        >>> Cursor(step=0, micro_step=0, num_steps=None).after(3, 1, 2)
        Cursor(step=4, micro_step=0, num_steps=None)
        """
        is_last = micro_step + 1 == accumulation
        return Cursor(step=step + is_last, micro_step=0 if is_last else micro_step + 1, num_steps=self.num_steps)


# ----------------------------------------------------------------------------------------------------------------------- lanes
# Windows of some rows: whole shards are dealt to lanes, and each lane mixes the rows of a few of its shards at a time.
#
# A store that is read over a network is fetched in lines, 8 MiB of a shard's file. This order lets one machine fetch a line,
# once an epoch, and need in each epoch what it has kept from the last one.
#
# - A global batch of G positions has G / L for each of the L lanes, one lane after the other; ranks take consecutive
# positions, so M machines that divide L take whole lanes. - The shards are put in an order that only the seed decides. Lane l
# reads the bucket's rows in this order from where lane l - 1 ends: the number of its positions in a pass has a closed form. So
# a lane keeps its shards, up to those at its two ends. - In each pass a lane visits its shards in a new order,
# `SHARDS_AT_ONCE` or more at a time (a group). All buckets share these groups, and their batches take turns, so that they read
# the same part of the same shards. - A group is read in windows. Window j of q mixes, by a keyed bijection, one of q equal
# parts of every shard of the group. q is the same for all buckets; a window of all of them has about `window_rows` rows. - A
# shard's parts begin at a row that a key of pass and shard decides, and go around: the rows before it come last. So windows
# differ from pass to pass, also of a lane that has no other shards to combine them with.
#
# Only live row counts by shard are used, which the manifest has: no sidecar is read. A shard that a mixture repeats counts as
# several, which are neighbours when they are dealt and apart when they are visited. Of a store of which a pass reads a
# fraction, the runs are those of its first pass; in the others the rows of a run are as many that follow later (`parts`).
#
# Letters: n rows of a bucket, G its global batch, L lanes, h = G / L, S shards of a bucket, U of all buckets, K of a group.

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
        stride = 1 + max(int(bucket_runs.repeat.max()) for bucket_runs in runs)
        codes = [bucket_runs.shard * stride + bucket_runs.repeat for bucket_runs in runs]
        units = distinct(np.concatenate(codes))
        hashed = mix((units // stride).astype(np.uint64) ^ np.uint64(key_of(seed, _DEAL)))
        places = np.empty(len(units), dtype=np.int64)
        places[np.lexsort((units % stride, hashed))] = np.arange(len(units))
        self.num_units = len(units)
        dealt = [places[np.searchsorted(units, code)] for code in codes]
        self._buckets = list(map(_deal, runs, dealt))
        self._passes: dict[tuple[int, int], LanePass] = {}
        self._last: dict[tuple[int, int], tuple[int, _LaneWindow]] = {}

    def lane_pass(self, number: int, lane: int) -> LanePass:
        """Return the rows that a lane reads in a pass."""
        if (lane_pass := self._passes.get((number, lane))) is None:
            for old in [at for at in list(self._passes) if abs(at[0] - number) > 1]:
                self._passes.pop(old, None)
            lane_pass = self._passes[number, lane] = LanePass(self, number, lane)
        return lane_pass

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
        per_lane, begin = size // self._lanes, self.offset(span.bucket, span.number)
        at, end = begin + span.first, begin + span.first + span.count
        while at < end:
            of_batch, within = divmod(at, size)
            lane, in_lane = divmod(within, per_lane)
            count = min(end - at, per_lane - in_lane)
            yield lane, of_batch * per_lane + in_lane - min(max(begin - lane * per_lane, 0), per_lane), count
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
        if (runs := self._runs.get(bucket)) is None:
            unit, first_row, count = self._lanes.owned(bucket, self._number, self._lane)
            position = self._place[unit]
            order = np.argsort(position)
            group_ends = np.searchsorted(position[order], self._group_ends, side="left")
            group = np.searchsorted(group_ends, np.arange(len(order)), side="right")
            turns = self._turns[position[order]] % (self.num_windows[group] * TURNS).astype(np.uint64)
            runs = self._runs[bucket] = _Runs(
                first_row=first_row[order],
                num_rows=count[order],
                turn=turns.astype(np.int64),
                group_ends=group_ends,
                row_ends=np.concatenate([[0], np.cumsum(count[order])])[group_ends],
            )
        return runs

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
