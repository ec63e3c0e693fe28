"""The lines that each machine reads by `shuffle=lines`, and when: 8 MiB pieces of the shards' files, by epoch and step.

Only the plan, the manifest and the extents are read. It is arithmetic over windows, not over rows, and takes for granted that
all rows of a window are needed from its first step to its last, that a block is read whole, and that the captions of rows are
near them in the file, in the same order.

Letters: B given blocks or runs of rows, N uses of lines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bucketline.errors import PlanError, UsageError
from bucketline.loader.config import Remainder, Shuffle
from bucketline.store.format.columns import RAGGED_PREFIX
from bucketline.store.format.hashing import LINE_BYTES
from bucketline.store.format.text_block import TEXT_GROUP

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from bucketline.loader.plan.plan import Plan
    from bucketline.store import Bucket
    from bucketline.store.read.store import OpenShards


def groups_of(store: OpenShards, ragged: Sequence[str]) -> tuple[str, ...]:
    """Return the groups of entries that are read with rows: the captions, and the named ragged groups.

    Raises:
        UsageError: if the store has no such group.
    """
    if unknown := [name for name in ragged if name not in store.ragged]:
        raise UsageError(f"{store.where} has no ragged group {unknown[0]!r:.80}, expected some of {list(store.ragged)}")
    return (TEXT_GROUP, *(RAGGED_PREFIX + name for name in ragged))


@dataclass(frozen=True, slots=True, kw_only=True)
class Uses:
    """When one machine uses which lines in one epoch: `[N]` each, sorted by line, then by first step.

    A line has several if its rows are read at times that do not overlap.
    """

    line: NDArray[np.int64]  # number among the store's lines, shard after shard
    first: NDArray[np.float64]  # step, counted from the start of the run
    last: NDArray[np.float64]


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
    ) -> None:
        """Read the extents of all shards. `groups`: those of entries that rows refer to and that are read with them.

        Raises:
            PlanError: if the plan has no lanes, or the machines do not divide them.
        """
        if plan.shuffle is not Shuffle.LINES:
            raise PlanError(f"only the order by lines has a bill, and the plan's shuffle is {plan.shuffle}")
        if plan.lanes % machines:
            raise PlanError(f"{machines} machines do not divide {plan.lanes} lanes; expected a divisor, or as many lanes")
        self._plan, self._machines, self._line_bytes = plan, machines, line_bytes
        self._buckets = store.buckets(split)
        sizes = np.array([shard.entry.lmdb.num_bytes for shard in store.shards], dtype=np.int64)
        num_lines = -(-sizes // line_bytes)
        self.first_line = np.cumsum(num_lines) - num_lines  # by shard: number of its first line
        self.num_bytes = np.full(int(num_lines.sum()), line_bytes, dtype=np.int64)  # by line
        self.num_bytes[self.first_line + num_lines - 1] = sizes - (num_lines - 1) * line_bytes
        self.shard = np.repeat(np.arange(len(sizes)), num_lines)  # by line
        self._blocks = [_BucketBlocks(store, bucket) for bucket in self._buckets]
        self._lines = _lines_by_block(store, self._blocks, groups, self.first_line, len(self.num_bytes), line_bytes)

    def of(self, machine: int, epoch: int) -> Uses:
        """Return the lines that a machine uses in an epoch."""
        per_machine, parts = self._plan.lanes // self._machines, []
        for bucket in range(len(self._buckets)):
            for number in self._passes(bucket, epoch):
                lanes = range(machine * per_machine, (machine + 1) * per_machine)
                parts += [self._of_pass(bucket, number, lane, epoch) for lane in lanes]
        empty = np.empty(0)
        line, first, last = map(np.concatenate, zip(*parts, strict=True)) if parts else (empty.astype(np.int64), empty, empty)
        return _merge(line, first, last)

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
        read = np.flatnonzero((end >= before) & (begin < after))
        first_step, num_steps = plan.steps_before(epoch), plan.steps_before(epoch + 1) - plan.steps_before(epoch)

        def step_of(batch: NDArray[np.int64]) -> NDArray[np.float64]:
            """Return about when a batch comes: those of a bucket are spread evenly over the epoch."""
            place = (np.clip(batch, before, after - 1) - before).astype(np.float64)
            return first_step + (place + 0.5) * (num_steps / (after - before))

        owner, block = self._blocks[bucket].of_rows(reads.first_row[read], reads.num_rows[read])
        use, line = self._lines[bucket].of(block)
        return line, step_of(begin[read])[owner][use], step_of(end[read])[owner][use]


class _BucketBlocks:
    """A bucket's blocks, found by rows."""

    def __init__(self, store: OpenShards, bucket: Bucket) -> None:
        self.bucket, self.blocks = bucket, store.table.every_block(bucket.name)
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
    first_line: NDArray[np.int64],
    num_lines: int,
    line_bytes: int,
) -> list[_BlockLines]:
    """Return each bucket's lines: of its blocks, and of the entries of `groups`, such as captions, that their rows refer to.

    Entries are shared out among the blocks of all buckets, in the order of the file.
    """
    held = {one.bucket.name: one.blocks for one in buckets}
    every = [held.get(bucket.name) or store.table.every_block(bucket.name) for bucket in store.buckets()]
    shard, offset, rows = (np.concatenate([getattr(one, name) for one in every]) for name in ("shard", "offset", "rows"))
    order = np.lexsort((offset, shard))
    ends = np.empty(len(order), dtype=np.int64)  # rows of all shards up to and including the block
    ends[order] = np.cumsum(rows[order])
    of_shard = np.bincount(shard, rows, minlength=len(store.shards)).astype(np.int64)
    before = (np.cumsum(of_shard) - of_shard)[shard]
    places = [(ends - rows - before) / of_shard[shard], (ends - before) / of_shard[shard]]  # in the shard, from 0 to 1
    ranges = [_entry_lines(store, group, shard, places, first_line, line_bytes) for group in groups]
    result, at = [], 0
    for blocks in every:
        own = slice(at, at := at + len(blocks.shard))
        if not any(blocks is one.blocks for one in buckets):
            continue
        found = [_expand(*_lines(blocks.shard, blocks.offset, blocks.length, first_line, line_bytes))]
        for low, high, begin, end in ranges:
            owner, number = _expand(low[own], high[own])
            again, line = _expand(begin[number], end[number])
            found.append((owner[again], line))
        # a row's caption may be in a line of the row's own block
        codes = np.unique(np.concatenate([block * num_lines + line for block, line in found]))
        block, line = np.divmod(codes, num_lines)
        starts = np.searchsorted(block, np.arange(len(blocks.shard) + 1))
        result.append(_BlockLines(starts=starts, line=line))
    return result


def _entry_lines(
    store: OpenShards,
    group: str,
    shard: NDArray[np.int64],
    places: Sequence[NDArray[np.float64]],
    first_line: NDArray[np.int64],
    line_bytes: int,
) -> tuple[NDArray[np.int64], ...]:
    """Return the range of a group's blocks that each block of rows refers to, and the range of lines of each of them."""
    blocks = store.table.every_block(group)
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


def _merge(line: NDArray[np.int64], first: NDArray[np.float64], last: NDArray[np.float64]) -> Uses:
    """Join uses of one line that overlap or touch."""
    if len(line) == 0:
        return Uses(line=line, first=first, last=last)
    order = np.lexsort((first, line))
    line, first, last = line[order], first[order], last[order]
    span = float(last.max()) + 1.0
    until = np.maximum.accumulate(last + line * span) - line * span  # the last step of the line's uses so far
    is_new = np.concatenate([[True], (line[1:] != line[:-1]) | (first[1:] > until[:-1] + 1.0)])
    begin = np.flatnonzero(is_new)
    ends = np.append(begin[1:], len(line)) - 1
    return Uses(line=line[begin], first=first[begin], last=until[ends])
