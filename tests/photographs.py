"""Real photographs out of the installed scikit-image and scikit-learn wheels, for the tests of ingest."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

from PIL import Image

PHOTOGRAPHS = (
    "skimage/data/coffee.png",
    "skimage/data/astronaut.png",
    "skimage/data/rocket.jpg",
    "skimage/data/chelsea.png",
    "skimage/data/ihc.png",
    "skimage/data/motorcycle_left.png",
    "skimage/data/hubble_deep_field.jpg",
    "skimage/data/retina.jpg",
    "sklearn/datasets/images/china.jpg",
    "sklearn/datasets/images/flower.jpg",
)


@cache
def photograph(file: str) -> Image.Image:
    """Decode a photograph, in RGB."""
    package, _, rest = file.partition("/")
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations
    with Image.open(Path(spec.submodule_search_locations[0]) / rest) as image:
        return image.convert("RGB")


def crop_of(number: int, height_px: int, width_px: int) -> Image.Image:
    """Cut a piece out of one of the photographs; another number gives another piece."""
    whole = photograph(PHOTOGRAPHS[number % len(PHOTOGRAPHS)])
    assert height_px <= whole.height
    assert width_px <= whole.width
    top = 97 * number % (whole.height - height_px + 1)
    left = 61 * number % (whole.width - width_px + 1)
    piece = whole.crop((left, top, left + width_px, top + height_px))
    piece.info.clear()
    return piece
