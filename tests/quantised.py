"""Stores whose tokens are quantised: captions of several lengths, a width that 32 does not divide, a pooled embedding."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.store import Column, LatentColumn, Store, StoreWriter
from bucketline.store.format.text_block import quantised_spec
from tests.building import ENCODERS, MAX_CAPTIONS, RULES, SHARD_BYTES, samples_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from bucketline.store import TextSpec
    from tests.building import Sample

WIDTH, POOLED_WIDTH = 72, 6
ROWS = {"train/64x64": 24, "train/64x128": 7}


def spec_of(dtype: str, width: int = WIDTH) -> TextSpec:
    return quantised_spec(dtype, width, (Column(name="pooled", dtype="F16", shape=(POOLED_WIDTH,)),))


def tokens_of(text: str, width: int = WIDTH) -> NDArray[np.float32]:
    """Return a caption's tokens as its encoder makes them, `[T, D]`: one per word and one more, with a large channel."""
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
    tokens = np.random.default_rng(seed).normal(size=(len(text.split()) + 1, width)).astype("<f4")
    tokens[:, 3] *= 50
    return tokens


def pooled_of(text: str) -> NDArray[np.float16]:
    pooled: NDArray[np.float16] = tokens_of(text, POOLED_WIDTH)[0].astype("<f2")
    return pooled


def embedding_of(text: str, width: int = WIDTH) -> dict[str, NDArray[Any]]:
    return {"tokens": tokens_of(text, width), "pooled": pooled_of(text)}


def writer_of(
    path: Path, dtype: str, *, width: int = WIDTH, encoders: Mapping[str, Any] = ENCODERS, **more: Any
) -> StoreWriter:
    return StoreWriter(
        path,
        encoders={**encoders, "text_encoder": {**encoders["text_encoder"], "width": width, "stored_dtype": dtype}},
        rules=RULES,
        columns=[LatentColumn(channels=2)],
        empty_caption=embedding_of("", width),
        max_captions=MAX_CAPTIONS,
        **{"text": spec_of(dtype, width), "shard_bytes": SHARD_BYTES, **more},
    )


def make_quantised(path: Path, dtype: str, *shards: list[Sample], width: int = WIDTH, **more: Any) -> Store:
    """Make a store of the given shards, `g0`, `g1` and so on, each published as a generation of its own."""
    with writer_of(path, dtype, width=width, shard_names="g{}", **more) as writer:
        for samples in shards or (samples_of(ROWS),):
            for sample in samples:
                captions = {text: embedding_of(text, width) for text in sample.captions}
                writer.add_record(sample.record, {"latent": sample.latent}, captions)
            writer.publish()
    return Store(path, writer.manifest)
