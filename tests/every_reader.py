"""Everything that the readers of a store can read, to see whether it is what it was."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from bucketline.loader.collate.gather import Gather

if TYPE_CHECKING:
    from bucketline.store import Store


def everything(store: Store) -> list[bytes]:
    """Read all of a store in every way there is: by map, by plain reads, row by row against checksums, by id."""
    gather = Gather(store)
    found: list[bytes] = []
    for bucket in store.buckets():
        rows = np.arange(min(bucket.num_rows, 1000))
        located = bucket.locate(rows)
        for column in bucket.columns:
            out = torch.zeros((len(rows), column.row_bytes), dtype=torch.uint8).view(_torch_type(column.dtype))
            gather.rows(located, column, out.view(len(rows), *column.shape))
            found += [out.numpy().tobytes(), bucket.read(rows, column.name).tobytes()]
        captions = gather.caption_rows(located)[:, 0].astype(np.int64)
        tokens = torch.zeros((len(rows), min(store.max_tokens, 100), *store.text.tokens[0].shape), dtype=torch.float16)
        mask = torch.zeros(tokens.shape[:2], dtype=torch.bool)
        gather.tokens(store.locate_captions(located.shard, captions), store.text.tokens[0], tokens, mask)
        found += [tokens.numpy().tobytes(), mask.numpy().tobytes()]
        bucket.read(rows, "latent", verify=True)
        for sample_id in bucket.sample_ids(rows):
            shard, record = store.sample(sample_id)
            ordinal = store.shards.index(shard)
            found.append(repr((record.id, record.captions, record.content)).encode())
            found += [store.caption(ordinal, row).digest for row in record.caption_rows]
    return found


def _torch_type(dtype: str) -> torch.dtype:
    return {"F16": torch.float16, "I32": torch.int32, "U64": torch.int64}[dtype]
