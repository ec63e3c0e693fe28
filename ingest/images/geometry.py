"""Compute bucket, resize and crop from an image's size and a grid, with a pure function in integer arithmetic.

All sizes are computed here, so that no two stages can round differently.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from bucketline.store.format.sample_record import box_in_source, kept_share

if TYPE_CHECKING:
    from bucketline.ingest.images.bucket_grid import Grid, Size

DRAW_BITS = 64


class NoBucketError(ValueError):
    """Every bucket would need more upscaling than is allowed."""

    def __init__(self, least: Fraction) -> None:
        super().__init__(f"every bucket needs more enlarging than is allowed, the least {float(least):.3f} times")
        self.least = least


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """How an image is fitted into its bucket: resized to cover it, then cropped. In pixels, height first."""

    bucket: Size
    source: tuple[int, int]  # upright
    resized: tuple[int, int]
    top: int
    left: int

    @property
    def crop(self) -> tuple[int, int, int, int]:
        """Top, left, height and width of the crop in the resized image."""
        return self.top, self.left, self.bucket.height_px, self.bucket.width_px

    @property
    def crop_in_source(self) -> tuple[int, int, int, int]:
        """The same box in the source image: top, left, height and width, rounded outwards to whole pixels."""
        return box_in_source(self.crop, self.resized, self.source)

    @property
    def enlarged(self) -> bool:
        return self.resized[0] > self.source[0] or self.resized[1] > self.source[1]

    @property
    def cropped_away(self) -> float:
        """The share of the source's pixels outside the crop, 0 to 1."""
        return float(self.cropped_share)

    @property
    def cropped_share(self) -> Fraction:
        """`cropped_away`, exactly."""
        return 1 - Fraction(*kept_share(self.bucket.height_px, self.bucket.width_px, *self.source))


def bucket_placement(
    height_px: int, width_px: int, grid: Grid, *, max_upscale: Fraction | None = None, draw: int | None = None
) -> Placement:
    """Place an image in the bucket that keeps the largest share of it; of two equal buckets, the larger.

    Buckets that need upscaling by more than `max_upscale` are excluded. The crop is centred, or placed by the 64-bit number
    `draw`: 0 is the top or left, the largest value the bottom or right.

    >>> from bucketline.ingest.images.bucket_grid import parse_grid
    >>> bucket_placement(300, 400, parse_grid("192x256,256x192", step_px=64, align_px=8)).bucket
    Size(height_px=192, width_px=256)
    """
    if height_px < 1 or width_px < 1:
        raise ValueError(f"an image of {height_px}x{width_px} px has no place")
    if draw is not None and not 0 <= draw < 1 << DRAW_BITS:
        raise ValueError(f"a draw of {draw}, expected 0 or more and less than 2**{DRAW_BITS}")
    bucket = _choose(height_px, width_px, grid, max_upscale)
    height, width = bucket.height_px, bucket.width_px
    if height * width_px >= width * height_px:  # scale by height, crop the width
        resized = height, _round(width_px * height, height_px)
    else:
        resized = _round(height_px * width, width_px), width
    return Placement(
        bucket=bucket,
        source=(height_px, width_px),
        resized=resized,
        top=_offset(resized[0] - height, draw),
        left=_offset(resized[1] - width, draw),
    )


def _choose(height_px: int, width_px: int, grid: Grid, max_upscale: Fraction | None) -> Size:
    sizes = grid.sizes
    if max_upscale is not None:
        sizes = tuple(size for size in sizes if _enlarging(size, height_px, width_px) <= max_upscale)
        if not sizes:
            raise NoBucketError(min(_enlarging(size, height_px, width_px) for size in grid.sizes))
    bucket = sizes[0]
    for size in sizes[1:]:
        kept, best = (kept_share(one.height_px, one.width_px, height_px, width_px) for one in (size, bucket))
        share, best_share = kept[0] * best[1], best[0] * kept[1]
        if (share, size.height_px * size.width_px) > (best_share, bucket.height_px * bucket.width_px):
            bucket = size
    return bucket


def _enlarging(size: Size, height_px: int, width_px: int) -> Fraction:
    """Return the scale factor at which the image covers the bucket; above 1 it is enlarged."""
    return max(Fraction(size.height_px, height_px), Fraction(size.width_px, width_px))


def _offset(slack_px: int, draw: int | None) -> int:
    """Return the start of the crop, 0 to `slack_px`: the middle, or uniformly distributed over all draws."""
    return slack_px // 2 if draw is None else (draw * (slack_px + 1)) >> DRAW_BITS


def _round(numerator: int, denominator: int) -> int:
    """Divide and round half up. The result is never below the quotient's floor, so the image still covers its bucket."""
    return (2 * numerator + denominator) // (2 * denominator)
