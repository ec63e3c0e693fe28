"""Measure a VAE's reconstruction quality: PSNR per photograph, and a sheet of originals next to reconstructions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from photographs import images
from PIL import Image
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from catalogue import Photograph

Vae: TypeAlias = Any  # an AutoencoderKL, whose inherited methods diffusers hides from type checkers

AREA_PX = 128 * 128
"""Approximate area of every measured image; height and width are multiples of 8 px, as packed by the demo."""


def as_packed(image: Image.Image) -> Image.Image:
    """Resize an image to about `AREA_PX`, preserving its aspect ratio up to multiples of 8 px."""
    aspect = image.width / image.height
    height_px = max(64, round(math.sqrt(AREA_PX / aspect) / 8) * 8)
    width_px = max(64, round(math.sqrt(AREA_PX * aspect) / 8) * 8)
    return image.convert("RGB").resize((width_px, height_px), Image.Resampling.LANCZOS)


def to_pixels(image: Image.Image) -> Tensor:
    """Convert an RGB image to float32 [1, 3, H, W] in -1..1."""
    pixels = torch.from_numpy(np.array(image))
    return pixels.permute(2, 0, 1)[None].float() / 127.5 - 1.0


@torch.no_grad()
def reconstruct(vae: Vae, image: Image.Image) -> Image.Image:
    """Return an image encoded to the posterior's mode, decoded, and rounded to 8 bits."""
    latents = vae.encode(to_pixels(image)).latent_dist.mode()
    pixels: Tensor = vae.decode(latents).sample[0]
    levels = (pixels.clamp(-1.0, 1.0) * 127.5 + 127.5).round().to(torch.uint8)
    return Image.fromarray(levels.permute(1, 2, 0).numpy())


def psnr_db(image: Image.Image, other: Image.Image) -> float:
    """Return the peak signal-to-noise ratio of two 8-bit RGB images of equal size, in dB."""
    error = np.asarray(image, np.float64) - np.asarray(other, np.float64)
    return 10.0 * math.log10(255.0**2 / max(float(np.square(error).mean()), 1e-10))


def measure(vae: Vae, photographs: Sequence[Photograph]) -> dict[str, float]:
    """Return PSNR in dB: per photograph, averaged over its demo images, and under `mean` averaged over photographs."""
    result = {}
    for photograph in photographs:
        packed = [as_packed(image.image) for image in images(photograph)]
        result[photograph.name] = float(np.mean([psnr_db(image, reconstruct(vae, image)) for image in packed]))
    return {"mean": round(float(np.mean(list(result.values()))), 2)} | {k: round(v, 2) for k, v in result.items()}


def reconstructions(vae: Vae, photographs: Sequence[Photograph], per_photograph: int = 1) -> Image.Image:
    """Draw a sheet with a row per photograph: each original, with its reconstruction to the right."""
    cell_px = 184
    sheet = Image.new("RGB", (2 * per_photograph * cell_px, len(photographs) * cell_px), "white")
    for row, photograph in enumerate(photographs):
        for column, image in enumerate(list(images(photograph))[:per_photograph]):
            packed = as_packed(image.image)
            for offset, shown in enumerate((packed, reconstruct(vae, packed))):
                left = (2 * column + offset) * cell_px + (cell_px - shown.width) // 2
                sheet.paste(shown, (left, row * cell_px + (cell_px - shown.height) // 2))
    return sheet
