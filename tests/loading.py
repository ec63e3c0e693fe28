"""The rows of a store as training gets them: planned, copied into buffers, and delivered by loaders of this process."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.loader import Loader, LoaderConfig
from bucketline.loader.collate.columns import choose_captions
from bucketline.store.format.block import CAPTIONS
from bucketline.torch_dtypes import as_stored

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from bucketline.loader import Batch
    from bucketline.store import Store

Rows = dict[str, "NDArray[Any]"]  # a batch's tensors, by field name, `[rows, …]` each


def loaders_of(store: Store, **options: Any) -> list[Loader]:
    """Return a loader for each split; unless `options` differ, an epoch of it has every row once, and in order."""
    splits = dict.fromkeys(bucket.name.partition("/")[0] for bucket in store.buckets() if bucket.num_rows)
    asked = {"batch_size": 8, "rewind": True, "window": 0, "remainder": "partial", **options}
    return [Loader(store, LoaderConfig(split=split, **asked)) for split in splits]


def rows_of(loaders: Sequence[Loader], max_batches: int | None = None) -> dict[str, Rows]:
    """Return one pass of some loaders, by bucket, without the rows that only complete a batch."""
    parts: dict[str, list[Rows]] = {}
    for loader in loaders:
        for batch in islice(loader, max_batches):
            real = batch.weight.numpy() > 0
            parts.setdefault(batch.bucket, []).append({name: as_stored(own)[real] for name, own in batch.by_name().items()})
    return {bucket: {name: np.concatenate([part[name] for part in own]) for name in own[0]} for bucket, own in parts.items()}


def check_batch(store: Store, rows: NDArray[np.int64], batch: Batch) -> None:
    """Compare a batch of some rows of its bucket, `[B]`, with plain reads of each of them."""
    bucket = store.bucket(batch.bucket)
    for name, column in (("latents", "latent"), ("original_size", "original_size"), ("crop", "crop"), ("ids", "id")):
        assert batch.by_name()[name].numpy().tobytes() == bucket.read(rows, column, verify=True).tobytes(), name
    stored = bucket.read(rows, CAPTIONS)
    chosen = choose_captions((stored >= 0).sum(axis=1), batch.keys.numpy())
    for n, (shard, row) in enumerate(zip(bucket.locate(rows).shard.tolist(), stored, strict=True)):
        expected = store.read_caption(shard, int(row[chosen[n]]) if chosen[n] >= 0 else 0)[store.text.tokens[0].name]
        length = len(expected)
        assert batch.token_mask[n].tolist() == [k < length for k in range(batch.tokens.shape[1])]
        assert batch.tokens[n, :length].numpy().tobytes() == expected.tobytes()
        assert not batch.tokens[n, length:].any()
