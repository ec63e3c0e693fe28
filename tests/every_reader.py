"""Everything that the readers of a store can read, to see whether it is what it was."""

from __future__ import annotations

import numpy as np

from bucketline.store import Store
from bucketline.store.format.block import bytes_digest
from tests.loading import loaders_of, rows_of

MAX_ROWS = 1000  # of a bucket: a store may lie about how many it has
BATCH_SIZE = 8


def everything(store: Store) -> list[bytes]:
    """Read all of a store in every way there is: by loaders, by plain reads, row by row against checksums, by id."""
    found: list[bytes] = []
    roles = [column.role for column in store.manifest.columns.values() if not column.role.endswith("/flipped")]
    loaders = loaders_of(store, batch_size=BATCH_SIZE, columns=tuple(sorted(roles)) or ("target",))
    loaded = rows_of(loaders, MAX_ROWS // BATCH_SIZE)
    for bucket in store.buckets():
        found += [values.tobytes() for values in loaded.get(bucket.name, {}).values()]
        rows = np.arange(min(bucket.num_rows, MAX_ROWS))
        found += [bucket.read(rows, column.name).tobytes() for column in bucket.columns]
        bucket.read(rows, "latent", verify=True)
        for sample_id in bucket.sample_ids(rows):
            shard, record = store.sample(sample_id)
            ordinal = store.shards.index(shard)
            found.append(repr((record.id, record.captions, record.content)).encode())
            found += [store.caption(ordinal, row).digest for row in record.caption_rows]
    return found


def digest_of_everything(store: Store) -> str:
    """Return a digest of all that there is to read."""
    return bytes_digest(b"".join(everything(store)))
