"""Framing rules of a run: bucket, crop and background. They are part of the store's fingerprint."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import TYPE_CHECKING

from bucketline.command_line import counted
from bucketline.errors import UsageError
from bucketline.ingest.images.geometry import Placement, bucket_placement
from bucketline.ingest.images.rejects import Reason, RejectedError
from bucketline.store.format.hashing import draw
from bucketline.store.format.sample_record import MAX_RESIZED_PX

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bucketline.ingest.images.bucket_grid import Grid


RESAMPLING = "lanczos"
DEFAULT_MAX_CROP = 0.75
"""Share of its area that an image may lose in a new store.

A square bucket then takes 1:4 to 4:1, the span of the other grids, and those take up to 16:1. What photographs lose is less:
up to 3:1 at most 10 % in `sd15`, `sdxl` and `area:512`, and in a square 33 % (3:2), 44 % (16:9) or 67 % (3:1).
"""
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
    max_crop: Fraction | None = None  # of the image's area; None: no limit
    min_size_px: int = 1  # of the shorter side
    background: str = BACKGROUNDS["white"]  # `#rrggbb`, behind transparent images
    jpeg_draft: bool = False  # decode large JPEGs at 1/2, 1/4 or 1/8 scale

    def place(self, sample_id: str, height_px: int, width_px: int) -> Placement:
        """Place an upright image. The result depends only on its id, its size and these rules."""
        drawn = crop_draw(sample_id) if self.crop is Crop.RANDOM else None
        placement = bucket_placement(height_px, width_px, self.grid, max_upscale=self.max_upscale, draw=drawn)
        if self.max_crop is not None and placement.cropped_share > self.max_crop:
            raise RejectedError(
                Reason.CROP,
                f"{height_px}x{width_px} px, in its bucket of {placement.bucket} the crop would lose "
                f"{_percent(placement.cropped_share)} of the area, more than --max-crop {_percent(self.max_crop)}",
                placement=placement,
            )
        if (side := max(placement.resized)) > MAX_RESIZED_PX:
            raise RejectedError(
                Reason.TOO_LARGE,
                f"{height_px}x{width_px} px, to cover its bucket a side would have {side} px, at most {MAX_RESIZED_PX} fit",
            )
        return placement


def upscale_limit(number: float | None) -> Fraction | None:
    """Return `max_upscale` as an exact decimal fraction; None if there is no limit.

    >>> upscale_limit(1.1)
    Fraction(11, 10)
    """
    if number is not None and not 0.0 < number < float("inf"):
        raise UsageError(f"max_upscale is {number:g}, expected a number above 0, such as 1.5")
    return None if number is None else Fraction(str(number))


def crop_limit(share: float | None) -> Fraction | None:
    """Return `--max-crop` as an exact decimal fraction; None if there is no limit, which is also what 1 means.

    >>> crop_limit(0.75), crop_limit(1.0)
    (Fraction(3, 4), None)
    """
    if share is not None and not 0.0 < share <= 1.0:
        raise UsageError(f"--max-crop is {share:g}, expected a share of the area above 0 and at most 1, such as 0.5")
    return None if share is None or share == 1.0 else Fraction(str(share))


def _percent(share: Fraction) -> str:
    return f"{100 * float(share):.4g} %"


def parse_background(text: str) -> str:
    """Return `white`, `black`, `grey` or `#RRGGBB` as `#rrggbb`.

    >>> parse_background("grey"), parse_background("#C0FFEE")
    ('#808080', '#c0ffee')
    """
    if text in BACKGROUNDS:
        return BACKGROUNDS[text]
    if re.fullmatch(r"#[0-9a-fA-F]{6}", text):
        return text.lower()
    raise UsageError(f"background {text!r} is not a colour; expected {', '.join(BACKGROUNDS)} or #RRGGBB")


def crop_draw(sample_id: str) -> int:
    """Return the 64-bit hash of a sample id that determines its random crop."""
    return draw(sample_id, "crop")


SHOWN = 10  # worst buckets that the summary lists


@dataclass(slots=True, kw_only=True)
class CropLoss:
    """Number of images in one bucket, and the sum and maximum of the shares of source pixels cropped away."""

    images: int = 0
    total: float = 0.0
    most: float = 0.0

    def add(self, images: int, total: float, most: float) -> None:
        self.images += images
        self.total += total
        self.most = max(self.most, most)


def note_crop_loss(losses: dict[str, CropLoss], bucket: str, cropped_away: float) -> None:
    """Add one image to its bucket; `cropped_away` is the share of its pixels outside the crop, 0 to 1."""
    losses.setdefault(bucket, CropLoss()).add(1, cropped_away, cropped_away)


def add_crop_losses(whole: dict[str, CropLoss], part: Mapping[str, CropLoss]) -> None:
    """Add the losses of one rank to the total."""
    for bucket, loss in part.items():
        whole.setdefault(bucket, CropLoss()).add(loss.images, loss.total, loss.most)


def crop_losses_as_json(losses: Mapping[str, CropLoss]) -> dict[str, dict[str, float]]:
    """Return by bucket the number of `images`, and the `mean` and `max` share cropped away.

    >>> crop_losses_as_json({"train/64x64": CropLoss(images=4, total=1.0, most=0.5)})
    {'train/64x64': {'images': 4, 'mean': 0.25, 'max': 0.5}}
    """
    return {
        bucket: {"images": loss.images, "mean": round(loss.total / loss.images, 6), "max": round(loss.most, 6)}
        for bucket, loss in sorted(losses.items())
    }


def crop_losses_as_lines(losses: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Format the result of `crop_losses_as_json` as lines of text, largest loss first.

    >>> crop_losses_as_lines({"train/64x64": {"images": 4, "mean": 0.25, "max": 0.5}})
    ['cropped away in train/64x64: 25.0 % of the pixels on average, 50.0 % at most, of 4 images']
    """
    worst = sorted(losses.items(), key=lambda item: (-item[1]["mean"], item[0]))
    lines = [
        f"cropped away in {bucket}: {loss['mean']:.1%} of the pixels on average, {loss['max']:.1%} at most, "
        f"of {counted(int(loss['images']), 'image')}".replace("%", " %")
        for bucket, loss in worst[:SHOWN]
    ]
    if len(worst) > SHOWN:
        lines.append(f"and less in {len(worst) - SHOWN} more buckets (--json lists them all)")
    return lines
