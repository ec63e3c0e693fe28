"""WebDataset: tar shards of one bucket each, batched in the pipeline; the buckets' pipelines are mixed at random."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import webdataset

from bucketline.bench.peers.formats.torch_dataloader import opened, stack_arrays
from bucketline.bench.peers.samples import sample

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor

    from bucketline.bench.peers.peer import Opened, Way
    from bucketline.bench.peers.samples import SetShape

SHARDS = 2  # per bucket, at least: one for each worker process
SHARD_BATCHES = 8  # maximum per shard
SHUFFLE_BUFFER = 256  # samples


class WebDataset:
    """Tar files of complete batches each: workers divide up entire tar files, so they deliver only full batches."""

    def write(self, shape: SetShape, folder: Path) -> None:
        for bucket in range(len(shape.buckets)):
            numbers = shape.numbers(bucket)
            batches = min(SHARD_BATCHES, max(1, len(numbers) // shape.batch_size // SHARDS))
            pattern = str(folder / f"{bucket}-%06d.tar")
            with webdataset.ShardWriter(pattern, maxcount=batches * shape.batch_size, maxsize=1 << 40, verbose=0) as sink:
                for number in numbers:
                    own = sample(shape, number)
                    about = {"number": number, "original_size": own.original_size.tolist(), "crop": own.crop.tolist()}
                    sink.write(
                        {"__key__": f"{number:08d}", "latent.npy": own.latent, "tokens.npy": own.tokens, "about.json": about}
                    )

    def open(self, shape: SetShape, folder: Path, way: Way) -> Opened:
        pipelines = []
        for bucket in range(len(shape.buckets)):
            urls = sorted(str(path) for path in folder.glob(f"{bucket}-*.tar"))
            pipeline = (
                webdataset.WebDataset(urls, shardshuffle=len(urls), empty_check=False)
                .shuffle(SHUFFLE_BUFFER)
                .decode()
                .to_tuple("about.json", "latent.npy", "tokens.npy")
                .batched(shape.batch_size, collation_fn=_collated(shape))
            )
            pipelines.append(pipeline)
        mixed = webdataset.RandomMix(pipelines, [rows for _, _, rows in shape.buckets], longest=True)
        loader = webdataset.WebLoader(
            mixed, batch_size=None, num_workers=way.workers, persistent_workers=way.workers > 0, shuffle=False
        )
        return opened(lambda: loader)


def _collated(shape: SetShape) -> Callable[[Sequence[Any]], dict[str, Tensor]]:
    stack = stack_arrays(shape)

    def collate(samples: Sequence[Any]) -> dict[str, Tensor]:
        return stack([{**about, "latent": latent, "tokens": tokens} for about, latent, tokens in samples])

    return collate
