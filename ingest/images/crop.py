"""Framing rules of a run: bucket, crop and background. They are part of the store's fingerprint."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import TYPE_CHECKING

from bucketline.errors import UsageError
from bucketline.ingest.images.geometry import Placement, place
from bucketline.ingest.images.rejects import Reason, RejectedError
from bucketline.store.format.hashing import draw
from bucketline.store.format.sample_record import MAX_RESIZED_PX

if TYPE_CHECKING:
    from bucketline.ingest.images.bucket_grid import Grid
    from bucketline.typed_json import Json

RESAMPLING = "lanczos"
BACKGROUNDS = {"white": "#ffffff", "black": "#000000", "grey": "#808080"}


class Crop(StrEnum):
    """Position of the crop in the resized image: the centre, or a random place derived from the sample id."""

    CENTER = "center"
    RANDOM = "random"


@dataclass(frozen=True, slots=True, kw_only=True)
class Framing:
    """Rules for fitting an image into its bucket."""

    grid: Grid
    crop: Crop = Crop.CENTER
    max_upscale: Fraction | None = None  # None: no limit
    min_size_px: int = 1  # of the shorter side
    background: str = BACKGROUNDS["white"]  # `#rrggbb`, behind transparent images
    jpeg_draft: bool = False  # decode large JPEGs at 1/2, 1/4 or 1/8 scale

    def place(self, sample_id: str, height_px: int, width_px: int) -> Placement:
        """Place an upright image. The result depends only on its id, its size and these rules.

        Raises:
            NoBucketError: if every bucket exceeds `max_upscale`.
            RejectedError: if a side of the resized image is longer than a store can record.
        """
        drawn = crop_draw(sample_id) if self.crop is Crop.RANDOM else None
        placement = place(height_px, width_px, self.grid, max_upscale=self.max_upscale, draw=drawn)
        if (side := max(placement.resized)) > MAX_RESIZED_PX:
            raise RejectedError(
                Reason.TOO_LARGE,
                f"{height_px}x{width_px} px, to cover its bucket a side would have {side} px, at most {MAX_RESIZED_PX} fit",
            )
        return placement

    def as_rules(self) -> dict[str, Json]:
        """Return the rules as they appear in the store's fingerprint."""
        return {
            "grid": self.grid.name,
            "resampling": RESAMPLING,
            "crop": self.crop.value,
            "max_upscale": None if self.max_upscale is None else float(self.max_upscale),
            "background": self.background,
            "min_size_px": self.min_size_px,
            "jpeg_draft": self.jpeg_draft,
        }


def upscale_limit(number: float | None) -> Fraction | None:
    """Return `--max-upscale` as an exact decimal fraction; None if there is no limit.

    >>> upscale_limit(1.1)
    Fraction(11, 10)

    Raises:
        UsageError: if it is not a number above 0.
    """
    if number is not None and not 0.0 < number < float("inf"):
        raise UsageError(f"--max-upscale is {number:g}, expected a number above 0, such as 1.5")
    return None if number is None else Fraction(str(number))


def parse_background(text: str) -> str:
    """Return `white`, `black`, `grey` or `#RRGGBB` as `#rrggbb`.

    >>> parse_background("grey"), parse_background("#C0FFEE")
    ('#808080', '#c0ffee')

    Raises:
        UsageError: if it is none of these.
    """
    if text in BACKGROUNDS:
        return BACKGROUNDS[text]
    if re.fullmatch(r"#[0-9a-fA-F]{6}", text):
        return text.lower()
    raise UsageError(f"--background {text!r} is not a colour; expected {', '.join(BACKGROUNDS)} or #RRGGBB")


def crop_draw(sample_id: str) -> int:
    """Return the 64-bit hash of a sample id that determines its random crop."""
    return draw(sample_id, "crop")
