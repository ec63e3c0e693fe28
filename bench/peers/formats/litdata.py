"""LitData: `optimize` writes chunks of one bucket's samples; `CombinedStreamingDataset` returns batches of one bucket each."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from litdata import CombinedStreamingDataset, StreamingDataLoader, StreamingDataset, optimize
from litdata.streaming import downloader

from bucketline.bench.peers.formats.s3_client import S3_CLIENT
from bucketline.bench.peers.formats.torch_dataloader import Stack, as_torch, opened
from bucketline.bench.peers.samples import sample

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from bucketline.bench.peers.peer import Opened, Remote, Way
    from bucketline.bench.peers.samples import SetShape


_OPTIONS: dict[str, Any] = {"shuffle": True, "drop_last": False}


class _Made:
    """Makes samples; `optimize` calls it in its own processes."""

    def __init__(self, shape: SetShape) -> None:
        self._shape = shape

    def __call__(self, number: int) -> dict[str, Any]:
        return as_torch(sample(self._shape, number))


class LitData:
    """One folder of chunks per bucket."""

    def write(self, shape: SetShape, folder: Path) -> None:
        for bucket in range(len(shape.buckets)):
            optimize(
                fn=_Made(shape),
                inputs=list(shape.numbers(bucket)),
                output_dir=str(folder / str(bucket)),
                chunk_bytes="64MB",
                num_workers=1,
            )

    def open(self, shape: SetShape, folder: Path, way: Way) -> Opened:
        return self._opened(
            shape, [StreamingDataset(str(folder / str(at)), **_OPTIONS) for at in range(len(shape.buckets))], way
        )

    def stream(self, shape: SetShape, remote: Remote, way: Way) -> Opened:
        """Open its chunks by S3: each bucket's data set has a cache of its own, with its share of the bytes.

        Its options of obstore, which it prefers for chunks, are constants that refuse a server without TLS.
        """
        os.environ.update(S3_CLIENT)
        downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True
        buckets = [
            StreamingDataset(
                f"{remote.s3}/{at}",
                cache_dir=f"{remote.cache}/{at}",
                max_cache_size=remote.cache_bytes // len(shape.buckets),
                storage_options={"endpoint_url": remote.endpoint},
                **_OPTIONS,
            )
            for at in range(len(shape.buckets))
        ]
        return self._opened(shape, buckets, way)

    def _opened(self, shape: SetShape, buckets: Sequence[StreamingDataset], way: Way) -> Opened:
        loader = StreamingDataLoader(
            CombinedStreamingDataset(list(buckets), iterate_over_all=True, batching_method="per_stream"),
            batch_size=shape.batch_size,
            num_workers=way.workers,
            collate_fn=Stack(shape.max_tokens),
            persistent_workers=way.workers > 0,
        )
        return opened(lambda: loader)
