"""Building batches: locate a rank's rows, read ahead, plan the copies, copy into a pool buffer, verify.

Letters: B rows of a micro-batch, V maximum captions per sample, L tokens (padded).
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from bucketline.errors import CorruptError, StoreError
from bucketline.loader.collate.buffers import ALIGN_BYTES, FilledBuffer, carve, dequantise_field, make_conditioning
from bucketline.loader.collate.gather import Gather, PlainRead, as_bytes
from bucketline.loader.collate.window import SMALL_COLUMNS, CopyPlanner, PendingBatch, Window
from bucketline.loader.plan.order import keys_of_rows
from bucketline.store.format.block import CAPTIONS, ID, TOKENS, TOKENS_SCALE
from bucketline.store.format.text import TEXT_GROUP, delivered
from bucketline.store.read.files import FileGather, check_added, check_rows
from bucketline.store.read.store import locate_all
from bucketline.store.remote.cache.batch_lines import LineTable
from bucketline.store.shard.mapped import distinct

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from bucketline.loader.collate.window import CopyPlan, RaggedRows
    from bucketline.loader.config import LoaderConfig
    from bucketline.loader.mixture import Mixture
    from bucketline.loader.plan.plan import Plan, PlannedStep
    from bucketline.store import Bucket, Store


# ---------------------------------------------------------------------------------------------------------------------- verify
# Verification of a filled micro-batch against the checksums of its rows, captions and ragged entries. Letters: B rows.


def verify_batch(store: Store | Mixture, gather: Gather, copy_plan: CopyPlan, buffer: Tensor) -> None:
    """Verify the gathered contents of a buffer against the store's checksums."""
    tensors = carve(buffer, copy_plan.layout.fields)
    located, spec = copy_plan.batch.located, copy_plan.batch.bucket.spec
    whole = {name: values[copy_plan.begin : copy_plan.end] for name, values in copy_plan.stored.items()}  # [B, row_bytes] each
    for column in spec.columns:  # those that were not requested are read for this check
        if column.name not in whole:
            whole[column.name] = gather.read(located.shard, located.offsets(spec, column.name), column.row_bytes)
    flipped = tensors["flipped"].numpy()
    for requested in copy_plan.columns:
        delivered = as_bytes(tensors[requested.field])
        for name, is_chosen in ((requested.name, ~flipped), (requested.mirrored, flipped)):
            if is_chosen.any() and name in located.added:  # which has the checksum of its value and of the row's id
                check_added(store, located.where(is_chosen), name, delivered[is_chosen], whole[ID][is_chosen])
            elif is_chosen.any() and delivered.size:
                whole[name][is_chosen] = delivered[is_chosen]
    check_rows(store, located, whole)
    for rows in copy_plan.entries:
        _check_entries(store, copy_plan, rows, tensors)


def _check_entries(store: Store | Mixture, copy_plan: CopyPlan, rows: RaggedRows, tensors: Mapping[str, Tensor]) -> None:
    """Compare the entries of a group with those read and verified one by one; a row without one has zeros."""
    group, spec = rows.group, rows.group.spec
    tokens = {column.name: as_bytes(tensors[group.token_field(column.name)]) for column in group.shown.tokens}
    fixed = {column.name: as_bytes(tensors[group.fixed_field(column.name)]) for column in group.shown.fixed}
    ordinals, numbers = (
        rows.each_row(values, -1)[copy_plan.begin : copy_plan.end].tolist() for values in (rows.located.shard, rows.located.row)
    )
    for n, (shard, number) in enumerate(zip(ordinals, numbers, strict=True)):
        if number < 0:
            is_same = not any(np.any(values[n]) for values in (*tokens.values(), *fixed.values()))
        else:
            expected = store.entry(spec, shard, number)
            expected = delivered(spec, expected) if group.shown == spec.delivered else expected
            is_same = all(_begins_with(values[n], expected.tokens[name]) for name, values in tokens.items())
            is_same &= all(values[n].tobytes() == expected.fixed[name] for name, values in fixed.items())
        if not is_same:
            where = f"shard {store.shards[shard].name}, " if number >= 0 else ""
            raise CorruptError(f"{where}{spec.label} {number}: it changed while it was read")


def _begins_with(values: NDArray[np.uint8], expected: bytes) -> bool:
    return values[: len(expected)].tobytes() == expected and not np.any(values[len(expected) :])


def name_sample(store: Store | Mixture, bucket: Bucket, rows: NDArray[np.int64], read: Callable[[int], object]) -> str:
    """Return a message prefix that names the first of a batch's rows, `[B]`, that cannot be read; "" if all are readable now.

    `read` reads one row, by its index in the batch. A sample's name comes from its record. If the record cannot be read
    either, the prefix names shard and row.
    """
    for n, row in enumerate(rows.tolist()):
        try:
            read(n)
        except StoreError:
            return f"{_name(store, bucket, row)}: "
    return ""


def _name(store: Store | Mixture, bucket: Bucket, row: int) -> str:
    ordinal, first = bucket.shard_of(row)
    shard = store.shards[ordinal]
    with suppress(StoreError):
        live_row = int(store.table.live_rows(bucket.name, np.array([ordinal]), np.array([row - first]))[0])
        name = shard.name_of(bucket.name, live_row)
        where = f"row {live_row} in shard {shard.name}"
        return where if name is None else f"sample {name!r:.200}, {where}"
    return f"live row {row - first} in shard {shard.name}"


# --------------------------------------------------------------------------------------------------------------- batch builder


class BatchBuilder:
    """Fills buffers with the micro-batches of one rank. Any thread may `fill`; all else is called by one thread at a time."""

    def __init__(
        self, store: Store | Mixture, gather: Gather, plan: Plan, config: LoaderConfig, rank: int, world_size: int
    ) -> None:
        """Compute the layouts of batches. `gather`: over the same store; several builders may share one."""
        self._store, self._gather, self._plan, self.config = store, gather, plan, config
        self._rank, self._num_parts = rank, world_size * config.accumulation
        self._is_remote = any(shard.source is not None for shard in store.shards)
        self._row_weights = None  # [shards] float32
        if config.row_weights:
            self._row_weights = np.array(config.row_weights, dtype=np.float32)[store.store_of_shards()]
        self._buckets = {bucket.name: bucket for bucket in store.buckets(config.split)}
        conditioning = make_conditioning(store, self._buckets.values(), config)
        self._requested, self._groups = conditioning.columns, conditioning.groups
        names = {name for column in conditioning.columns for name in (column.name, column.mirrored)}
        self._added = sorted(names & store.added.keys())
        self._has_one_text_block = np.array([shard.entry.groups[TEXT_GROUP].blocks == 1 for shard in store.shards], dtype=bool)
        self._planner = CopyPlanner(store, self._gather, conditioning)
        longest = tuple(conditioning.padded(group, group.longest) for group in self._groups)

        def column_lines(bucket: Bucket) -> int:
            sizes = (bucket.column(column.name).row_bytes for column in conditioning.columns_of(bucket))
            return sum(-(-config.rows_of(bucket) * row_bytes // ALIGN_BYTES) for row_bytes in sizes)

        # by the rows of a micro-batch: all but the columns have as many bytes in each bucket
        largest = {config.rows_of(bucket): bucket for bucket in sorted(self._buckets.values(), key=column_lines)}
        self.most_rows = max(largest)
        self.buffer_bytes = max(self._planner.layout(own, rows, longest).buffer_bytes for rows, own in largest.items())

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
        requests = [
            (self._buckets[name], np.concatenate([planned[number].rows for number in numbers]))
            for name, numbers in by_bucket.items()
        ]
        try:
            located_by_bucket = locate_all(requests, self._added)
        except StoreError as error:  # of several micro-batches, each is located alone then
            raise type(error)(f"step {planned[0].step}, bucket {planned[0].bucket}: {error}") from error
        pending: dict[int, PendingBatch] = {}
        for (bucket, _), numbers, whole in zip(requests, by_bucket.values(), located_by_bucket, strict=True):
            end = 0
            for number in numbers:
                part = planned[number]
                begin, end = end, end + len(part.rows)
                located = whole if len(numbers) == 1 else whole.where(slice(begin, end))
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
        if not self._is_remote:
            return None
        lines = LineTable(self._store.files)
        lines.look_at_all()
        if not lines.is_complete:
            return lines
        lines.close()
        return None

    def hold_rows(self, batch: PendingBatch, lines: LineTable, priority: int) -> None:
        """Request the lines of a micro-batch's rows, of their whole blocks, and keep them until it is released.

        So are those of a shard's captions if they are in one block, which is known before the rows say which they have.
        """
        for located in (batch.located, *batch.located.added.values()):
            spec = located.spec or batch.bucket.spec
            begin, end = located.data - spec.header_bytes, located.data + located.rows * spec.row_bytes
            batch.lines.append(lines.hold(located.shard, begin, end, priority))
        if len(shard := distinct(batch.located.shard[self._has_one_text_block[batch.located.shard]])):
            first = self._store.locate_entries(self._store.text, shard, np.zeros_like(shard))
            batch.lines.append(lines.hold(shard, first.data, first.ends(), priority))

    def hold_captions(self, batch: PendingBatch, lines: LineTable, priority: int) -> None:
        """Choose the captions of rows that are present, and request the lines of their blocks and of ragged entries'."""
        for entries in self._entries(batch):
            batch.lines.append(lines.hold(entries.located.shard, entries.located.data, entries.located.ends(), priority))

    def _window(self, batches: Sequence[PendingBatch]) -> Window:
        """Return the window of micro-batches; the window of a single one is kept until that is released."""
        if len(batches) > 1:
            return Window(self._planner, batches)
        (batch,) = batches
        if batch.window is None:
            batch.window = Window(self._planner, batches)
        return batch.window

    def is_resident(self, batch: PendingBatch) -> bool:
        """Return whether a micro-batch's columns are in the page cache; True also if readahead is impossible."""
        try:
            return all(map(self._gather.is_resident, self._window([batch]).columns()))
        except StoreError:  # raised again when the copies are planned
            return False

    def ask_rows(self, batch: PendingBatch) -> None:
        """Ask the kernel to read a micro-batch's rows."""
        for added in batch.located.added.values():
            self._gather.ahead(added)
        if self.config.verify:
            self._gather.ahead(batch.located)
            return
        names = {*SMALL_COLUMNS, CAPTIONS, *(column.present for column in self._requested)}
        names |= {group.number for group in self._groups}
        if not self.config.flip:
            names |= {column.name for column in self._requested}
        self._gather.ahead(batch.located, [column for column in batch.bucket.spec.columns if column.name in names])
        if self.config.flip:
            for values in self._window([batch]).columns():
                self._gather.ahead_at(values.shard, values.offsets, values.num_bytes)

    def ask_starts(self, batch: PendingBatch) -> None:
        """Choose the captions from rows that were requested before, and ask the kernel to read their `starts`."""
        for entries in self._entries(batch):
            self._gather.ahead_starts(entries.located)

    def ask_tokens(self, batch: PendingBatch) -> None:
        """Ask the kernel to read the captions' tokens and ragged entries', located by `starts` that were requested before."""
        for entries in self._entries(batch):
            for column in entries.group.spec.tokens:
                self._gather.ahead_tokens(entries.located, column)

    def _entries(self, batch: PendingBatch) -> list[RaggedRows]:
        """Return a micro-batch's entries by group, for which its captions are drawn the first time."""
        if batch.entries is None:
            batch.entries = self._window([batch]).entries()
        return batch.entries

    def copy_plans(self, batches: Sequence[PendingBatch], *, plainly: bool) -> list[CopyPlan]:
        """Return the copy plans of consecutive micro-batches, or only of the first if one of the others cannot be planned.

        `plainly`: read the large columns with plain reads, not from the map.
        """
        try:
            return self._window(batches).copy_plans(plainly=plainly)
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
                field = layout.gathered[name]
                if isinstance(source, PlainRead):
                    out = memory[field.begin : field.begin + field.num_bytes].reshape(len(batch.keys), -1)
                    self._gather.files.read(source.shard, source.offsets, source.num_bytes, out)
                else:
                    self._gather.copy(source, memory, field.begin)
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

    def _named(self, batch: PendingBatch, error: StoreError) -> StoreError:
        # a checksum error already names its sample, and one of object storage that does not answer its object
        read = partial(self._read_row, batch)
        may_name = isinstance(error, CorruptError) or not self._is_remote
        blamed = "" if "sample '" in str(error) or not may_name else name_sample(self._store, batch.bucket, batch.rows, read)
        return type(error)(f"step {batch.step}, bucket {batch.bucket.name}: {blamed}{error}")

    def _read_row(self, batch: PendingBatch, n: int) -> None:
        """Read one row of a micro-batch, its caption and its entries with plain reads, only to check that they are readable."""
        only = slice(n, n + 1)
        located = batch.located.where(only)
        weight, keys = batch.weight[only], batch.keys[only]
        single = replace(batch, rows=batch.rows[only], weight=weight, keys=keys, located=located, entries=None, window=None)
        files = FileGather(self._store)
        for block in (located, *located.added.values()):
            for column in (block.spec or batch.bucket.spec).columns:
                files.rows(block, column, np.empty((1, *column.shape), dtype=column.numpy_dtype))
        for entries in Window(self._planner, [single]).entries():
            for shard, row in zip(entries.located.shard.tolist(), entries.located.row.tolist(), strict=True):
                self._store.entry(entries.group.spec, shard, row)
