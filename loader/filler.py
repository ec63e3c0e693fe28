"""Filling slabs: what a rank reads at a step, gathered into a ring's memory, one micro-batch at a time.

Letters: B rows of a micro-batch, V captions a sample at most, L tokens (padded).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from bucketline.errors import StoreError
from bucketline.loader.captions import EMPTY, choose_captions
from bucketline.loader.draws import row_keys
from bucketline.loader.gather import TORCH_DTYPES, Gather
from bucketline.loader.plan import slice_of_rank
from bucketline.loader.ring import Field, carve, lay_out
from bucketline.store.block import CROP, ID, ORIGINAL_SIZE
from bucketline.store.text_block import EMPTY_CAPTION_ROW

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from bucketline.loader.config import LoaderConfig
    from bucketline.loader.plan import Plan
    from bucketline.store import Bucket, Store
    from bucketline.store.reader import Located

LATENT = "latent"
_ROW_COLUMNS = {"latents": LATENT, "original_size": ORIGINAL_SIZE, "crop": CROP, "ids": ID}
_IDS = (torch.uint8, (16,))  # a batch has the digests as bytes, a block as two integers


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

    def __init__(self, store: Store, plan: Plan, config: LoaderConfig, rank: int, world_size: int) -> None:
        self._store, self._plan, self._config = store, plan, config
        self._share = slice_of_rank(rank, world_size, config.batch_size * config.accumulation * world_size)
        self._gather = Gather(store)
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

    def fill(self, slab: Tensor, step: int, micro_step: int) -> Filled:
        """Gather one micro-batch into a slab.

        Raises:
            StoreError: naming the step and bucket, where a row cannot be found or a shard's file is gone.
        """
        planned = self._plan.at(step)
        size = self._config.batch_size
        share = range(self._share.start + micro_step * size, self._share.start + (micro_step + 1) * size)
        positions = np.array(share, dtype=np.int64)
        bucket = self._buckets[planned.bucket]
        fields, num_bytes = self._fields[planned.bucket]
        tensors = carve(slab, fields)
        keys = row_keys(self._config.seed, step, positions)
        try:
            located = bucket.locate(planned.rows[positions])
            for field, name in _ROW_COLUMNS.items():
                self._gather.rows(located, bucket.spec.column(name), tensors[field])
            captions = self._choose_captions(located, keys)
            column = self._store.text.tokens[0]
            self._gather.tokens(located.shard, captions, column, tensors["tokens"], tensors["token_mask"])
        except StoreError as error:
            raise type(error)(f"step {step}, bucket {planned.bucket}: {error}") from error
        tensors["weight"].copy_(torch.from_numpy(planned.weight[positions]))
        tensors["keys"].copy_(torch.from_numpy(keys))
        return Filled(
            slab=slab,
            fields=fields,
            num_bytes=num_bytes,
            step=step,
            micro_step=micro_step,
            epoch=planned.epoch,
            bucket=planned.bucket,
        )

    def _choose_captions(self, located: Located, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Draw one of each sample's captions, or the empty one: caption rows of the sample's shard, `[B]`."""
        rows = self._gather.caption_rows(located)
        chosen = choose_captions((rows >= 0).sum(axis=1), keys, self._config.caption_dropout)
        return np.where(chosen == EMPTY, EMPTY_CAPTION_ROW, rows[np.arange(len(rows)), chosen])
