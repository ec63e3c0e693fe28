"""WebDataset: tar shards of one bucket each, batched in the pipeline; the buckets' pipelines are mixed at random."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import webdataset
from webdataset.cache import url_to_cache_name

from bucketline.bench.peers.formats.torch_dataloader import opened, stack_arrays
from bucketline.bench.peers.samples import sample

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from bucketline.bench.peers.peer import Opened, Remote, Way
    from bucketline.bench.peers.samples import SetShape

SHARDS = 2  # per bucket, at least: one for each worker process
SHARD_BATCHES = 8  # maximum per shard
SHUFFLE_BUFFER = 256  # samples


class WebDataset:
    """Tar files of complete batches each: workers divide up entire tar files, so they deliver only full batches."""

    def write(self, shape: SetShape, folder: Path) -> None:
        for bucket in range(len(shape.buckets)):
            numbers = shape.numbers(bucket)
            pattern, rows = str(folder / f"{bucket}-%06d.tar"), _rows_of_shard(shape, len(numbers))
            with webdataset.ShardWriter(pattern, maxcount=rows, maxsize=1 << 40, verbose=0) as sink:
                for number in numbers:
                    own = sample(shape, number)
                    about = {"number": number, "original_size": own.original_size.tolist(), "crop": own.crop.tolist()}
                    sink.write(
                        {"__key__": f"{number:08d}", "latent.npy": own.latent, "tokens.npy": own.tokens, "about.json": about}
                    )

    def open(self, shape: SetShape, folder: Path, way: Way) -> Opened:
        buckets = range(len(shape.buckets))
        return self._opened(shape, [sorted(map(str, folder.glob(f"{bucket}-*.tar"))) for bucket in buckets], way, {})

    def stream(self, shape: SetShape, remote: Remote, way: Way) -> Opened:
        """Open its tar files by HTTP, through `curl`, as it does; its cleaning of the cache waits for half a minute to pass."""
        urls = []
        for bucket, (_, _, rows) in enumerate(shape.buckets):
            shards = -(-rows // _rows_of_shard(shape, rows))
            urls.append([f"{remote.http}/{bucket}-{n:06d}.tar" for n in range(shards)])
        cache = {"cache_dir": remote.cache, "cache_size": remote.cache_bytes, "url_to_name": url_to_cache_name}
        return self._opened(shape, urls, way, cache)

    def _opened(self, shape: SetShape, urls_of_buckets: Sequence[Sequence[str]], way: Way, cache: Mapping[str, Any]) -> Opened:
        pipelines = []
        for urls in urls_of_buckets:
            pipeline = (
                webdataset.WebDataset(urls, shardshuffle=len(urls), empty_check=False, **cache)
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


def _rows_of_shard(shape: SetShape, rows_of_bucket: int) -> int:
    return shape.batch_size * min(SHARD_BATCHES, max(1, rows_of_bucket // shape.batch_size // SHARDS))


def _collated(shape: SetShape) -> Callable[[Sequence[Any]], dict[str, Tensor]]:
    stack = stack_arrays(shape)

    def collate(samples: Sequence[Any]) -> dict[str, Tensor]:
        return stack([{**about, "latent": latent, "tokens": tokens} for about, latent, tokens in samples])

    return collate
