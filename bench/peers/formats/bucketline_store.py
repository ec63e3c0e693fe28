"""Bucketline in the same form as the peers: a store of the same samples, and the loader over it.

Runs in this project's environment.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import obstore.store  # noqa: F401 - as `remote_source`, what a store at a URL imports once it is opened: imports are not timed

from bucketline.bench.peers.registry import Opened, Remote
from bucketline.bench.peers.samples import PeerBatch, sample
from bucketline.loader import Loader, LoaderConfig
from bucketline.store import Column, LatentColumn, StoreWriter, new_record
from bucketline.store.format.block import sample_digest
from bucketline.store.remote.cache import remote_source  # noqa: F401

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from bucketline.bench.peers.registry import Way
    from bucketline.bench.peers.samples import Sample, SetShape
    from bucketline.loader import Batch

PREFETCH_BYTES = 64 << 20
WARM_BATCHES = 128  # the loader treats the first 64 as cold, and batches planned in the same windows follow
SERVICE = "service"
REMOTE_WINDOW_ROWS = 128
_MAX_CAPTIONS = 1
_NAME = "samples.store"
_MAX_SHARD_BYTES = 1 << 34


class Ours:
    """A store of 16 shards. The option `service` reads it through a private service."""

    num_shards = 16

    def write(self, shape: SetShape, folder: Path) -> None:
        num_shards = min(self.num_shards, shape.num_samples)
        with StoreWriter(
            folder / _NAME,
            encoders={"vae": {"made": "at random"}},
            columns=[LatentColumn(channels=sample(shape, 0).latent.shape[0])],
            text=[Column(name="tokens", dtype="F16", shape=(shape.token_width,))],
            empty_caption={"tokens": np.zeros((1, shape.token_width), dtype=np.float16)},
            max_captions=_MAX_CAPTIONS,
            shard_bytes=_MAX_SHARD_BYTES,
        ) as writer:
            for first in range(num_shards):
                for number in range(first, shape.num_samples, num_shards):
                    _add(writer, sample(shape, number))
                writer.seal()

    def open(self, shape: SetShape, place: Path | Remote, way: Way) -> Opened:
        """Open the store. Passes continue one endless iteration from epoch to epoch, as in training.

        By its URL, few rows are mixed at a time, since the cache is small.
        """
        config = LoaderConfig(batch_size=shape.batch_size, prefetch_bytes=PREFETCH_BYTES, threads=way.threads or 1)
        store: Path | str
        if isinstance(place, Remote):
            store, cache = f"{place.http}/{_NAME}", {"cache": f"{place.cache}/lines", "cache_bytes": str(place.cache_bytes)}
            config = replace(config, window=REMOTE_WINDOW_ROWS, **cache)  # type: ignore[arg-type]
        else:
            store = place / _NAME
        numbers = {sample_digest(sample_id(number)): number for number in range(shape.num_samples)}
        loader = Loader(store, config, service="auto" if way.option == SERVICE else None)
        batches: Iterator[Batch] | None = None

        def begin() -> Iterator[PeerBatch]:
            nonlocal batches
            if batches is None:
                batches = loader.forever()
            for batch in islice(batches, shape.num_batches):
                ids = batch.ids.numpy().tobytes()
                yield PeerBatch(
                    number=np.array([numbers[ids[at : at + 16]] for at in range(0, len(ids), 16)], dtype=np.int64),
                    latent=batch.latents.numpy(),
                    tokens=batch.tokens.numpy(),
                    mask=batch.token_mask.numpy(),
                    original_size=batch.original_size.numpy(),
                    crop=batch.crop.numpy(),
                )

        a_batch = shape.delivered_bytes // shape.num_batches
        return Opened(begin=begin, ready_bytes=lambda: loader.stats().ready * a_batch, warm_batches=WARM_BATCHES)


class OursRemote(Ours):
    """A store as `store push` leaves it, of few shards: lines of all that are read at a time must find room in the cache."""

    num_shards = 2


def sample_id(number: int) -> str:
    """Return a sample's id in the store."""
    return f"s{number:08d}.png"


def _add(writer: StoreWriter, own: Sample) -> None:
    _, height, width = own.latent.shape
    words, size = f"caption {own.number}", (8 * height, 8 * width)
    (top, left), (full_height, full_width) = own.crop.tolist(), own.original_size.tolist()
    record = replace(
        new_record(sample_id(own.number), f"train/{size[0]}x{size[1]}", (words,)),
        original_size=(full_height, full_width),
        resized=(full_height, full_width),
        crop=(top, left, *size),
        crop_in_source=(top, left, *size),
    )
    writer.add_record(record, {"latent": own.latent}, {words: {"tokens": own.tokens}})
