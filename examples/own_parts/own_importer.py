"""An importer: a folder of latents `NAME.npy`, [4, h, w] as SDXL's VAE made them, with captions in `NAME.txt`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.ingest.importers.cache import CacheEntry, Importer, Scaling, Variant

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def found(source: Path) -> Iterator[CacheEntry]:
    """Yield the cache's samples, without reading their values. Captions are looked for next to them, as NAME.txt."""
    for path in sorted(source.glob("*.npy")):
        yield CacheEntry(id=path.stem, path=path.name, captioned=path.stem, variant="sdxl")


def read(source: Path, entry: CacheEntry) -> dict[str, Any]:
    """Return a sample's values by name. Called from several threads."""
    return {"latent": np.load(source / entry.path, allow_pickle=False)}


IMPORTER = Importer(
    kind="npy",
    found=found,
    read=read,
    variants={"sdxl": Variant(scaling=Scaling.NONE)},  # as the VAE made them, not as the model is fed
)
