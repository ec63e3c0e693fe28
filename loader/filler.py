"""Filling slabs: what a rank reads at a step, located, asked for ahead, and gathered into a ring's memory.

Letters: B rows of a micro-batch, V captions a sample at most, L tokens (padded).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from bucketline.errors import StoreError
from bucketline.loader.conditioning import FLIPPED, LATENT, latent_kind, make_conditioning
from bucketline.loader.drafting import Drafter, PlainRead
from bucketline.loader.draws import row_keys
from bucketline.loader.gather import Gather
from bucketline.loader.plan import slice_of_rank
from bucketline.loader.verifying import verify_batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from bucketline.loader.batch import LatentKind
    from bucketline.loader.config import LoaderConfig
    from bucketline.loader.drafting import Draft
    from bucketline.loader.plan import Plan
    from bucketline.loader.ring import Field
    from bucketline.store import Bucket, Store
    from bucketline.store.reader import Located, LocatedCaptions


@dataclass(slots=True, kw_only=True)
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
    latent_kind: LatentKind


class Filler:
    """Fills slabs with the micro-batches of one rank."""

    def __init__(self, store: Store, plan: Plan, config: LoaderConfig, rank: int, world_size: int) -> None:
        self._store, self._plan, self._config = store, plan, config
        self._share = slice_of_rank(rank, world_size, config.batch_size * config.accumulation * world_size)
        self._gather = Gather(store)
        self._buckets = {bucket.name: bucket for bucket in store.buckets(config.split)}
        conditioning = make_conditioning(store, self._buckets.values(), config)
        self._latent_kind = latent_kind(store)
        self._drafter = Drafter(store, self._gather, conditioning)
        self._drafting = threading.Lock()
        longest = [
            self._drafter.layout(bucket, config.batch_size, conditioning.max_tokens) for bucket in self._buckets.values()
        ]
        self.slab_bytes = max(layout.num_bytes for layout in longest)

    def locate(self, steps: Sequence[tuple[int, int]]) -> list[Coming]:
        """Plan and locate micro-batches, each (step, micro step). Many at once cost hardly more than one.

        Raises:
            StoreError: naming the first step of the bucket in which a row cannot be found.
        """
        planned = {step: self._plan.at(step) for step in {step for step, _ in steps}}
        share = {pair: self._positions(pair[1]) for pair in steps}
        by_bucket: dict[str, list[tuple[int, int]]] = {}
        for step, micro_step in steps:
            by_bucket.setdefault(planned[step].bucket, []).append((step, micro_step))
        located: dict[tuple[int, int], Located] = {}
        size = self._config.batch_size
        for name, own in by_bucket.items():
            rows = np.concatenate([planned[pair[0]].rows[share[pair]] for pair in own])
            try:
                whole = self._buckets[name].locate(rows)
            except StoreError as error:
                raise type(error)(f"step {own[0][0]}, bucket {name}: {error}") from error
            for n, pair in enumerate(own):
                located[pair] = whole.part(n * size, (n + 1) * size)
        step_of = np.repeat(np.array([step for step, _ in steps], dtype=np.int64), size)
        keys = row_keys(self._config.seed, step_of, np.concatenate([share[pair] for pair in steps] or [step_of]))
        window = [
            Coming(
                step=step,
                micro_step=micro_step,
                epoch=planned[step].epoch,
                bucket=self._buckets[planned[step].bucket],
                rows=planned[step].rows[share[step, micro_step]],
                weight=planned[step].weight[share[step, micro_step]],
                keys=keys[n * size : (n + 1) * size],
                located=located[step, micro_step],
            )
            for n, (step, micro_step) in enumerate(steps)
        ]
        for coming in window:
            coming.window = window
        return list(window)  # the other one is emptied

    def _positions(self, micro_step: int) -> NDArray[np.int64]:
        begin = self._share.start + micro_step * self._config.batch_size
        return np.arange(begin, begin + self._config.batch_size, dtype=np.int64)

    def ask_rows(self, coming: Coming) -> None:
        """Ask the kernel to read a micro-batch's rows."""
        coming.is_cold = True
        latents = self._drafter.latents(coming)
        columns = [column for column in coming.bucket.columns if self._config.verify or column.name not in (LATENT, FLIPPED)]
        self._gather.ahead(coming.located, columns)
        if not self._config.verify:
            self._gather.ahead_at(latents.shard, latents.offsets, latents.num_bytes)

    def ask_starts(self, coming: Coming) -> None:
        """Choose the captions, out of rows that have been asked for, and ask for what says where their tokens are."""
        coming.captions = self._drafter.captions([coming])
        self._gather.ahead_starts(coming.captions)

    def ask_tokens(self, coming: Coming) -> None:
        """Ask for the captions' tokens, by `starts` that have been asked for."""
        if coming.captions is None:
            coming.captions = self._drafter.captions([coming])
        self._gather.ahead_tokens(coming.captions, self._store.text.tokens[0])

    def fill(self, slab: Tensor, coming: Coming) -> Filled:
        """Gather one micro-batch into a slab.

        Raises:
            StoreError: naming the step and bucket, where a caption cannot be found or a shard's file is gone.
            CorruptError: likewise, where `verify` finds a row or caption that is not what was written.
        """
        try:
            draft = self._draft(coming)
            for name, source in draft.large.items():
                own = draft.layout.by_name[name]
                out = slab[own.begin : own.begin + own.num_bytes]
                if isinstance(source, PlainRead):
                    self._gather.read_plainly(source.shard, source.offsets, source.num_bytes, out.view(len(coming.keys), -1))
                else:
                    self._gather.take(source, out)
            slab[draft.layout.small_begin : draft.layout.num_bytes].copy_(draft.small)
            if self._config.verify:
                verify_batch(self._store, self._gather, coming, draft, slab)
        except StoreError as error:
            raise type(error)(f"step {coming.step}, bucket {coming.bucket.name}: {error}") from error
        return Filled(
            slab=slab,
            fields=draft.layout.fields,
            num_bytes=draft.layout.num_bytes,
            step=coming.step,
            micro_step=coming.micro_step,
            epoch=coming.epoch,
            bucket=coming.bucket.name,
            latent_kind=self._latent_kind,
        )

    def _draft(self, coming: Coming) -> Draft:
        """Work out a micro-batch, and with it those that were located with it, but for those that come from the disk.

        Raises:
            StoreError: where this one cannot be; what another one fails at is met again in its own turn.
        """
        with self._drafting:
            if coming.draft is not None:
                return coming.draft
            if coming.is_cold:
                return self._drafter.draft([coming], plainly=True)[0]
            todo = [other for other in coming.window if other is not coming and other.draft is None and not other.is_cold]
            together = sorted([coming, *todo], key=lambda own: own.bucket.name)
            coming.window.clear()  # they all hold it
            try:
                drafts = self._drafter.draft(together, plainly=False)
            except StoreError:
                return self._drafter.draft([coming], plainly=False)[0]
            for own, draft in zip(together, drafts, strict=True):
                own.draft = draft
            return drafts[together.index(coming)]
