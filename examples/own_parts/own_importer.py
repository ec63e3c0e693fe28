"""An importer: a folder of latents `NAME.npy`, [4, h, w] as SDXL's VAE made them, with captions in `NAME.txt`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from bucketline.ingest.importers.cache import (
    Cached,
    CacheEntry,
    FoundEntries,
    Geometry,
    Importer,
    ListRequest,
    Scaling,
    Variant,
    damaged,
)

if TYPE_CHECKING:
    from pathlib import Path


def found(request: ListRequest) -> FoundEntries:
    """Return the cache's samples, without reading their values. Captions are looked for next to them, as NAME.txt."""
    paths = sorted(request.source.glob("*.npy"))
    return FoundEntries(entries=[CacheEntry(id=path.stem, path=path.name, variant="sdxl") for path in paths])


def read(source: Path, entry: CacheEntry, variant: str) -> Cached:  # noqa: ARG001 - of formats with several architectures
    """Return a sample's values. Called from several threads."""
    latent = np.load(source / entry.path, allow_pickle=False)
    if latent.ndim != 3:
        raise damaged(f"its shape is {list(latent.shape)}, expected [4, h, w]")
    return Cached(latent=torch.from_numpy(latent), geometry=Geometry())


IMPORTER = Importer(
    kind="npy",
    found=found,
    read=read,
    variants={"sdxl": Variant(scaling=Scaling.NONE)},  # as the VAE made them, not as the model is fed
)
