"""Pieces of the real photographs that benchmarks read, for the tests of ingest."""

from __future__ import annotations

from functools import cache

from PIL import Image

from bucketline.bench.fixtures import photographs
from bucketline.bench.fixtures.photographs import PHOTOGRAPHS

photograph = cache(photographs.photograph)  # decoded once


def crop_of(number: int, height_px: int, width_px: int) -> Image.Image:
    """Cut a piece out of one of the photographs; another number gives another piece."""
    whole = photograph(PHOTOGRAPHS[number % len(PHOTOGRAPHS)])
    assert height_px <= whole.height
    assert width_px <= whole.width
    top = 97 * number % (whole.height - height_px + 1)
    left = 61 * number % (whole.width - width_px + 1)
    return whole.crop((left, top, left + width_px, top + height_px))
