"""LitData: `optimize` writes chunks of one bucket's samples; `CombinedStreamingDataset` returns batches of one bucket each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from litdata import CombinedStreamingDataset, StreamingDataLoader, StreamingDataset, optimize

from bucketline.bench.peers.formats.torch_dataloader import Stack, as_torch, opened
from bucketline.bench.peers.samples import sample

if TYPE_CHECKING:
    from pathlib import Path

    from bucketline.bench.peers.peer import Opened, Way
    from bucketline.bench.peers.samples import SetShape


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
        buckets = [StreamingDataset(str(folder / str(at)), shuffle=True, drop_last=False) for at in range(len(shape.buckets))]
        loader = StreamingDataLoader(
            CombinedStreamingDataset(buckets, iterate_over_all=True, batching_method="per_stream"),
            batch_size=shape.batch_size,
            num_workers=way.workers,
            collate_fn=Stack(shape.max_tokens),
            persistent_workers=way.workers > 0,
        )
        return opened(lambda: loader)
