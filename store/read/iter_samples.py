"""Iterate over a store's live samples by shard, then bucket, then row.

They are found through the indexes, without reading rows. Memory use: 4 bytes for each row of one bucket of one shard.
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bucketline.errors import CorruptError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from bucketline.store.format.sample_record import SampleRecord
    from bucketline.store.read.store import Store
    from bucketline.store.shard.reader import SealedShard

NOWHERE = (1 << 32) - 1  # larger than any position
CHUNK_ROWS = 1 << 12  # index rows searched at a time
ENTRIES = 256  # index entries read at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """A filter on samples; None matches all."""

    split: str | None = None
    bucket: str | None = None  # by name
    match: str | None = None  # id pattern with *, ? and []; * also matches slashes


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One live sample and its location."""

    shard: int  # ordinal in the store
    row: int  # in the store's bucket, as `Bucket.read` and `Bucket.read_ragged` take it; `record.row` is that in the shard
    record: SampleRecord


def buckets_of(store: Store, selection: Selection) -> list[str]:
    """Return the sorted names of the selected buckets."""
    if selection.bucket is not None:
        store.bucket(selection.bucket)
    return sorted(
        bucket.name for bucket in store.buckets(selection.split) if selection.bucket is None or bucket.name == selection.bucket
    )


def live_samples(store: Store, selection: Selection) -> Iterator[Listed]:
    """Yield the selected live samples in the store's order."""
    names = buckets_of(store, selection)
    pattern = None if selection.match is None else re.compile(fnmatch.translate(selection.match))
    before = dict.fromkeys(names, 0)
    for ordinal, shard in enumerate(store.shards):
        for name in names:
            if name not in shard.entry.groups:
                continue
            positions = live_positions(shard, name)
            for first in range(0, len(positions), ENTRIES):
                entries = shard.index_entries(positions[first : first + ENTRIES].astype(np.int64))
                for rank, entry in enumerate(entries, first):
                    record = shard.record(entry)
                    if pattern is None or pattern.fullmatch(record.id):
                        yield Listed(shard=ordinal, row=before[name] + rank, record=record)
            before[name] += len(positions)


def live_positions(shard: SealedShard, bucket: str) -> NDArray[np.uint32]:
    """Return the index positions of a bucket's live rows, in row order."""
    group = shard.entry.groups[bucket]
    names = shard.index.metadata.get("groups", [])
    number = names.index(bucket) if bucket in names else NOWHERE
    at = np.full(group.rows, NOWHERE, dtype="<u4")
    for begin in range(0, shard.entry.samples, CHUNK_ROWS):
        end = min(begin + CHUNK_ROWS, shard.entry.samples)
        here = np.flatnonzero(shard.index.slice("bucket", begin, end) == number)
        rows = shard.index.slice("row", begin, end)[here]
        if len(rows) and int(rows.max()) >= group.rows:
            raise CorruptError(f"{shard.paths.index}: has row {int(rows.max())} of {bucket}, the shard has {group.rows} rows")
        at[rows] = begin + here
    live = shard.is_live(bucket)
    if (at == NOWHERE).any() or int(live.sum()) != group.live:
        raise CorruptError(f"{shard.paths.index}: does not list every row of {bucket} once; run `store verify`")
    return at[live]
