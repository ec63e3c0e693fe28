"""A picture's latent columns: its latent, and where asked for that of its mirror image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bucketline.ingest.encoders.arrays import as_stored
from bucketline.ingest.encoders.halving import Halving
from bucketline.ingest.encoders.vae import seed_of
from bucketline.store.block import Column

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from bucketline.ingest.encoders.vae import VaeEncoder

LATENT = "latent"
FLIPPED = "latent_flipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentRow:
    """A picture's latent columns, or why they cannot be stored."""

    columns: Mapping[str, NDArray[Any]]  # by name, [C, h, w] as stored
    problem: str | None


class LatentColumns:
    """Fills a bucket's latent columns."""

    def __init__(self, vae: VaeEncoder, *, flip: bool) -> None:
        self._vae = vae
        self._names = (LATENT, FLIPPED) if flip else (LATENT,)
        self._halving = Halving(self._encode, "picture")

    def columns(self, height_px: int, width_px: int) -> tuple[Column, ...]:
        """Give the columns of a bucket; they follow from its size alone, never from what the VAE happened to give."""
        shape = (self._vae.stored_channels, height_px // self._vae.downscale, width_px // self._vae.downscale)
        return tuple(Column(name=name, dtype=self._vae.stored_dtype, shape=shape) for name in self._names)

    def encode(self, pictures: Sequence[tuple[str, NDArray[np.uint8]]]) -> list[LatentRow]:
        """Encode pictures of one size, each its id and its pixels `[H, W, 3]`, in their order."""
        height, width = pictures[0][1].shape[:2]
        return self._halving(pictures, f"{height}x{width} px")

    def _encode(self, pictures: Sequence[tuple[str, NDArray[np.uint8]]]) -> list[LatentRow]:
        pixels = np.stack([own for _, own in pictures])
        found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for name in self._names:
            seen = np.ascontiguousarray(pixels[:, :, ::-1]) if name == FLIPPED else pixels
            found[name] = self._vae.encode(seen, [seed_of(sample_id, name) for sample_id, _ in pictures])
        return [
            self._row({name: (latents[n], bool(good[n])) for name, (latents, good) in found.items()})
            for n in range(len(pictures))
        ]

    def _row(self, found: Mapping[str, tuple[torch.Tensor, bool]]) -> LatentRow:
        bad = next((name for name, (_, is_finite) in found.items() if not is_finite), None)
        problem = None
        if bad is not None:
            what = "NaN" if bool(torch.isnan(found[bad][0]).any()) else "infinite, or beyond the dtype's range"
            problem = f"{bad} as {self._vae.stored_dtype}: {what}"
        return LatentRow(columns={name: as_stored(latent) for name, (latent, _) in found.items()}, problem=problem)
