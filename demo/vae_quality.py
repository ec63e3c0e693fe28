"""How well a VAE gives pictures back: PSNR per photograph, and a sheet of originals beside reconstructions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from photographs import pictures
from PIL import Image
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from catalogue import Photograph

Vae: TypeAlias = Any  # an AutoencoderKL, whose inherited methods diffusers keeps from type checkers

AREA_PX = 128 * 128
"""Every picture is measured at about this area, a multiple of 8 px high and wide: as the demo packs it."""


def as_packed(image: Image.Image) -> Image.Image:
    """Resize a picture to about `AREA_PX`, keeping its aspect as nearly as multiples of 8 px allow."""
    aspect = image.width / image.height
    height_px = max(64, round(math.sqrt(AREA_PX / aspect) / 8) * 8)
    width_px = max(64, round(math.sqrt(AREA_PX * aspect) / 8) * 8)
    return image.convert("RGB").resize((width_px, height_px), Image.Resampling.LANCZOS)


def to_pixels(image: Image.Image) -> Tensor:
    """Turn an RGB picture into float32 [1, 3, H, W] in -1..1."""
    pixels = torch.from_numpy(np.array(image))
    return pixels.permute(2, 0, 1)[None].float() / 127.5 - 1.0


@torch.no_grad()
def reconstruct(vae: Vae, image: Image.Image) -> Image.Image:
    """Encode to the posterior's mode, decode, and round to 8 bits."""
    latents = vae.encode(to_pixels(image)).latent_dist.mode()
    pixels: Tensor = vae.decode(latents).sample[0]
    levels = (pixels.clamp(-1.0, 1.0) * 127.5 + 127.5).round().to(torch.uint8)
    return Image.fromarray(levels.permute(1, 2, 0).numpy())


def psnr_db(image: Image.Image, other: Image.Image) -> float:
    """Peak signal-to-noise ratio of two 8-bit RGB pictures of one size, in dB."""
    error = np.asarray(image, np.float64) - np.asarray(other, np.float64)
    return 10.0 * math.log10(255.0**2 / max(float(np.square(error).mean()), 1e-10))


def measure(vae: Vae, photographs: Sequence[Photograph]) -> dict[str, float]:
    """Return each photograph's PSNR, the mean over its demo pictures, and under `mean` the mean of these, in dB."""
    result = {}
    for photograph in photographs:
        packed = [as_packed(picture.image) for picture in pictures(photograph)]
        result[photograph.name] = float(np.mean([psnr_db(image, reconstruct(vae, image)) for image in packed]))
    return {"mean": round(float(np.mean(list(result.values()))), 2)} | {k: round(v, 2) for k, v in result.items()}


def reconstructions(vae: Vae, photographs: Sequence[Photograph], per_photograph: int = 1) -> Image.Image:
    """Draw a sheet: a row per photograph, each original picture with its reconstruction at its right."""
    cell_px = 184
    sheet = Image.new("RGB", (2 * per_photograph * cell_px, len(photographs) * cell_px), "white")
    for row, photograph in enumerate(photographs):
        for column, picture in enumerate(list(pictures(photograph))[:per_photograph]):
            packed = as_packed(picture.image)
            for offset, image in enumerate((packed, reconstruct(vae, packed))):
                left = (2 * column + offset) * cell_px + (cell_px - image.width) // 2
                sheet.paste(image, (left, row * cell_px + (cell_px - image.height) // 2))
    return sheet
