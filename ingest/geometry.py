"""One pure function from an image's size and a grid to bucket, resize and crop, in integers throughout.

Everything that needs a size asks here, so that no two stages can round differently.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bucketline.ingest.grids import Grid, Size

DRAW_BITS = 64


class NoBucketError(ValueError):
    """Every bucket would need more enlarging than is allowed."""

    def __init__(self, least: Fraction) -> None:
        super().__init__(f"every bucket needs more enlarging than is allowed, the least {float(least):.3f} times")
        self.least = least


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """How an image comes into its bucket: resized to cover it, then cropped. Pixels, height first."""

    bucket: Size
    source: tuple[int, int]  # upright
    resized: tuple[int, int]
    top: int
    left: int

    @property
    def crop(self) -> tuple[int, int, int, int]:
        """Top, left, height and width of the crop in the resized picture."""
        return self.top, self.left, self.bucket.height_px, self.bucket.width_px

    @property
    def crop_in_source(self) -> tuple[int, int, int, int]:
        """The same box in the source picture: top, left, height and width, rounded outwards to whole pixels."""
        top, bottom = _outwards(self.top, self.bucket.height_px, self.source[0], self.resized[0])
        left, right = _outwards(self.left, self.bucket.width_px, self.source[1], self.resized[1])
        return top, left, bottom - top, right - left

    @property
    def enlarged(self) -> bool:
        return self.resized[0] > self.source[0] or self.resized[1] > self.source[1]

    @property
    def cropped_away(self) -> float:
        """The share of the source's pixels that lies outside the crop, 0 to 1."""
        kept, of = _kept(self.bucket, *self.source)
        return (of - kept) / of


def place(
    height_px: int, width_px: int, grid: Grid, *, max_upscale: Fraction | None = None, draw: int | None = None
) -> Placement:
    """Choose the bucket that keeps the largest share of the picture, the larger one where two keep the same.

    A bucket that needs a side enlarged by more than `max_upscale` is not chosen. The crop lies in the middle, or where `draw`
    says, a number of 64 bits: 0 is the top or left, the largest one the bottom or right.

    >>> from bucketline.ingest.grids import parse_grid
    >>> place(300, 400, parse_grid("192x256,256x192", step_px=64, align_px=8)).bucket
    Size(height_px=192, width_px=256)

    Raises:
        NoBucketError: where every bucket needs more enlarging than `max_upscale`.
    """
    if height_px < 1 or width_px < 1:
        raise ValueError(f"a picture of {height_px}x{width_px} px has no place")
    if draw is not None and not 0 <= draw < 1 << DRAW_BITS:
        raise ValueError(f"a draw of {draw}, expected 0 or more and less than 2**{DRAW_BITS}")
    bucket = _choose(height_px, width_px, grid, max_upscale)
    height, width = bucket.height_px, bucket.width_px
    if height * width_px >= width * height_px:  # the height decides: the width is cropped
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
        kept, best = _kept(size, height_px, width_px), _kept(bucket, height_px, width_px)
        share, best_share = kept[0] * best[1], best[0] * kept[1]
        if (share, size.height_px * size.width_px) > (best_share, bucket.height_px * bucket.width_px):
            bucket = size
    return bucket


def _enlarging(size: Size, height_px: int, width_px: int) -> Fraction:
    """Give the factor by which the picture must grow to cover the bucket; 1 or less where it need not."""
    return max(Fraction(size.height_px, height_px), Fraction(size.width_px, width_px))


def _offset(slack_px: int, draw: int | None) -> int:
    """Say where a crop begins that may lie anywhere from 0 to `slack_px`; each equally often over all draws."""
    return slack_px // 2 if draw is None else (draw * (slack_px + 1)) >> DRAW_BITS


def _kept(size: Size, height_px: int, width_px: int) -> tuple[int, int]:
    """Give the share of the picture that the bucket keeps, as numerator and denominator."""
    across, down = size.width_px * height_px, size.height_px * width_px
    return (across, down) if across <= down else (down, across)


def _round(numerator: int, denominator: int) -> int:
    """Divide and round half up; never below the exact quotient's floor, so that a cover stays one."""
    return (2 * numerator + denominator) // (2 * denominator)


def _outwards(begin: int, length: int, source: int, resized: int) -> tuple[int, int]:
    return begin * source // resized, min(source, -(-(begin + length) * source // resized))
