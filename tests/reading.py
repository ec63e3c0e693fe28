"""Reading a whole store back, so that what it holds can be compared with what was put in, or with what it was before."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from bucketline.store.format.block import CAPTIONS, CHECKSUM
from tests.building import embedding

if TYPE_CHECKING:
    from bucketline.store import SampleRecord, Store
    from tests.building import Sample


@dataclass(frozen=True, kw_only=True)
class Held:
    """One sample as a store gives it; what depends on the shard it is in is followed, not kept."""

    record: SampleRecord  # without row and caption rows
    columns: dict[str, bytes]  # without checksum and caption rows
    captions: tuple[bytes, ...]  # each caption's tokens, in the row's order


def everything(store: Store) -> dict[str, list[Held]]:
    """Return all live rows, in order, by bucket; each is held against its checksum, and found by its id and by its number."""
    return {bucket.name: _rows(store, bucket.name) for bucket in store.buckets()}


def _rows(store: Store, name: str) -> list[Held]:
    bucket = store.bucket(name)
    rows = np.arange(bucket.num_rows)
    located, ids = bucket.locate(rows), bucket.sample_ids(rows)
    # a verified read of one column reads its whole row
    columns = {column.name: bucket.read(rows, column.name, verify=column.name == CHECKSUM) for column in bucket.columns}
    held = []
    for n, sample_id in enumerate(ids):
        shard, record = store.sample(sample_id)
        ordinal = int(located.shard[n])
        assert shard is store.shards[ordinal]
        assert (record.id, record.bucket, record.row) == (sample_id, name, int(located.row[n]))
        caption_rows = [row for row in columns[CAPTIONS][n].tolist() if row >= 0]
        assert tuple(caption_rows) == record.caption_rows
        held.append(
            Held(
                record=replace(record, row=0, caption_rows=()),
                columns={key: own[n].tobytes() for key, own in columns.items() if key not in (CHECKSUM, CAPTIONS)},
                captions=tuple(store.read_caption(ordinal, row)["tokens"].tobytes() for row in caption_rows),
            )
        )
    return held


def by_id(store: Store) -> dict[str, Held]:
    """Return all live samples by id."""
    return {held.record.id: held for rows in everything(store).values() for held in rows}


def is_sample(held: Held, sample: Sample) -> bool:
    """Return whether what a store holds is what was put in."""
    return (
        held.record == sample.record
        and held.columns["latent"] == sample.latent.tobytes()
        and held.captions == tuple(embedding(text).tobytes() for text in sample.captions or ("",))
    )
