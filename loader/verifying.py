"""Holding a filled micro-batch against its rows' and captions' checksums. Letters: B rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from bucketline.errors import CorruptError
from bucketline.loader.batch import FIXED_PREFIX
from bucketline.loader.conditioning import FLIPPED
from bucketline.loader.config import LATENT
from bucketline.loader.gather import as_bytes
from bucketline.loader.ring import carve
from bucketline.store.file_gather import check_rows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray
    from torch import Tensor

    from bucketline.loader.drafting import Draft
    from bucketline.loader.filler import Coming
    from bucketline.loader.gather import Gather
    from bucketline.store.reader import OpenShards


def verify_batch(store: OpenShards, gather: Gather, coming: Coming, draft: Draft, slab: Tensor) -> None:
    """Hold what was gathered into a slab against the store's checksums.

    Raises:
        CorruptError: naming the first sample, or caption, whose bytes are not those that were written.
    """
    tensors = carve(slab, draft.layout.fields)
    check_rows(store, coming.located, _whole_rows(gather, coming, draft, tensors))
    _check_captions(store, draft, tensors)


def _whole_rows(gather: Gather, coming: Coming, draft: Draft, tensors: Mapping[str, Tensor]) -> dict[str, NDArray[np.uint8]]:
    """Give all columns of the rows, `[B, row_bytes]` each: what was gathered, where it was, and the others read for this."""
    made = draft.evidence
    columns = {name: values[made.begin : made.end] for name, values in made.stored.items()}
    for column in coming.bucket.columns:
        if column.name not in columns:
            out = torch.empty((len(coming.keys), column.row_bytes), dtype=torch.uint8)
            gather.rows(coming.located, column, out)
            columns[column.name] = out.numpy()
    delivered, flipped = as_bytes(tensors["latents"]), tensors["flipped"].numpy()
    for name, own in ((LATENT, ~flipped), (FLIPPED, flipped)):
        if own.any():
            columns[name][own] = delivered[own]
    return columns


def _check_captions(store: OpenShards, draft: Draft, tensors: Mapping[str, Tensor]) -> None:
    """Compare the captions with what is read and checked one by one."""
    column, made = store.text.tokens[0], draft.evidence
    captions = made.captions.part(made.begin, made.end)
    tokens = as_bytes(tensors["tokens"])
    fixed = {own.name: as_bytes(tensors[FIXED_PREFIX + own.name]) for own in store.text.fixed}
    for n, (shard, row) in enumerate(zip(captions.shard.tolist(), captions.row.tolist(), strict=True)):
        expected = store.caption(shard, row)
        own = expected.tokens[column.name]
        is_same = tokens[n, : len(own)].tobytes() == own and not np.any(tokens[n, len(own) :])
        if not is_same or any(fixed[name][n].tobytes() != value for name, value in expected.fixed.items()):
            raise CorruptError(f"shard {store.shards[shard].name}, caption {row}: its embedding changed while it was read")
