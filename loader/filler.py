"""Filling slabs: what a rank reads at a step, located, asked for ahead, and gathered into a ring's memory.

Letters: B rows of a micro-batch, V captions a sample at most, L tokens (padded).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from bucketline.errors import CorruptError, StoreError
from bucketline.loader.blame import name_sample
from bucketline.loader.captions import EMPTY, choose_captions
from bucketline.loader.draws import row_keys
from bucketline.loader.gather import TORCH_DTYPES, Aim, Gather, as_bytes
from bucketline.loader.plan import slice_of_rank
from bucketline.loader.ring import Field, carve, lay_out
from bucketline.store.block import CAPTIONS, CROP, ID, ORIGINAL_SIZE
from bucketline.store.file_gather import FileGather, check_rows
from bucketline.store.text_block import EMPTY_CAPTION_ROW

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from bucketline.loader.config import LoaderConfig
    from bucketline.loader.plan import Plan
    from bucketline.store import Bucket, Store
    from bucketline.store.reader import Located, LocatedCaptions

LATENT = "latent"
_ROW_COLUMNS = {"latents": LATENT, "original_size": ORIGINAL_SIZE, "crop": CROP, "ids": ID}
_AIMED = (*_ROW_COLUMNS.values(), CAPTIONS)
_IDS = (torch.uint8, (16,))  # a batch has the digests as bytes, a block as two integers


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
    aims: dict[str, Aim]  # by column, where a copy is all that is left to do
    is_cold: bool = False  # asked for ahead, because it must come from the disk
    captions: LocatedCaptions | None = None  # known once the rows' caption numbers were read


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
        self, store: Store, plan: Plan, config: LoaderConfig, rank: int, world_size: int, *, gather: Gather | None = None
    ) -> None:
        """Work out what batches look like. `gather`: one over the same store that others use as well; its own unless given."""
        self._store, self._plan, self._config = store, plan, config
        self._share = slice_of_rank(rank, world_size, config.batch_size * config.accumulation * world_size)
        self._gather = gather or Gather(store, plain_reads=config.plain_reads)
        self._buckets = {bucket.name: bucket for bucket in store.buckets(config.split)}
        self._fields = {name: self._lay_out(bucket) for name, bucket in self._buckets.items()}
        self.slab_bytes = max(num_bytes for _, num_bytes in self._fields.values())

    def _lay_out(self, bucket: Bucket) -> tuple[list[Field], int]:
        size, length = self._config.batch_size, self._store.max_tokens
        token_column = self._store.text.tokens[0]
        columns = {field: bucket.spec.column(name) for field, name in _ROW_COLUMNS.items()}
        forms = {field: (TORCH_DTYPES[column.dtype], column.shape) for field, column in columns.items()} | {"ids": _IDS}
        rows = [(field, dtype, (size, *shape)) for field, (dtype, shape) in forms.items()]
        text = [
            ("tokens", TORCH_DTYPES[token_column.dtype], (size, length, *token_column.shape)),
            ("token_mask", torch.bool, (size, length)),
        ]
        return lay_out([*rows, *text, ("weight", torch.float32, (size,)), ("keys", torch.int64, (size,))])

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
        aims: dict[tuple[int, int], dict[str, Aim]] = {pair: {} for pair in steps}
        size = self._config.batch_size
        for name, own in by_bucket.items():
            rows = np.concatenate([planned[pair[0]].rows[share[pair]] for pair in own])
            try:
                whole = self._buckets[name].locate(rows)
                aimed = {column: self._gather.aim(whole, self._buckets[name].spec.column(column)) for column in _AIMED}
            except StoreError as error:
                bucket = self._buckets[name]
                # one by one they will be tried again (`Lookahead`); then the sample is looked for
                blamed = "" if len(own) > 1 else self._blame(bucket, rows, partial(self._locate_row, bucket, rows))
                raise type(error)(f"step {own[0][0]}, bucket {name}: {blamed}{error}") from error
            for n, pair in enumerate(own):
                located[pair] = whole.part(n * size, (n + 1) * size)
                aims[pair] = {c: aim.part(n * size, (n + 1) * size) for c, aim in aimed.items() if aim is not None}
        return [
            Coming(
                step=step,
                micro_step=micro_step,
                epoch=planned[step].epoch,
                bucket=self._buckets[planned[step].bucket],
                rows=planned[step].rows[share[step, micro_step]],
                weight=planned[step].weight[share[step, micro_step]],
                keys=row_keys(self._config.seed, step, share[step, micro_step]),
                located=located[step, micro_step],
                aims=aims[step, micro_step],
            )
            for step, micro_step in steps
        ]

    def _positions(self, micro_step: int) -> NDArray[np.int64]:
        begin = self._share.start + micro_step * self._config.batch_size
        return np.arange(begin, begin + self._config.batch_size, dtype=np.int64)

    def ask_rows(self, coming: Coming) -> None:
        """Ask the kernel to read a micro-batch's rows."""
        coming.is_cold = True
        self._gather.ahead(coming.located)

    def ask_starts(self, coming: Coming) -> None:
        """Choose the captions, out of rows that have been asked for, and ask for what says where their tokens are."""
        self._gather.ahead_starts(self._captions(coming))

    def ask_tokens(self, coming: Coming) -> None:
        """Ask for the captions' tokens, by `starts` that have been asked for."""
        self._gather.ahead_tokens(self._captions(coming), self._store.text.tokens[0])

    def fill(self, slab: Tensor, coming: Coming) -> Filled:
        """Gather one micro-batch into a slab.

        Raises:
            StoreError: naming the step and bucket, where a caption cannot be found or a shard's file is gone.
            CorruptError: likewise, where `verify` finds a row or caption that is not what was written.
        """
        bucket, located = coming.bucket, coming.located
        fields, num_bytes = self._fields[bucket.name]
        tensors = carve(slab, fields)
        try:
            for field, name in _ROW_COLUMNS.items():
                if coming.is_cold or name not in coming.aims:
                    self._gather.rows(located, bucket.spec.column(name), tensors[field], is_cold=coming.is_cold)
                else:
                    self._gather.take(coming.aims[name], tensors[field])
            captions, column = self._captions(coming), self._store.text.tokens[0]
            self._gather.tokens(captions, column, tensors["tokens"], tensors["token_mask"], is_cold=coming.is_cold)
            if self._config.verify:
                self._verify_rows(coming, tensors)
                self._verify_tokens(captions, tensors)
        except StoreError as error:
            # a checksum that is wrong has named its sample
            blamed = "" if "sample '" in str(error) else self._blame(bucket, coming.rows, partial(self._read_row, coming))
            raise type(error)(f"step {coming.step}, bucket {bucket.name}: {blamed}{error}") from error
        tensors["weight"].copy_(torch.from_numpy(coming.weight))
        tensors["keys"].copy_(torch.from_numpy(coming.keys))
        return Filled(
            slab=slab,
            fields=fields,
            num_bytes=num_bytes,
            step=coming.step,
            micro_step=coming.micro_step,
            epoch=coming.epoch,
            bucket=bucket.name,
        )

    def _blame(self, bucket: Bucket, rows: NDArray[np.int64], read: Callable[[int], object]) -> str:
        return name_sample(self._store, bucket, rows, read)

    def _locate_row(self, bucket: Bucket, rows: NDArray[np.int64], n: int) -> None:
        """Locate one row and read the least of it, only to see whether that can be done."""
        column = bucket.spec.column(ID)
        FileGather(self._store).rows(
            bucket.locate(rows[n : n + 1]), column, np.empty((1, *column.shape), dtype=column.numpy_dtype)
        )

    def _read_row(self, coming: Coming, n: int) -> None:
        """Read one row of a micro-batch and its caption, by plain reads, only to see whether they can be read."""
        located, files = coming.located.part(n, n + 1), FileGather(self._store)
        for name in _AIMED:
            column = coming.bucket.spec.column(name)
            files.rows(located, column, np.empty((1, *column.shape), dtype=column.numpy_dtype))
        captions = self._gather.caption_rows(located)
        chosen = choose_captions((captions >= 0).sum(axis=1), coming.keys[n : n + 1], self._config.caption_dropout)
        row = EMPTY_CAPTION_ROW if chosen[0] == EMPTY else int(captions[0, chosen[0]])
        self._store.caption(int(located.shard[0]), row)

    def _captions(self, coming: Coming) -> LocatedCaptions:
        """Draw one of each sample's captions, or the empty one, and locate them."""
        if coming.captions is None:
            rows = self._gather.caption_rows(coming.located, coming.aims.get(CAPTIONS))
            chosen = choose_captions((rows >= 0).sum(axis=1), coming.keys, self._config.caption_dropout)
            caption = np.where(chosen == EMPTY, EMPTY_CAPTION_ROW, rows[np.arange(len(rows)), chosen])
            coming.captions = self._store.locate_captions(coming.located.shard, caption)
        return coming.captions

    def _verify_rows(self, coming: Coming, tensors: Mapping[str, Tensor]) -> None:
        """Hold what was gathered, and the rows' other columns, against the rows' checksums."""
        delivered = {name: as_bytes(tensors[field]) for field, name in _ROW_COLUMNS.items()}
        for column in coming.bucket.columns:
            if column.name not in delivered:
                other = torch.empty((len(coming.rows), column.row_bytes), dtype=torch.uint8)
                self._gather.rows(coming.located, column, other)
                delivered[column.name] = other.numpy()
        check_rows(self._store, coming.located, delivered)

    def _verify_tokens(self, captions: LocatedCaptions, tensors: Mapping[str, Tensor]) -> None:
        """Hold the tokens that were gathered against captions that are read and checked one by one."""
        name, tokens = self._store.text.tokens[0].name, as_bytes(tensors["tokens"])
        for n, (shard, row) in enumerate(zip(captions.shard.tolist(), captions.row.tolist(), strict=True)):
            expected = self._store.caption(shard, row).tokens[name]
            if tokens[n, : len(expected)].tobytes() != expected:
                raise CorruptError(
                    f"shard {self._store.shards[shard].name}, caption {row}: its tokens changed while they were read"
                )
