"""The lines that each machine reads by `shuffle=lines`, and when: 8 MiB pieces of the shards' files, by epoch and step.

Only the plan, the manifest and the extents are read. It is arithmetic over windows, not over rows, and takes for granted that
all rows of a window are needed from its first step to its last, that a block is read whole, and that the captions of rows are
near them in the file, in the same order.

Letters: B given blocks or runs of rows, N uses of lines.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from bucketline.errors import PlanError, UsageError
from bucketline.loader.config import Remainder, Shuffle
from bucketline.store.format.columns import RAGGED_PREFIX, stored_name
from bucketline.store.format.hashing import LINE_BYTES
from bucketline.store.format.text_block import TEXT_GROUP

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from bucketline.loader.plan.lanes import Reads
    from bucketline.loader.plan.plan import Plan
    from bucketline.store import Bucket
    from bucketline.store.read.store import OpenShards
    from bucketline.store.shard.row_locator import Blocks


def groups_read(store: OpenShards, ragged: Sequence[str], roles: Sequence[str] = ()) -> tuple[str, ...]:
    """Return what is read with rows: the captions, the named ragged groups, and those of the columns that were added.

    Raises:
        UsageError: if the store has no such group.
    """
    if unknown := [name for name in ragged if name not in store.ragged]:
        raise UsageError(f"{store.where} has no ragged group {unknown[0]!r:.80}, expected some of {list(store.ragged)}")
    added = [name for name in map(stored_name, roles) if name in store.added]
    return (TEXT_GROUP, *(RAGGED_PREFIX + name for name in ragged), *added)


@dataclass(frozen=True, slots=True, kw_only=True)
class Uses:
    """When one machine uses which lines in one epoch: `[N]` each, sorted by line, then by first step.

    A line has several if its rows are read at times that do not overlap.
    """

    line: NDArray[np.int64]  # number among the store's lines, shard after shard
    first: NDArray[np.float64]  # step, counted from the start of the run
    last: NDArray[np.float64]

    def events(self) -> NDArray[np.int64]:
        """Return the beginnings of uses, by their numbers, and their ends, by these plus N, in order of time: `[2 N]`.

        Where a window ends and the next begins in one step, ends come first: its lines give way, as they were used before.
        """
        is_end = np.repeat([0, 1], len(self.line))
        return np.lexsort((1 - is_end, np.concatenate([self.first, np.maximum(self.last, self.first + 0.5)])))

    def joined(self, apart: float) -> Uses:
        """Return the uses with those of one line joined that are at most so many steps apart."""
        return _merge(self.line, self.first, self.last, apart)

    def most_at_once(self, num_bytes: NDArray[np.int64]) -> int:
        """Return the most bytes of lines that are in use at the same time; `num_bytes`: of each use's line, `[N]`."""
        return int(np.cumsum(np.concatenate([num_bytes, -num_bytes])[self.events()]).max(initial=0))


class LineUses:
    """The lines that each machine uses, by epoch."""

    def __init__(
        self,
        store: OpenShards,
        plan: Plan,
        split: str,
        machines: int,
        *,
        groups: Sequence[str] = (TEXT_GROUP,),
        line_bytes: int = LINE_BYTES,
        most_shards: int | None = None,
    ) -> None:
        """Read the extents of all shards. `groups`: what is read with rows (`groups_read`).

        `most_shards`: if the machines have more each, know only the uses of the first part of an epoch in which the first one
        reads about as many, of buckets of more than a batch, and read only the extents of these.

        Raises:
            PlanError: if the plan has no lanes, or the machines do not divide them.
        """
        if plan.shuffle is not Shuffle.LINES:
            raise PlanError(f"only the order by lines has a bill, and the plan's shuffle is {plan.shuffle}")
        if plan.lanes % machines:
            raise PlanError(f"{machines} machines do not divide {plan.lanes} lanes; expected a divisor, or as many lanes")
        self._plan, self._machines, self._line_bytes = plan, machines, line_bytes
        self._buckets = store.buckets(split)
        self.part = 1.0  # of an epoch that is known
        self._is_known: NDArray[np.bool_] | None = None  # by shard; None: all are
        if most_shards is not None and len(store.shards) > most_shards * machines:
            self.part = most_shards * machines / len(store.shards)
            self._is_known = np.zeros(len(store.shards), dtype=bool)
            self._runs = [(np.cumsum(num_rows), shard) for shard, _, num_rows in (one.runs() for one in self._buckets)]
            for bucket, number, lane in self._parts(0, 0):
                self._is_known[self._shards_of(bucket, self._reads(bucket, number, lane, 0)[0].first_row)] = True
        shards = None if self._is_known is None else np.flatnonzero(self._is_known)
        sizes = np.array([file.entry.lmdb.num_bytes for file in store.files], dtype=np.int64)
        num_lines = -(-sizes // line_bytes)
        self.first_line = np.cumsum(num_lines) - num_lines  # by file: number of its first line
        self.num_bytes = np.full(int(num_lines.sum()), line_bytes, dtype=np.int64)  # by line
        self.num_bytes[self.first_line + num_lines - 1] = sizes - (num_lines - 1) * line_bytes
        self.shard = np.repeat(np.arange(len(sizes)), num_lines)  # by line
        self._blocks = [_BucketBlocks(store, bucket, shards) for bucket in self._buckets]
        self._lines = _lines_by_block(store, self._blocks, groups, shards, self.first_line, len(self.num_bytes), line_bytes)

    def with_window(self, window_rows: int) -> LineUses:
        """Return the uses by the same plan with another window."""
        other = copy(self)
        other._plan = replace(self._plan, shuffle_window=window_rows)
        return other

    def of(self, machine: int, epoch: int) -> Uses:
        """Return the lines that a machine uses in an epoch."""
        parts = [self._of_pass(*part, epoch) for part in self._parts(machine, epoch)]
        empty = np.empty(0)
        line, first, last = map(np.concatenate, zip(*parts, strict=True)) if parts else (empty.astype(np.int64), empty, empty)
        return _merge(line, first, last)

    def _parts(self, machine: int, epoch: int) -> list[tuple[int, int, int]]:
        """Return what a machine reads in an epoch: (bucket, pass, lane) each."""
        per_machine, is_small = self._plan.lanes // self._machines, self._plan.lane_order.is_small
        return [
            (bucket, number, lane)
            for bucket in range(len(self._buckets))
            if self._is_known is None or not is_small[bucket]
            for number in self._passes(bucket, epoch)
            for lane in range(machine * per_machine, (machine + 1) * per_machine)
        ]

    def _shards_of(self, bucket: int, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        ends, shard = self._runs[bucket]
        return shard[np.searchsorted(ends, rows, side="right")]

    def _passes(self, bucket: int, epoch: int) -> range:
        """Return the passes that the batches of an epoch read: with `carry` more than one, if a batch spans them."""
        plan, own = self._plan, self._plan.buckets[bucket]
        before, after = (plan.batches_before(own, at) for at in (epoch, epoch + 1))
        if before == after:
            return range(0)
        if plan.remainder is not Remainder.CARRY:
            return range(epoch, epoch + 1)
        return range(before * own.global_batch // own.num_rows, (after * own.global_batch - 1) // own.num_rows + 1)

    def _of_pass(
        self, bucket: int, number: int, lane: int, epoch: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
        reads, begin, end = self._reads(bucket, number, lane, epoch)
        owner, block = self._blocks[bucket].of_rows(reads.first_row, reads.num_rows)
        use, line = self._lines[bucket].of(block)
        return line, begin[owner][use], end[owner][use]

    def _reads(self, bucket: int, number: int, lane: int, epoch: int) -> tuple[Reads, NDArray[np.float64], NDArray[np.float64]]:
        """Return what a lane reads of a bucket in a pass and an epoch, and each read's first and last step, `[N]`."""
        plan, order, own = self._plan, self._plan.lane_order, self._plan.buckets[bucket]
        before, after = (plan.batches_before(own, at) for at in (epoch, epoch + 1))
        carries = plan.remainder is Remainder.CARRY
        first_batch = number * own.num_rows // own.global_batch if carries else before
        reads = order.reads(bucket, number, lane)
        begin = first_batch + order.batch_of(bucket, number, lane, reads.begin)
        end = first_batch + order.batch_of(bucket, number, lane, reads.end - 1)
        # Two batches of a rare bucket may be far apart, and hardly a line has rows in both: take the one with more of them.
        middle = first_batch + order.batch_of(bucket, number, lane, (reads.begin + reads.end - 1) // 2)
        begin, end = (np.where(end - begin <= 1, middle, one) for one in (begin, end))
        is_read = (end >= before) & (begin < after)
        first_step, num_steps = plan.steps_before(epoch), plan.steps_before(epoch + 1) - plan.steps_before(epoch)

        def step_of(batch: NDArray[np.int64]) -> NDArray[np.float64]:
            """Return about when a batch comes: those of a bucket are spread evenly over the epoch."""
            place = (np.clip(batch, before, after - 1) - before).astype(np.float64)
            return first_step + (place + 0.5) * (num_steps / (after - before))

        first, last = step_of(begin), step_of(end)
        if self._is_known is not None:
            is_read &= first < first_step + self.part * num_steps
            if self._is_known.any():
                is_read &= self._is_known[self._shards_of(bucket, reads.first_row)]
        return reads.at(is_read), first[is_read], last[is_read]


class _BucketBlocks:
    """A bucket's blocks, found by rows."""

    def __init__(self, store: OpenShards, bucket: Bucket, shards: NDArray[np.int64] | None) -> None:
        self.bucket, self.blocks = bucket, store.table.every_block(bucket.name, shards)
        rows = np.array([g.rows if (g := one.entry.groups.get(bucket.name)) else 0 for one in store.shards], dtype=np.int64)
        self._base = np.cumsum(rows) - rows  # by shard
        self._keys = self._base[self.blocks.shard] + self.blocks.first_row

    def of_rows(self, first: NDArray[np.int64], count: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the blocks of runs of rows, each in one shard, `[B]`: (index of the run, index of the block), `[N]` each."""
        low, high = (self._block_of(rows) for rows in (first, first + count - 1))
        return _expand(low, high + 1)

    def _block_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        located = self.bucket.locate(rows)
        found: NDArray[np.int64] = np.searchsorted(self._keys, self._base[located.shard] + located.row, side="right") - 1
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _BlockLines:
    """The lines of blocks and of their rows' captions, as ranges: one block's are from `starts[n]` to `starts[n + 1]`."""

    starts: NDArray[np.int64]
    line: NDArray[np.int64]

    def of(self, block: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the lines of blocks, `[B]`: (index in `block`, line), `[N]` each."""
        owner, at = _expand(self.starts[block], self.starts[block + 1])
        return owner, self.line[at]


def _lines_by_block(
    store: OpenShards,
    buckets: Sequence[_BucketBlocks],
    groups: Sequence[str],
    shards: NDArray[np.int64] | None,
    first_line: NDArray[np.int64],
    num_lines: int,
    line_bytes: int,
) -> list[_BlockLines]:
    """Return each bucket's lines: of its blocks, and of the entries of `groups`, such as captions, that their rows refer to.

    Added columns are among `groups`; their blocks are those of the same rows.

    A shard's file has a bucket after the other, and entries in the order in which rows were added. Rows of all buckets are
    taken to come evenly in it, so that a block has its place among its bucket's rows and its entries theirs among all.
    """
    held = {one.bucket.name: one.blocks for one in buckets}
    every = [held.get(bucket.name) or store.table.every_block(bucket.name, shards) for bucket in store.buckets()]
    shard, first, rows = (np.concatenate([getattr(one, name) for one in every]) for name in ("shard", "first_row", "rows"))
    bucket = np.repeat(np.arange(len(every)), [len(one.shard) for one in every])
    of_bucket = np.bincount(bucket * len(store.shards) + shard, rows, minlength=len(every) * len(store.shards))
    total = of_bucket[bucket * len(store.shards) + shard]
    places = [first / total, (first + rows) / total]  # among the bucket's rows in the shard, from 0 to 1
    entries, added = ([group for group in groups if (group in store.added) is is_added] for is_added in (False, True))
    ranges = [_entry_lines(store, group, shards, shard, places, first_line, line_bytes) for group in entries]
    result, at = [], 0
    for name, blocks in zip((bucket.name for bucket in store.buckets()), every, strict=True):
        own = slice(at, at := at + len(blocks.shard))
        if not any(blocks is one.blocks for one in buckets):
            continue
        found = [_expand(*_lines(blocks.shard, blocks.offset, blocks.length, first_line, line_bytes))]
        for low, high, begin, end in ranges:
            owner, number = _expand(low[own], high[own])
            again, line = _expand(begin[number], end[number])
            found.append((owner[again], line))
        found += [_added_lines(store, column, name, blocks, first_line, line_bytes) for column in added]
        # a row's caption may be in a line of the row's own block
        codes = np.unique(np.concatenate([block * num_lines + line for block, line in found]))
        block, line = np.divmod(codes, num_lines)
        starts = np.searchsorted(block, np.arange(len(blocks.shard) + 1))
        result.append(_BlockLines(starts=starts, line=line))
    return result


def _added_lines(
    store: OpenShards, column: str, bucket: str, blocks: Blocks, first_line: NDArray[np.int64], line_bytes: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the lines of an added column's values of blocks of rows: (index of the block, line), `[N]` each."""
    file = store.added[column].shard[blocks.shard]
    has = np.flatnonzero(file >= 0)
    file, first = file[has], blocks.first_row[has]
    begin, end = (store.table.find(bucket, file, rows) for rows in (first, first + blocks.rows[has] - 1))
    low, _ = _lines(file, begin.offset, begin.length, first_line, line_bytes)
    _, high = _lines(file, end.offset, end.length, first_line, line_bytes)
    owner, line = _expand(low, high)
    return has[owner], line


def _entry_lines(
    store: OpenShards,
    group: str,
    shards: NDArray[np.int64] | None,
    shard: NDArray[np.int64],
    places: Sequence[NDArray[np.float64]],
    first_line: NDArray[np.int64],
    line_bytes: int,
) -> tuple[NDArray[np.int64], ...]:
    """Return the range of a group's blocks that each block of rows refers to, and the range of lines of each of them."""
    blocks = store.table.every_block(group, shards)
    entries = np.array(
        [one.entry.groups[group].rows if group in one.entry.groups else 0 for one in store.shards], dtype=np.int64
    )
    base = np.cumsum(entries) - entries
    keys = base[blocks.shard] + blocks.first_row
    first = (places[0] * entries[shard]).astype(np.int64)
    last = np.maximum(first, np.ceil(places[1] * entries[shard]).astype(np.int64) - 1)
    low = np.searchsorted(keys, base[shard] + first, side="right") - 1
    high = np.searchsorted(keys, base[shard] + np.minimum(last, entries[shard] - 1), side="right")
    return (low, np.maximum(low, high), *_lines(blocks.shard, blocks.offset, blocks.length, first_line, line_bytes))


def _lines(
    shard: NDArray[np.int64],
    offset: NDArray[np.int64],
    length: NDArray[np.int64],
    first_line: NDArray[np.int64],
    line_bytes: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the lines of byte ranges: (first, behind the last)."""
    return first_line[shard] + offset // line_bytes, first_line[shard] + (offset + np.maximum(length, 1) - 1) // line_bytes + 1


def _expand(low: NDArray[np.int64], high: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return every number of ranges: (index of the range, number).

    >>> [values.tolist() for values in _expand(np.array([3, 7]), np.array([5, 8]))]
    [[0, 0, 1], [3, 4, 7]]
    """
    count = high - low
    owner = np.repeat(np.arange(len(low)), count)
    return owner, np.arange(len(owner)) + (low - (np.cumsum(count) - count))[owner]


def _merge(line: NDArray[np.int64], first: NDArray[np.float64], last: NDArray[np.float64], apart: float = 1.0) -> Uses:
    """Join uses of one line that overlap, or are at most so many steps apart."""
    if len(line) == 0:
        return Uses(line=line, first=first, last=last)
    order = np.lexsort((first, line))
    line, first, last = line[order], first[order], last[order]
    span = float(last.max()) + 1.0 + apart
    until = np.maximum.accumulate(last + line * span) - line * span  # the last step of the line's uses so far
    is_new = np.concatenate([[True], (line[1:] != line[:-1]) | (first[1:] > until[:-1] + apart)])
    begin = np.flatnonzero(is_new)
    ends = np.append(begin[1:], len(line)) - 1
    return Uses(line=line[begin], first=first[begin], last=until[ends])
