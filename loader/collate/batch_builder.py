"""Building batches: locate the rows that a rank reads at a step, read ahead, plan the copies, and copy into a pool buffer.

Letters: B rows of a micro-batch, V maximum captions per sample, L tokens (padded).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from bucketline.errors import CorruptError, StoreError
from bucketline.loader.collate.buffer_pool import FilledBuffer
from bucketline.loader.collate.columns import make_conditioning
from bucketline.loader.collate.dequantise_field import dequantise_field
from bucketline.loader.collate.gather import Gather, PlainRead
from bucketline.loader.collate.verify import name_sample, verify_batch
from bucketline.loader.collate.window import SMALL_COLUMNS, CopyPlanner, PendingBatch, Window
from bucketline.loader.plan.rng import keys_of_rows
from bucketline.store.format.block import CAPTIONS
from bucketline.store.format.columns import TOKENS, TOKENS_SCALE
from bucketline.store.read.preadv import FileGather
from bucketline.store.remote.cache.batch_lines import LineTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from bucketline.loader.collate.window import CopyPlan, RaggedRows
    from bucketline.loader.config import LoaderConfig
    from bucketline.loader.plan.plan import Plan, PlannedStep
    from bucketline.store.read.store import OpenShards


class BatchBuilder:
    """Fills buffers with the micro-batches of one rank. Any thread may `fill`; all else is called by one thread at a time."""

    def __init__(
        self, store: OpenShards, plan: Plan, config: LoaderConfig, rank: int, world_size: int, *, gather: Gather | None = None
    ) -> None:
        """Compute the layouts of batches. `gather`: a `Gather` over the same store to share; by default a new one."""
        self._store, self._plan, self.config = store, plan, config
        self._rank, self._num_parts = rank, world_size * config.accumulation
        self._gather = gather or Gather(store, plain_reads=config.plain_reads)
        self._row_weights = None  # [shards] float32
        if config.row_weights:
            self._row_weights = np.array(config.row_weights, dtype=np.float32)[store.store_of_shards()]
        self._buckets = {bucket.name: bucket for bucket in store.buckets(config.split)}
        conditioning = make_conditioning(store, self._buckets.values(), config)
        self._requested, self._groups = conditioning.columns, conditioning.groups
        names = {name for one in conditioning.columns for name in (one.name, one.mirrored)}
        self._added = sorted(names & store.added.keys())
        self._planner = CopyPlanner(store, self._gather, conditioning)
        longest = self._planner.longest()
        self.buffer_bytes = max(
            self._planner.layout(bucket, config.rows_of(bucket), longest).buffer_bytes for bucket in self._buckets.values()
        )

    def locate(self, steps: Sequence[tuple[int, int]]) -> list[PendingBatch]:
        """Plan and locate micro-batches, each (step, micro step). Many at once cost hardly more than one."""
        if not steps:
            return []
        accumulation = self.config.accumulation
        parts = [(step, self._rank * accumulation + micro_step) for step, micro_step in steps]
        planned = self._plan.draw(parts, self._num_parts)
        keys = self._keys(planned)
        by_bucket: dict[str, list[int]] = {}
        for number, part in enumerate(planned):
            by_bucket.setdefault(part.bucket, []).append(number)
        pending: dict[int, PendingBatch] = {}
        for name, numbers in by_bucket.items():
            bucket = self._buckets[name]
            try:
                whole = bucket.locate(np.concatenate([planned[number].rows for number in numbers]), self._added)
            except StoreError as error:
                raise type(error)(f"step {planned[numbers[0]].step}, bucket {name}: {error}") from error
            end = 0
            for number in numbers:
                part = planned[number]
                begin, end = end, end + len(part.rows)
                located = whole.part(begin, end)
                pending[number] = PendingBatch(
                    step=part.step,
                    micro_step=steps[number][1],
                    epoch=part.epoch,
                    bucket=bucket,
                    rows=part.rows,
                    weight=part.weight if self._row_weights is None else part.weight * self._row_weights[located.shard],
                    keys=keys[number],
                    located=located,
                )
        return [pending[number] for number in range(len(planned))]

    def _keys(self, planned: Sequence[PlannedStep]) -> list[NDArray[np.int64]]:
        """Return the row keys of planned micro-batches, `[B]` each, hashed together in a few calls."""
        ends = np.cumsum([len(part.rows) for part in planned])
        lengths = np.diff(ends, prepend=0)
        firsts = np.array([part.first_position for part in planned], dtype=np.int64)
        positions = np.arange(ends[-1]) + np.repeat(firsts - (ends - lengths), lengths)
        steps = np.repeat(np.array([part.step for part in planned], dtype=np.int64), lengths)
        return np.split(keys_of_rows(self.config.seed, steps, positions), ends[:-1])

    def open_lines(self) -> LineTable | None:
        """Return the table through which the lines of micro-batches are held; None if all of them are on this machine."""
        if not LineTable.needed_for(self._store.shards):
            return None
        lines = LineTable(self._store.files)
        lines.look_at_all()
        if not lines.is_complete:
            return lines
        lines.close()
        return None

    def hold_rows(self, batch: PendingBatch, lines: LineTable, priority: int) -> None:
        """Request the lines of a micro-batch's rows, of their whole blocks, and keep them until it is released."""
        for own in (batch.located, *batch.located.added.values()):
            spec = own.spec or batch.bucket.spec
            begin, end = own.data - spec.header_bytes, own.data + own.rows * spec.row_bytes
            batch.lines.append(lines.hold(own.shard, begin, end, priority))

    def hold_captions(self, batch: PendingBatch, lines: LineTable, priority: int) -> None:
        """Choose the captions of rows that are present, and request the lines of their blocks and of ragged entries'."""
        for own in self._entries(batch):
            batch.lines.append(lines.hold(own.located.shard, own.located.data, own.located.ends(), priority))

    def is_resident(self, batch: PendingBatch) -> bool:
        """Return whether a micro-batch's columns are in the page cache; True also if readahead is impossible."""
        try:
            return all(map(self._gather.is_resident, Window(self._planner, [batch]).columns()))
        except StoreError:  # raised again when the copies are planned
            return False

    def ask_rows(self, batch: PendingBatch) -> None:
        """Ask the kernel to read a micro-batch's rows."""
        for added in batch.located.added.values():
            self._gather.ahead(added)
        if self.config.verify:
            self._gather.ahead(batch.located)
            return
        own = {*SMALL_COLUMNS, CAPTIONS, *(one.present for one in self._requested), *(group.number for group in self._groups)}
        if not self.config.flip:
            own |= {one.name for one in self._requested}
        self._gather.ahead(batch.located, [column for column in batch.bucket.spec.columns if column.name in own])
        if self.config.flip:
            for values in Window(self._planner, [batch]).columns():
                self._gather.ahead_at(values.shard, values.offsets, values.num_bytes)

    def ask_starts(self, batch: PendingBatch) -> None:
        """Choose the captions from rows that were requested before, and ask the kernel to read their `starts`."""
        for own in self._entries(batch):
            self._gather.ahead_starts(own.located)

    def ask_tokens(self, batch: PendingBatch) -> None:
        """Ask the kernel to read the captions' tokens and ragged entries', located by `starts` that were requested before."""
        for own in self._entries(batch):
            for column in own.group.spec.tokens:
                self._gather.ahead_tokens(own.located, column)

    def _entries(self, batch: PendingBatch) -> list[RaggedRows]:
        """Return a micro-batch's entries by group, for which its captions are drawn the first time."""
        if batch.entries is None:
            batch.entries = Window(self._planner, [batch]).entries()
        return batch.entries

    def copy_plans(self, batches: Sequence[PendingBatch], *, plainly: bool) -> list[CopyPlan]:
        """Return the copy plans of consecutive micro-batches, or only of the first if one of the others cannot be planned.

        `plainly`: read the large columns with plain reads, not from the map.
        """
        try:
            return Window(self._planner, batches).copy_plans(plainly=plainly)
        except StoreError as error:
            if len(batches) == 1:
                raise self._named(batches[0], error) from error
        return self.copy_plans(batches[:1], plainly=plainly)

    def fill(self, buffer: Tensor, copy_plan: CopyPlan) -> FilledBuffer:
        """Copy one micro-batch into a buffer, `[buffer_bytes]` uint8."""
        batch, layout = copy_plan.batch, copy_plan.layout
        try:
            memory = buffer.numpy()
            for name, source in copy_plan.large.items():
                own = layout.gathered[name]
                if isinstance(source, PlainRead):
                    out = memory[own.begin : own.begin + own.num_bytes].reshape(len(batch.keys), -1)
                    self._gather.read_plainly(source.shard, source.offsets, source.num_bytes, out)
                else:
                    self._gather.take(source, memory, own.begin)
            if layout.is_dequantised:
                dequantise_field(buffer, layout.gathered[TOKENS], layout.gathered[TOKENS_SCALE], layout.by_name[TOKENS])
            memory.data[layout.small_begin : layout.num_bytes] = copy_plan.small.data
            if self.config.verify:
                verify_batch(self._store, self._gather, copy_plan, buffer)
        except StoreError as error:
            raise self._named(batch, error) from error
        return FilledBuffer(
            buffer=buffer,
            fields=layout.fields,
            num_bytes=layout.num_bytes,
            step=batch.step,
            micro_step=batch.micro_step,
            epoch=batch.epoch,
            bucket=batch.bucket.name,
        )

    def _may_name(self, error: StoreError) -> bool:
        """Return whether to search for the sample: not in object storage that does not answer, whose error names the object."""
        return isinstance(error, CorruptError) or not LineTable.needed_for(self._store.shards)

    def _named(self, batch: PendingBatch, error: StoreError) -> StoreError:
        """Return an error that also names the step, the bucket and the sample."""
        # a checksum error already names its sample
        read = partial(self._read_row, batch)
        is_named = "sample '" in str(error) or not self._may_name(error)
        blamed = "" if is_named else name_sample(self._store, batch.bucket, batch.rows, read)
        return type(error)(f"step {batch.step}, bucket {batch.bucket.name}: {blamed}{error}")

    def _read_row(self, batch: PendingBatch, n: int) -> None:
        """Read one row of a micro-batch, its caption and its entries with plain reads, only to check that they are readable."""
        one = slice(n, n + 1)
        located = batch.located.part(n, n + 1)
        own = replace(
            batch, rows=batch.rows[one], weight=batch.weight[one], keys=batch.keys[one], located=located, entries=None
        )
        files = FileGather(self._store)
        for place in (located, *located.added.values()):
            for column in (place.spec or batch.bucket.spec).columns:
                files.rows(place, column, np.empty((1, *column.shape), dtype=column.numpy_dtype))
        for entries in Window(self._planner, [own]).entries():
            for shard, row in zip(entries.located.shard.tolist(), entries.located.row.tolist(), strict=True):
                self._store.entry(entries.group.spec, shard, row)
