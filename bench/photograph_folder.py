"""Folders of real pictures: JPEG pieces of photographs in the scikit-image and scikit-learn wheels, each with a caption."""

from __future__ import annotations

import importlib.util
import random
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from bucketline.bench.random_model import WORDS
from bucketline.errors import BucketlineError

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
QUALITY = 92
WORDS_OF_A_CAPTION = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """What a folder is to hold: so many pieces, their sides drawn from a range (or as long as the photograph has it)."""

    count: int
    sides_px: tuple[int, int]  # from, to

    @property
    def name(self) -> str:
        return f"{self.count}x{self.sides_px[0]}-{self.sides_px[1]}px.photos"


def kept_photographs(folder: Path, pieces: Pieces) -> Path:
    """Give the folder of those pieces in `folder`, made unless it is there already.

    Raises:
        BucketlineError: where the photographs are not installed.
    """
    path, making = folder / pieces.name, folder / f"{pieces.name}.making"
    if not path.exists():
        shutil.rmtree(making, ignore_errors=True)
        print(f"making {path.name}", file=sys.stderr)
        _write(making, pieces)
        making.rename(path)
    return path


def _write(folder: Path, pieces: Pieces) -> None:
    draw = random.Random(0)  # noqa: S311 - a choice, no secret
    photographs = [_photograph(file) for file in PHOTOGRAPHS]
    for number in range(pieces.count):
        whole = photographs[number % len(photographs)]
        height, width = (min(draw.randint(*pieces.sides_px), side) for side in (whole.height, whole.width))
        top, left = draw.randint(0, whole.height - height), draw.randint(0, whole.width - width)
        path = folder / f"{number // 1000:03d}" / f"{number:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        whole.crop((left, top, left + width, top + height)).save(path, quality=QUALITY)
        path.with_suffix(".txt").write_text(" ".join(draw.choices(WORDS, k=WORDS_OF_A_CAPTION)) + "\n", encoding="ascii")


def _photograph(file: str) -> Image.Image:
    """Decode a photograph, in RGB and without its metadata."""
    package, _, rest = file.partition("/")
    spec = importlib.util.find_spec(package)
    path = Path(next(iter(spec.submodule_search_locations))) / rest if spec and spec.submodule_search_locations else None
    if path is None or not path.is_file():
        raise BucketlineError(
            f"the photograph {file} is not installed; it is a part of what this comes with: pip install 'bucketline[demo]'"
        )
    with Image.open(path) as image:
        picture = image.convert("RGB")
    picture.info.clear()
    return picture
