"""A store of random latents and captions, written by the store's own writer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bucketline.store.block import BlockSpec, Column, fixed_columns
from bucketline.store.digests import caption_digest
from bucketline.store.manifest import TextEntry, column_entries, write_manifest
from bucketline.store.publish import Contents, new_manifest, prepare_store, publish
from bucketline.store.record import SampleRecord
from bucketline.store.seal import seal
from bucketline.store.shard_writer import ShardWriter
from bucketline.store.text_block import Caption, TextSpec, make_caption

if TYPE_CHECKING:
    from pathlib import Path

MAX_CAPTIONS = 8
TOKEN_WIDTH = 768


def make_store(path: Path, *, num_shards: int, rows_per_shard: int, latent_shape: tuple[int, int, int]) -> None:
    """Write `num_shards` sealed shards of one bucket; latents `[C, h, w]` float16, 20 to 77 tokens a caption."""
    random = np.random.default_rng(0)
    _, height, width = latent_shape
    text = TextSpec(tokens=(Column(name="tokens", dtype="F16", shape=(TOKEN_WIDTH,)),))
    bucket = f"train/{8 * height}x{8 * width}"
    latent = Column(name="latent", dtype="F16", shape=latent_shape)
    spec = BlockSpec(bucket=bucket, columns=(*fixed_columns(MAX_CAPTIONS), latent))
    entry = TextEntry(header_bytes=text.header_bytes, tokens=column_entries(text.tokens), fixed={})
    prepare_store(path)
    contents = Contents(encoders={"vae": {"made": "at random"}}, rules={}, max_captions=MAX_CAPTIONS, text=entry)
    manifest = write_manifest(path, new_manifest(contents))

    def caption(name: str) -> Caption:
        tokens = random.standard_normal((int(random.integers(20, 78)), TOKEN_WIDTH), dtype=np.float32)
        return make_caption(text, caption_digest(name), {"tokens": tokens.astype("<f2")}, {})

    names = [f"s{number:04d}" for number in range(num_shards)]
    for name in names:
        writer = ShardWriter(path, name, text, caption(""), 1 << 34)
        for row in range(rows_per_shard):
            sample_id = f"{name}/{row:06d}.png"
            writer.add_caption(caption(sample_id))
            record = SampleRecord(
                id=sample_id,
                bucket=bucket,
                row=0,
                split="train",
                source=sample_id,
                source_bytes=1,
                source_mtime_ns=0,
                content=bytes(16),
                original_size=(8 * height, 8 * width),
                resized=(8 * height, 8 * width),
                crop=(0, 0, 8 * height, 8 * width),
                crop_in_source=(0, 0, 8 * height, 8 * width),
                captions=(sample_id,),
                caption_rows=(),
            )
            values = random.standard_normal(latent_shape, dtype=np.float32).astype("<f2")
            writer.add(spec=spec, latents={"latent": values}, record=record, captions=[caption_digest(sample_id)])
        writer.commit()
        writer.close()
        seal(path, name)
    publish(path, manifest, names, ())
