"""MosaicML Streaming: MDS shards, a stream a bucket, `batching_method="per_stream"`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bucketline.bench.peers.samples import sample
from bucketline.bench.peers.torch_batches import as_torch, opened, stack_arrays

if TYPE_CHECKING:
    from pathlib import Path

    from bucketline.bench.peers.peer import Opened, Way
    from bucketline.bench.peers.samples import SetShape


class Mds:
    """A folder of MDS shards a bucket, their arrays' dtypes and fixed shapes declared."""

    def write(self, shape: SetShape, folder: Path) -> None:
        from streaming import MDSWriter

        for bucket, (height, width, _) in enumerate(shape.buckets):
            columns = {
                "number": "int",
                "latent": f"ndarray:float16:{shape.channels},{height},{width}",
                "tokens": "ndarray:float16",
                "original_size": "ndarray:int32:2",
                "crop": "ndarray:int32:2",
            }
            with MDSWriter(out=str(folder / str(bucket)), columns=columns) as out:
                for number in shape.numbers(bucket):
                    out.write(sample(shape, number)._asdict())

    def open(self, shape: SetShape, folder: Path, way: Way) -> Opened:
        from streaming import Stream, StreamingDataLoader, StreamingDataset
        from streaming.base.util import clean_stale_shared_memory

        clean_stale_shared_memory()  # as its documents ask for, where a process before this one was ended
        dataset = StreamingDataset(
            streams=[Stream(local=str(folder / str(bucket))) for bucket in range(len(shape.buckets))],
            batch_size=shape.batch_size,
            shuffle=True,
            batching_method="per_stream",
        )
        loader = StreamingDataLoader(
            dataset,
            batch_size=shape.batch_size,
            num_workers=way.workers,
            collate_fn=stack_arrays(shape),
            persistent_workers=way.workers > 0,
        )
        return opened(lambda: loader)
