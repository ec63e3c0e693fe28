"""An importer: a folder of latents `NAME.npy`, [4, h, w] as SDXL's VAE made them, with captions in `NAME.txt`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from bucketline.errors import SourceError
from bucketline.ingest.importers.cache import (
    Cached,
    CacheEntry,
    CacheListing,
    Geometry,
    Importer,
    ListRequest,
    Scaling,
    damaged,
)

if TYPE_CHECKING:
    from pathlib import Path


def is_here(source: Path) -> bool:
    """Return True if the folder looks like such a cache; `ingest import auto` asks."""
    return any(source.glob("*.npy"))


def listed(request: ListRequest) -> CacheListing:
    """Return the cache's samples, without reading their values."""
    entries = []
    for path in sorted(request.source.glob("*.npy")):
        caption = path.with_suffix(".txt")
        captions = (caption.read_text(encoding="utf-8").strip(),) if caption.is_file() else ()
        entries.append(CacheEntry(id=path.stem, path=path.name, captions=captions))
    if not entries:
        raise SourceError(f"{request.source} has no .npy file; name the folder that has the latents")
    return CacheListing(entries=entries, variant="sdxl", scaling=Scaling.NONE, captions_from=".txt files")


def read(source: Path, entry: CacheEntry, variant: str) -> Cached:  # noqa: ARG001 - of formats with several architectures
    """Return a sample's values. Called from several threads."""
    latent = np.load(source / entry.path, allow_pickle=False)
    if latent.ndim != 3:
        raise damaged(f"its shape is {list(latent.shape)}, expected [4, h, w]")
    return Cached(latent=torch.from_numpy(latent), geometry=Geometry())


IMPORTER = Importer(kind="npy", is_here=is_here, listed=listed, read=read)
