"""Latent columns of an image: its latent, and optionally that of the flipped image."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bucketline.ingest.encoders.oom_retry import OomRetry
from bucketline.ingest.encoders.vae import seed_of
from bucketline.store.format.block import Column
from bucketline.store.format.columns import FLIPPED, LATENT
from bucketline.torch_dtypes import as_stored

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from bucketline.ingest.encoders.vae import VaeEncoder


class LatentColumns:
    """Encodes images into the latent columns of a bucket."""

    def __init__(self, vae: VaeEncoder, *, flip: bool) -> None:
        self._vae = vae
        self._names = (LATENT, FLIPPED) if flip else (LATENT,)
        self._halving = OomRetry(self._encode, "image")

    def columns(self, height_px: int, width_px: int) -> tuple[Column, ...]:
        """Return the columns of a bucket; they depend only on its size, never on the output of the VAE."""
        shape = (self._vae.stored_channels, height_px // self._vae.downscale, width_px // self._vae.downscale)
        return tuple(Column(name=name, dtype=self._vae.stored_dtype, shape=shape) for name in self._names)

    def encode(self, images: Sequence[tuple[str, NDArray[np.uint8]]]) -> list[dict[str, NDArray[Any]] | str]:
        """Encode images of one size, given as id and pixels `[H, W, 3]`.

        Return in order each image's columns by name, `[C, h, w]` as stored, or why they cannot be stored.
        """
        height, width = images[0][1].shape[:2]
        return self._halving(images, f"{height}x{width} px")

    def _encode(self, images: Sequence[tuple[str, NDArray[np.uint8]]]) -> list[dict[str, NDArray[Any]] | str]:
        pixels = np.stack([own for _, own in images])
        found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for name in self._names:
            seen = np.ascontiguousarray(pixels[:, :, ::-1]) if name == FLIPPED else pixels
            found[name] = self._vae.encode(seen, [seed_of(sample_id, name) for sample_id, _ in images])
        return [
            self._row({name: (latents[n], bool(good[n])) for name, (latents, good) in found.items()})
            for n in range(len(images))
        ]

    def _row(self, found: Mapping[str, tuple[torch.Tensor, bool]]) -> dict[str, NDArray[Any]] | str:
        for name, (latent, is_finite) in found.items():
            if not is_finite:
                what = "NaN" if bool(torch.isnan(latent).any()) else "infinite, or beyond the dtype's range"
                return f"{name} as {self._vae.stored_dtype}: {what}"
        return {name: as_stored(latent) for name, (latent, _) in found.items()}
