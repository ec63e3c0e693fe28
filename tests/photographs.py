"""Pieces of the real photographs that benchmarks read, for the tests of ingest."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from bucketline.bench.fixtures import trained_model
from bucketline.bench.fixtures.trained_model import PHOTOGRAPHS

photograph = cache(trained_model.photograph)  # decoded once


def crop_of(number: int, height_px: int, width_px: int) -> Image.Image:
    whole = photograph(PHOTOGRAPHS[number % len(PHOTOGRAPHS)])
    assert height_px <= whole.height
    assert width_px <= whole.width
    top = 97 * number % (whole.height - height_px + 1)
    left = 61 * number % (whole.width - width_px + 1)
    return whole.crop((left, top, left + width_px, top + height_px))


@torch.no_grad()
def encoded_by_hand(image: Image.Image, height_px: int, width_px: int, vae: Any) -> NDArray[np.float32]:
    """Resize, crop and encode an image with only Pillow and diffusers: its latent, `[C, h, w]`."""
    scale = max(height_px / image.height, width_px / image.width)
    size = (max(width_px, int(image.width * scale + 0.5)), max(height_px, int(image.height * scale + 0.5)))
    left, top = (size[0] - width_px) // 2, (size[1] - height_px) // 2
    cropped = image.resize(size, Image.Resampling.LANCZOS).crop((left, top, left + width_px, top + height_px))
    pixels = torch.from_numpy(np.array(cropped)).permute(2, 0, 1)[None].float() / 127.5 - 1
    latent: NDArray[np.float32] = vae.encode(pixels).latent_dist.mode()[0].numpy()
    return latent
