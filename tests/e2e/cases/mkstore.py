"""Write a store of small latents whose values name their row, without a model."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from bucketline.store import Column, LatentColumn, StoreWriter

ENCODERS = {"vae": {"scaling_factor": 0.5}, "text_encoder": {"width": 8}}


def writer(out: str) -> StoreWriter:
    return StoreWriter(
        out,
        encoders=ENCODERS,
        columns=[LatentColumn(channels=4, downscale=8, dtype="F16")],
        text=[Column(name="tokens", dtype="F16", shape=(8,))],
        empty_caption={"tokens": np.zeros((1, 8), np.float16)},
    )


def make(out: str, buckets: Mapping[str, int]) -> list[str]:
    """Write so many rows of each bucket, named HxW, into a store of one publication; return their ids."""
    ids = []
    with writer(out) as store:
        for bucket, count in buckets.items():
            height, width = (int(side) // 8 for side in bucket.split("x"))
            for n in range(count):
                latent, tokens = np.full((4, height, width), n, np.float16), np.full((3, 8), n, np.float16)
                ids.append(f"{bucket}/{n:05d}.png")
                store.add(ids[-1], f"train/{bucket}", {"latent": latent}, {f"caption {bucket} {n}": {"tokens": tokens}})
    return ids
