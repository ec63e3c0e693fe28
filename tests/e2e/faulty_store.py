"""A store of real photographs with faults that its report must point out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bucketline.store import LatentColumn, Store, StoreWriter
from bucketline.store.read.samples import Selection, live_samples
from tests.kit import TEXT, embedding
from tests.unit.store.report.conftest import CONSTANT, DUPLICATES, cropped

WRONG_FACTOR = 0.18215  # Stable Diffusion's; the demo's VAE has 0.45108


def write_faulty_store(good: Store, path: Path, bucket: str) -> Store:
    """Copy a store as one that was imported, with a wrong scaling factor.

    One bucket has constant latents, near-duplicates and a crop of 60 %.
    """
    vae: Any = good.encoders["vae"]
    random = np.random.default_rng(0)
    with StoreWriter(
        path,
        encoders={"vae": vae | {"scaling_factor": WRONG_FACTOR, "dtype": None}, "text_encoder": {"width": 5}},
        rules=good.manifest.rules,
        columns=[LatentColumn(channels=vae["latent_channels"], dtype="F16")],
        text=TEXT,
        empty_caption={"tokens": embedding("")},
        max_captions=3,
    ) as writer:
        model = good.bucket(bucket).read(np.array([CONSTANT]), "latent")[0]
        for listed in live_samples(good, Selection()):
            record = replace(listed.record, captions=listed.record.captions[:3])
            latent = good.bucket(record.bucket).read(np.array([listed.row]), "latent")[0]
            if record.bucket == bucket:
                record = cropped(record, 0.6)
                if listed.row < CONSTANT:
                    latent = np.zeros_like(latent)
                elif listed.row < CONSTANT + DUPLICATES:
                    latent = (model + 0.05 * random.normal(size=model.shape)).astype(np.float16)
            writer.add_record(record, {"latent": latent}, {text: {"tokens": embedding(text)} for text in record.captions})
    return Store.open(path)
