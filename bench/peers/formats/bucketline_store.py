"""Bucketline in the same form as the peers: a store of the same samples, and the loader over it.

Runs in this project's environment.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from bucketline.bench.peers.gate import PeerBatch
from bucketline.bench.peers.peer import Opened
from bucketline.bench.peers.samples import sample
from bucketline.loader import Loader, LoaderConfig
from bucketline.store.format.block import BlockSpec, Column, fixed_columns
from bucketline.store.format.hashing import caption_digest, sample_digest
from bucketline.store.format.manifest import TextEntry, column_entries, write_manifest
from bucketline.store.format.sample_record import SampleRecord
from bucketline.store.format.text_block import TextSpec, make_caption
from bucketline.store.write.publish import Contents, new_manifest, prepare_store, publish
from bucketline.store.write.seal import seal
from bucketline.store.write.shard_writer import ShardWriter

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from bucketline.bench.peers.peer import Way
    from bucketline.bench.peers.samples import Sample, SetShape
    from bucketline.loader import Batch

NUM_SHARDS = 16
PREFETCH_BYTES = 64 << 20
WARM_BATCHES = 128  # the loader treats the first 64 as cold, and batches planned in the same windows follow
SERVICE = "service"
_MAX_CAPTIONS = 1
_MAX_SHARD_BYTES = 1 << 34


class Ours:
    """A store of 16 shards. The option `service` reads it through a private service."""

    def write(self, shape: SetShape, folder: Path) -> None:
        path = folder / "samples.store"
        text = TextSpec(tokens=(Column(name="tokens", dtype="F16", shape=(shape.token_width,)),))
        entry = TextEntry(header_bytes=text.header_bytes, tokens=column_entries(text.tokens), fixed={})
        prepare_store(path)
        contents = Contents(encoders={"vae": {"made": "at random"}}, rules={}, max_captions=_MAX_CAPTIONS, text=entry)
        manifest = write_manifest(path, new_manifest(contents))
        names = [f"s{number:04d}" for number in range(min(NUM_SHARDS, shape.num_samples))]
        for at, name in enumerate(names):
            empty = {"tokens": np.zeros((1, shape.token_width), dtype=np.float16)}
            writer = ShardWriter(path, name, text, make_caption(text, caption_digest(""), empty, {}), _MAX_SHARD_BYTES)
            for number in range(at, shape.num_samples, len(names)):
                _add(writer, text, sample(shape, number))
            writer.commit()
            writer.close()
            seal(path, name)
        publish(path, manifest, names, ())

    def open(self, shape: SetShape, folder: Path, way: Way) -> Opened:
        """Open the store. Passes continue one endless iteration from epoch to epoch, as in training."""
        numbers = {sample_digest(sample_id(number)): number for number in range(shape.num_samples)}
        config = LoaderConfig(batch_size=shape.batch_size, prefetch_bytes=PREFETCH_BYTES, threads=way.threads or 1)
        loader = Loader(folder / "samples.store", config, service="auto" if way.option == SERVICE else None)
        batches: Iterator[Batch] | None = None

        def begin() -> Iterator[PeerBatch]:
            nonlocal batches
            if batches is None:
                batches = iter(loader)
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


def sample_id(number: int) -> str:
    """Return a sample's id in the store."""
    return f"s{number:08d}.png"


def _add(writer: ShardWriter, text: TextSpec, own: Sample) -> None:
    _, height, width = own.latent.shape
    words = f"caption {own.number}"
    digest = caption_digest(words)
    writer.add_caption(make_caption(text, digest, {"tokens": own.tokens}, {}))
    latent = Column(name="latent", dtype="F16", shape=own.latent.shape)
    bucket = f"train/{8 * height}x{8 * width}"
    top, left = own.crop.tolist()
    original = (int(own.original_size[0]), int(own.original_size[1]))
    writer.add(
        spec=BlockSpec(bucket=bucket, columns=(*fixed_columns(_MAX_CAPTIONS), latent)),
        latents={"latent": own.latent},
        record=SampleRecord(
            id=sample_id(own.number),
            bucket=bucket,
            row=0,
            split="train",
            source=sample_id(own.number),
            source_bytes=1,
            source_mtime_ns=0,
            content=bytes(16),
            original_size=original,
            resized=original,
            crop=(top, left, 8 * height, 8 * width),
            crop_in_source=(top, left, 8 * height, 8 * width),
            captions=(words,),
            caption_rows=(),
        ),
        captions=[digest],
    )
