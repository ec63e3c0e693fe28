"""ArrayRecord read with Grain: one file per bucket, shuffled, unpacked and batched; then the buckets' batches are shuffled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grain
import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter

from bucketline.bench.peers.formats.raw_value import pack, unpack
from bucketline.bench.peers.gate import PeerBatch
from bucketline.bench.peers.peer import Opened
from bucketline.bench.peers.samples import sample

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from bucketline.bench.peers.peer import Way
    from bucketline.bench.peers.samples import SetShape


class _Unpack:
    """Unpacks a record into arrays of one shape, with padded tokens, so that Grain's own batching can stack them."""

    def __init__(self, shape: SetShape) -> None:
        self._shape = shape

    def __call__(self, record: bytes) -> dict[str, Any]:
        own = unpack(record, self._shape)
        length, most = len(own.tokens), self._shape.max_tokens
        tokens = np.zeros((most, self._shape.token_width), dtype=np.float16)
        tokens[:length] = own.tokens
        sizes = {"original_size": own.original_size, "crop": own.crop}
        return {"number": own.number, "latent": own.latent, "tokens": tokens, "mask": np.arange(most) < length, **sizes}


class ArrayRecord:
    """One file per bucket, with records in groups of one, as random access requires."""

    def write(self, shape: SetShape, folder: Path) -> None:
        for bucket in range(len(shape.buckets)):
            writer = ArrayRecordWriter(str(folder / f"{bucket}.arrayrecord"), "group_size:1")
            for number in shape.numbers(bucket):
                writer.write(pack(sample(shape, number)))
            writer.close()

    def open(self, shape: SetShape, folder: Path, way: Way) -> Opened:
        buckets = [
            grain.MapDataset.source(grain.sources.ArrayRecordDataSource(str(folder / f"{bucket}.arrayrecord")))
            .shuffle(seed=bucket)
            .map(_Unpack(shape))
            .batch(shape.batch_size)
            for bucket in range(len(shape.buckets))
        ]
        batches = grain.MapDataset.concatenate(buckets).shuffle(seed=0)
        options = grain.ReadOptions(num_threads=way.threads) if way.threads else grain.ReadOptions()
        dataset = batches.to_iter_dataset(options)
        if way.workers:
            dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=way.workers))

        def begin() -> Iterator[PeerBatch]:
            for batch in dataset:
                yield PeerBatch(**{name: np.asarray(batch[name]) for name in PeerBatch._fields})

        return Opened(begin=begin)
