"""Filling slabs: what a rank reads at a step, located, asked for ahead, and gathered into a ring's memory.

Letters: B rows of a micro-batch, V captions a sample at most, L tokens (padded).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from bucketline.errors import StoreError
from bucketline.loader.blame import name_sample
from bucketline.loader.conditioning import FLIPPED, make_conditioning
from bucketline.loader.config import LATENT
from bucketline.loader.drafting import Drafter, PlainRead
from bucketline.loader.draws import keys_of_rows
from bucketline.loader.gather import Gather
from bucketline.loader.verifying import verify_batch
from bucketline.store.block import ID
from bucketline.store.file_gather import FileGather

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from bucketline.loader.config import LoaderConfig
    from bucketline.loader.drafting import Draft
    from bucketline.loader.plan import Plan, PlannedStep
    from bucketline.loader.ring import Field
    from bucketline.store import Bucket
    from bucketline.store.reader import Located, LocatedCaptions, OpenShards


@dataclass(slots=True, kw_only=True, eq=False)
class Coming:
    """A micro-batch that will be filled: what the plan says, and where it lies, as far as that is known yet."""

    step: int
    micro_step: int
    epoch: int
    bucket: Bucket
    rows: NDArray[np.int64]  # [B] of the bucket
    weight: NDArray[np.float32]  # [B]
    keys: NDArray[np.int64]  # [B]
    located: Located
    window: list[Coming] = field(default_factory=list)  # those that were located with it and are not filled yet
    is_cold: bool = False  # asked for ahead, because it must come from the disk
    captions: LocatedCaptions | None = None  # where it is cold: known once the rows' caption numbers were read
    is_asked: bool = False  # where it is cold: all of it is asked for, its small columns so long ago that they will be there
    draft: Draft | None = None  # where a copy is all that is left to do


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """A filled slab, and what it holds beside tensors."""

    slab: Tensor  # [slab_bytes] uint8
    fields: list[Field]
    num_bytes: int
    step: int
    micro_step: int
    epoch: int
    bucket: str


class Filler:
    """Fills slabs with the micro-batches of one rank."""

    def __init__(
        self, store: OpenShards, plan: Plan, config: LoaderConfig, rank: int, world_size: int, *, gather: Gather | None = None
    ) -> None:
        """Work out what batches look like. `gather`: one over the same store that others use as well; its own unless given."""
        self._store, self._plan, self._config = store, plan, config
        self._rank, self._num_parts = rank, world_size * config.accumulation
        self._gather = gather or Gather(store, plain_reads=config.plain_reads)
        self._buckets = {bucket.name: bucket for bucket in store.buckets(config.split)}
        conditioning = make_conditioning(store, self._buckets.values(), config)
        self._drafter = Drafter(store, self._gather, conditioning)
        self._drafting = threading.Lock()
        longest = [
            self._drafter.layout(bucket, config.rows_of(bucket), conditioning.max_tokens) for bucket in self._buckets.values()
        ]
        self.slab_bytes = max(layout.num_bytes for layout in longest)

    def locate(self, steps: Sequence[tuple[int, int]]) -> list[Coming]:
        """Plan and locate micro-batches, each (step, micro step). Many at once cost hardly more than one.

        Raises:
            StoreError: naming the first step of the bucket in which a row cannot be found.
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
        coming: dict[int, Coming] = {}
        for name, numbers in by_bucket.items():
            bucket = self._buckets[name]
            try:
                whole = bucket.locate(np.concatenate([planned[number].rows for number in numbers]))
            except StoreError as error:
                # one by one they will be tried again (`Lookahead`); then the sample is looked for
                rows = planned[numbers[0]].rows
                read = partial(_locate_row, self._store, bucket, rows)
                blamed = "" if len(numbers) > 1 else name_sample(self._store, bucket, rows, read)
                raise type(error)(f"step {planned[numbers[0]].step}, bucket {name}: {blamed}{error}") from error
            end = 0
            for number in numbers:
                part = planned[number]
                begin, end = end, end + len(part.rows)
                coming[number] = Coming(
                    step=part.step,
                    micro_step=steps[number][1],
                    epoch=part.epoch,
                    bucket=bucket,
                    rows=part.rows,
                    weight=part.weight,
                    keys=keys[number],
                    located=whole.part(begin, end),
                )
        window = [coming[number] for number in range(len(planned))]
        for own in window:
            own.window = window
        return list(window)  # the other one is emptied

    def _keys(self, planned: Sequence[PlannedStep]) -> list[NDArray[np.int64]]:
        """Give the keys of planned micro-batches' rows, `[B]` each, all of them hashed in a few calls."""
        ends = np.cumsum([len(part.rows) for part in planned])
        lengths = np.diff(ends, prepend=0)
        firsts = np.array([part.first_position for part in planned], dtype=np.int64)
        positions = np.arange(ends[-1]) + np.repeat(firsts - (ends - lengths), lengths)
        steps = np.repeat(np.array([part.step for part in planned], dtype=np.int64), lengths)
        return np.split(keys_of_rows(self._config.seed, steps, positions), ends[:-1])

    def ask_rows(self, coming: Coming) -> None:
        """Ask the kernel to read a micro-batch's rows."""
        coming.is_cold = True
        if self._config.verify:
            self._gather.ahead(coming.located)
        elif self._config.flip:
            self._gather.ahead(coming.located, [c for c in coming.bucket.columns if c.name not in (LATENT, FLIPPED)])
            latents = self._drafter.latents(coming)
            self._gather.ahead_at(latents.shard, latents.offsets, latents.num_bytes)
        else:
            self._gather.ahead(coming.located, [column for column in coming.bucket.columns if column.name != FLIPPED])

    def ask_starts(self, coming: Coming) -> None:
        """Choose the captions, out of rows that have been asked for, and ask for what says where their tokens are."""
        coming.captions = self._drafter.captions([coming])
        self._gather.ahead_starts(coming.captions)

    def ask_tokens(self, coming: Coming) -> None:
        """Ask for the captions' tokens, by `starts` that have been asked for."""
        if coming.captions is None:
            coming.captions = self._drafter.captions([coming])
        self._gather.ahead_tokens(coming.captions, self._store.text.tokens[0])
        coming.is_asked = True

    def fill(self, slab: Tensor, coming: Coming) -> Filled:
        """Gather one micro-batch into a slab.

        Raises:
            StoreError: naming the step and bucket, where a caption cannot be found or a shard's file is gone.
            CorruptError: likewise, where `verify` finds a row or caption that is not what was written.
        """
        try:
            draft = self._draft(coming)
            memory = slab.numpy()
            for name, source in draft.large.items():
                own = draft.layout.by_name[name]
                if isinstance(source, PlainRead):
                    out = memory[own.begin : own.begin + own.num_bytes].reshape(len(coming.keys), -1)
                    self._gather.read_plainly(source.shard, source.offsets, source.num_bytes, out)
                else:
                    self._gather.take(source, memory, own.begin)
            memory.data[draft.layout.small_begin : draft.layout.num_bytes] = draft.small.data
            if self._config.verify:
                verify_batch(self._store, self._gather, coming, draft, slab)
        except StoreError as error:
            # a checksum that is wrong has named its sample
            read = partial(self._read_row, coming)
            blamed = "" if "sample '" in str(error) else name_sample(self._store, coming.bucket, coming.rows, read)
            raise type(error)(f"step {coming.step}, bucket {coming.bucket.name}: {blamed}{error}") from error
        return Filled(
            slab=slab,
            fields=draft.layout.fields,
            num_bytes=draft.layout.num_bytes,
            step=coming.step,
            micro_step=coming.micro_step,
            epoch=coming.epoch,
            bucket=coming.bucket.name,
        )

    def _read_row(self, coming: Coming, n: int) -> None:
        """Read one row of a micro-batch and its caption, by plain reads, only to see whether they can be read."""
        one = slice(n, n + 1)
        own = replace(coming, rows=coming.rows[one], weight=coming.weight[one], keys=coming.keys[one], draft=None)
        own.located = coming.located.part(n, n + 1)
        files = FileGather(self._store)
        for column in coming.bucket.columns:
            files.rows(own.located, column, np.empty((1, *column.shape), dtype=column.numpy_dtype))
        captions = self._drafter.captions([own])
        self._store.caption(int(captions.shard[0]), int(captions.row[0]))

    def _draft(self, coming: Coming) -> Draft:
        """Work out a micro-batch, and with it those of its window that are as it is: hot, or cold and asked for.

        Raises:
            StoreError: where this one cannot be; what another one fails at is met again in its own turn.
        """
        with self._drafting:
            if coming.draft is None:
                others = [own for own in coming.window if own is not coming and own.draft is None]
                like = [own for own in others if own.is_cold == coming.is_cold and own.is_asked == coming.is_asked]
                together = sorted([coming, *like], key=lambda own: own.bucket.name)
                try:
                    self._work_out(together)
                except StoreError:
                    self._work_out([coming])
            if not coming.is_cold:
                coming.window.clear()  # they all hold it
            elif coming in coming.window:
                coming.window.remove(coming)
            draft, coming.draft = coming.draft, None
        assert draft is not None
        return draft

    def _work_out(self, together: Sequence[Coming]) -> None:
        drafts = self._drafter.draft(together, plainly=together[0].is_cold)
        for own, draft in zip(together, drafts, strict=True):
            own.draft = draft


def _locate_row(store: OpenShards, bucket: Bucket, rows: NDArray[np.int64], n: int) -> None:
    """Locate one row and read the least of it, only to see whether that can be done."""
    column = bucket.spec.column(ID)
    FileGather(store).rows(bucket.locate(rows[n : n + 1]), column, np.empty((1, *column.shape), dtype=column.numpy_dtype))
