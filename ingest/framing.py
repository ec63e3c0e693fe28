"""What every picture of a run becomes: its bucket, its crop, its background. The store's fingerprint names each of these."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import TYPE_CHECKING

from bucketline.errors import UsageError
from bucketline.ingest.geometry import DRAW_BITS, Placement, place

if TYPE_CHECKING:
    from bucketline.ingest.config import PackConfig
    from bucketline.ingest.grids import Grid
    from bucketline.store.typed_json import Json

RESAMPLING = "lanczos"
BACKGROUNDS = {"white": "#ffffff", "black": "#000000", "grey": "#808080"}


class Crop(StrEnum):
    """Where the crop lies in the resized picture: in the middle, or at a place drawn from the sample's id."""

    CENTER = "center"
    RANDOM = "random"


@dataclass(frozen=True, slots=True, kw_only=True)
class Framing:
    """The rules by which a picture comes into its bucket."""

    grid: Grid
    crop: Crop = Crop.CENTER
    max_upscale: Fraction | None = None  # None: any
    min_size_px: int = 1  # of the shorter side
    background: str = BACKGROUNDS["white"]  # `#rrggbb`; what shows through where a picture is transparent
    jpeg_draft: bool = False  # large JPEGs are decoded at a half, a quarter or an eighth of their size

    def place(self, sample_id: str, height_px: int, width_px: int) -> Placement:
        """Place an upright picture; a pure function of its id, its size and these rules.

        Raises:
            NoBucketError: where every bucket needs more enlarging than is allowed.
        """
        draw = crop_draw(sample_id) if self.crop is Crop.RANDOM else None
        return place(height_px, width_px, self.grid, max_upscale=self.max_upscale, draw=draw)

    def as_rules(self) -> dict[str, Json]:
        """Give the rules as the store's fingerprint holds them."""
        return {
            "grid": self.grid.name,
            "resampling": RESAMPLING,
            "crop": self.crop.value,
            "max_upscale": None if self.max_upscale is None else float(self.max_upscale),
            "background": self.background,
            "min_size_px": self.min_size_px,
            "jpeg_draft": self.jpeg_draft,
        }


def framing_of(config: PackConfig, grid: Grid) -> Framing:
    """Take the rules from what the user asked for."""
    return Framing(
        grid=grid,
        crop=config.crop,
        max_upscale=upscale_limit(config.max_upscale),
        min_size_px=config.min_size_px,
        background=parse_background(config.background),
        jpeg_draft=config.jpeg_draft,
    )


def upscale_limit(number: float | None) -> Fraction | None:
    """Give `--max-upscale` as the exact fraction that its digits say; None where any enlarging is allowed.

    >>> upscale_limit(1.1)
    Fraction(11, 10)

    Raises:
        UsageError: where it is not a number above 0.
    """
    if number is not None and not 0.0 < number < float("inf"):
        raise UsageError(f"--max-upscale is {number:g}, expected a number above 0, such as 1.5")
    return None if number is None else Fraction(str(number))


def parse_background(text: str) -> str:
    """Give `white`, `black`, `grey` or `#RRGGBB` as `#rrggbb`.

    >>> parse_background("grey"), parse_background("#C0FFEE")
    ('#808080', '#c0ffee')

    Raises:
        UsageError: where it is none of these.
    """
    if text in BACKGROUNDS:
        return BACKGROUNDS[text]
    if re.fullmatch(r"#[0-9a-fA-F]{6}", text):
        return text.lower()
    raise UsageError(f"--background {text!r} is no colour; expected {', '.join(BACKGROUNDS)} or #RRGGBB")


def crop_draw(sample_id: str) -> int:
    """Draw the number of 64 bits that places a sample's crop; the same id gives the same number, always and everywhere."""
    key = sample_id.encode("utf-8", "surrogateescape")
    digest = hashlib.blake2b(key, digest_size=DRAW_BITS // 8, person=b"bucketline.crop").digest()
    return int.from_bytes(digest, "little")
