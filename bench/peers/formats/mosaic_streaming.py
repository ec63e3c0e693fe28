"""MosaicML Streaming: MDS shards, one stream per bucket, `batching_method="per_stream"`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from bucketline.bench.peers.formats.importable import make_torchvision_importable
from bucketline.bench.peers.formats.s3_client import S3_CLIENT
from bucketline.bench.peers.formats.torch_dataloader import opened, stack_arrays
from bucketline.bench.peers.samples import sample

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from bucketline.bench.peers.peer import Opened, Remote, Way
    from bucketline.bench.peers.samples import SetShape


make_torchvision_importable()

from streaming import MDSWriter, Stream, StreamingDataLoader, StreamingDataset  # noqa: E402
from streaming.base.util import clean_stale_shared_memory  # noqa: E402

__all__ = ["MDSWriter", "Mds", "StreamingDataset", "clean_stale_shared_memory"]


class Mds:
    """One folder of MDS shards per bucket, with declared dtypes and fixed shapes."""

    def write(self, shape: SetShape, folder: Path) -> None:
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
        return self._opened(shape, [Stream(local=str(folder / str(bucket))) for bucket in range(len(shape.buckets))], way)

    def stream(self, shape: SetShape, remote: Remote, way: Way) -> Opened:
        """Open its shards by S3, with the limit of its cache."""
        os.environ.update(S3_CLIENT, S3_ENDPOINT_URL=remote.endpoint)
        streams = [Stream(remote=f"{remote.s3}/{at}", local=f"{remote.cache}/{at}") for at in range(len(shape.buckets))]
        return self._opened(shape, streams, way, cache_limit=remote.cache_bytes)

    def _opened(self, shape: SetShape, streams: Sequence[Stream], way: Way, cache_limit: int | None = None) -> Opened:
        clean_stale_shared_memory()  # as its documentation requires if an earlier process was killed
        dataset = StreamingDataset(
            streams=streams,
            batch_size=shape.batch_size,
            shuffle=True,
            batching_method="per_stream",
            cache_limit=cache_limit,
        )
        loader = StreamingDataLoader(
            dataset,
            batch_size=shape.batch_size,
            num_workers=way.workers,
            collate_fn=stack_arrays(shape),
            persistent_workers=way.workers > 0,
        )
        return opened(lambda: loader)
