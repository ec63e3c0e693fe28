"""Which sample a batch failed at: its rows are tried one by one, by plain reads, only after something has gone wrong."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from bucketline.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from bucketline.store import Bucket
    from bucketline.store.reader import OpenShards


def name_sample(store: OpenShards, bucket: Bucket, rows: NDArray[np.int64], read: Callable[[int], object]) -> str:
    """Name the first of a batch's rows, `[B]`, that cannot be read, as the beginning of a message; "" where all can be now.

    `read` reads one of them, by its place in the batch. A sample's id stands in its record: where that cannot be read either,
    shard and row are named.
    """
    for n, row in enumerate(rows.tolist()):
        try:
            read(n)
        except StoreError:
            return f"{_name(store, bucket, row)}: "
    return ""


def _name(store: OpenShards, bucket: Bucket, row: int) -> str:
    ordinal, first = bucket.shard_of(row)
    shard = store.shards[ordinal]
    with suppress(StoreError):
        own = int(store.table.live_rows(bucket.name, np.array([ordinal]), np.array([row - first]))[0])
        name = shard.name_of(bucket.name, own)
        return f"row {own} in shard {shard.name}" if name is None else f"sample {name!r:.200}, row {own} in shard {shard.name}"
    return f"live row {row - first} in shard {shard.name}"
