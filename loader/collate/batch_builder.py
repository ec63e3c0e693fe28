"""Building batches: locate the rows that a rank reads at a step, read ahead, and gather them into a pool buffer.

Letters: B rows of a micro-batch, V maximum captions per sample, L tokens (padded).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from bucketline.errors import StoreError
from bucketline.forks import ForkSafeLock
from bucketline.loader.collate.columns import FLIPPED, make_conditioning
from bucketline.loader.collate.copy_plan import CopyPlanner
from bucketline.loader.collate.gather import Gather
from bucketline.loader.collate.pending import FilledBuffer, PendingBatch, PlainRead
from bucketline.loader.collate.verify import name_sample, verify_batch
from bucketline.loader.config import LATENT
from bucketline.loader.plan.rng import keys_of_rows
from bucketline.store.format.block import ID
from bucketline.store.read.preadv import FileGather

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from bucketline.loader.collate.pending import CopyPlan
    from bucketline.loader.config import LoaderConfig
    from bucketline.loader.plan.plan import Plan, PlannedStep
    from bucketline.store import Bucket
    from bucketline.store.read.store import OpenShards


class BatchBuilder:
    """Fills buffers with the micro-batches of one rank."""

    def __init__(
        self, store: OpenShards, plan: Plan, config: LoaderConfig, rank: int, world_size: int, *, gather: Gather | None = None
    ) -> None:
        """Compute the layouts of batches. `gather`: a `Gather` over the same store to share; by default a new one."""
        self._store, self._plan, self._config = store, plan, config
        self._rank, self._num_parts = rank, world_size * config.accumulation
        self._gather = gather or Gather(store, plain_reads=config.plain_reads)
        self._buckets = {bucket.name: bucket for bucket in store.buckets(config.split)}
        conditioning = make_conditioning(store, self._buckets.values(), config)
        self._planner = CopyPlanner(store, self._gather, conditioning)
        self._planning = ForkSafeLock()
        longest = [
            self._planner.layout(bucket, config.rows_of(bucket), conditioning.max_tokens) for bucket in self._buckets.values()
        ]
        self.buffer_bytes = max(layout.num_bytes for layout in longest)

    def locate(self, steps: Sequence[tuple[int, int]]) -> list[PendingBatch]:
        """Plan and locate micro-batches, each (step, micro step). Many at once cost hardly more than one.

        Raises:
            StoreError: if a row cannot be found; names the bucket and its first step.
        """
        if not steps:
            return []
        accumulation = self._config.accumulation
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
                whole = bucket.locate(np.concatenate([planned[number].rows for number in numbers]))
            except StoreError as error:
                # `Readahead` retries them one by one; only then search for the sample
                rows = planned[numbers[0]].rows
                read = partial(_locate_row, self._store, bucket, rows)
                blamed = "" if len(numbers) > 1 else name_sample(self._store, bucket, rows, read)
                raise type(error)(f"step {planned[numbers[0]].step}, bucket {name}: {blamed}{error}") from error
            end = 0
            for number in numbers:
                part = planned[number]
                begin, end = end, end + len(part.rows)
                pending[number] = PendingBatch(
                    step=part.step,
                    micro_step=steps[number][1],
                    epoch=part.epoch,
                    bucket=bucket,
                    rows=part.rows,
                    weight=part.weight,
                    keys=keys[number],
                    located=whole.part(begin, end),
                )
        window = [pending[number] for number in range(len(planned))]
        for own in window:
            own.window = window
        return list(window)  # a copy, because the shared list is emptied

    def _keys(self, planned: Sequence[PlannedStep]) -> list[NDArray[np.int64]]:
        """Return the row keys of planned micro-batches, `[B]` each, hashed together in a few calls."""
        ends = np.cumsum([len(part.rows) for part in planned])
        lengths = np.diff(ends, prepend=0)
        firsts = np.array([part.first_position for part in planned], dtype=np.int64)
        positions = np.arange(ends[-1]) + np.repeat(firsts - (ends - lengths), lengths)
        steps = np.repeat(np.array([part.step for part in planned], dtype=np.int64), lengths)
        return np.split(keys_of_rows(self._config.seed, steps, positions), ends[:-1])

    def is_resident(self, pending: PendingBatch) -> bool:
        """Return whether a micro-batch's latents are in the page cache; True also if readahead is impossible."""
        try:
            return self._gather.is_resident(self._planner.latents(pending))
        except StoreError:  # it is met again, and raised, when the batch is filled
            return False

    def ask_rows(self, pending: PendingBatch) -> None:
        """Ask the kernel to read a micro-batch's rows."""
        pending.is_cold = True
        if self._config.verify:
            self._gather.ahead(pending.located)
        elif self._config.flip:
            self._gather.ahead(pending.located, [c for c in pending.bucket.columns if c.name not in (LATENT, FLIPPED)])
            latents = self._planner.latents(pending)
            self._gather.ahead_at(latents.shard, latents.offsets, latents.num_bytes)
        else:
            self._gather.ahead(pending.located, [column for column in pending.bucket.columns if column.name != FLIPPED])

    def ask_starts(self, pending: PendingBatch) -> None:
        """Choose the captions from rows that were requested before, and ask the kernel to read their `starts`."""
        pending.captions = self._planner.captions([pending])
        self._gather.ahead_starts(pending.captions)

    def ask_tokens(self, pending: PendingBatch) -> None:
        """Ask the kernel to read the captions' tokens, located by `starts` that were requested before."""
        if pending.captions is None:
            pending.captions = self._planner.captions([pending])
        self._gather.ahead_tokens(pending.captions, self._store.text.tokens[0])
        pending.is_asked = True

    def fill(self, buffer: Tensor, pending: PendingBatch) -> FilledBuffer:
        """Gather one micro-batch into a buffer.

        Raises:
            StoreError: if a caption cannot be found or a shard's file is missing; names the step and bucket.
            CorruptError: if `verify` finds a row or caption that differs from what was written; names them likewise.
        """
        try:
            copy_plan = self._copy_plan(pending)
            memory = buffer.numpy()
            for name, source in copy_plan.large.items():
                own = copy_plan.layout.by_name[name]
                if isinstance(source, PlainRead):
                    out = memory[own.begin : own.begin + own.num_bytes].reshape(len(pending.keys), -1)
                    self._gather.read_plainly(source.shard, source.offsets, source.num_bytes, out)
                else:
                    self._gather.take(source, memory, own.begin)
            memory.data[copy_plan.layout.small_begin : copy_plan.layout.num_bytes] = copy_plan.small.data
            if self._config.verify:
                verify_batch(self._store, self._gather, pending, copy_plan, buffer)
        except StoreError as error:
            # a checksum error already names its sample
            read = partial(self._read_row, pending)
            blamed = "" if "sample '" in str(error) else name_sample(self._store, pending.bucket, pending.rows, read)
            raise type(error)(f"step {pending.step}, bucket {pending.bucket.name}: {blamed}{error}") from error
        return FilledBuffer(
            buffer=buffer,
            fields=copy_plan.layout.fields,
            num_bytes=copy_plan.layout.num_bytes,
            step=pending.step,
            micro_step=pending.micro_step,
            epoch=pending.epoch,
            bucket=pending.bucket.name,
        )

    def _read_row(self, pending: PendingBatch, n: int) -> None:
        """Read one row of a micro-batch and its caption with plain reads, only to check that they are readable."""
        one = slice(n, n + 1)
        own = replace(pending, rows=pending.rows[one], weight=pending.weight[one], keys=pending.keys[one], copy_plan=None)
        own.located = pending.located.part(n, n + 1)
        files = FileGather(self._store)
        for column in pending.bucket.columns:
            files.rows(own.located, column, np.empty((1, *column.shape), dtype=column.numpy_dtype))
        captions = self._planner.captions([own])
        self._store.caption(int(captions.shard[0]), int(captions.row[0]))

    def _copy_plan(self, pending: PendingBatch) -> CopyPlan:
        """Return a micro-batch's copy plan; also plan those of its window in the same state: hot, or cold and requested.

        Raises:
            StoreError: if this one cannot be planned; another one's failure is raised in its own turn.
        """
        with self._planning:
            if pending.copy_plan is None:
                others = [own for own in pending.window if own is not pending and own.copy_plan is None]
                like = [own for own in others if own.is_cold == pending.is_cold and own.is_asked == pending.is_asked]
                together = sorted([pending, *like], key=lambda own: own.bucket.name)
                try:
                    self._work_out(together)
                except StoreError:
                    self._work_out([pending])
            if not pending.is_cold:
                pending.window.clear()  # all of them share this list
            elif pending in pending.window:
                pending.window.remove(pending)
            copy_plan, pending.copy_plan = pending.copy_plan, None
        assert copy_plan is not None
        return copy_plan

    def _work_out(self, together: Sequence[PendingBatch]) -> None:
        copy_plans = self._planner.copy_plan(together, plainly=together[0].is_cold)
        for own, copy_plan in zip(together, copy_plans, strict=True):
            own.copy_plan = copy_plan


def _locate_row(store: OpenShards, bucket: Bucket, rows: NDArray[np.int64], n: int) -> None:
    """Locate one row and read its smallest column, only to check that this works."""
    column = bucket.spec.column(ID)
    FileGather(store).rows(bucket.locate(rows[n : n + 1]), column, np.empty((1, *column.shape), dtype=column.numpy_dtype))
