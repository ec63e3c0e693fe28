"""One pure function from an image's size and a grid to bucket, resize and crop, in integers throughout.

Everything that needs a size asks here, so that no two stages can round differently.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bucketline.ingest.grids import Grid, Size


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """How an image comes into its bucket: resized to cover it, then cropped at the centre. Pixels, height first."""

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


def place(height_px: int, width_px: int, grid: Grid) -> Placement:
    """Choose the bucket that keeps the largest share of the picture, the larger one where two keep the same.

    >>> from bucketline.ingest.grids import parse_grid
    >>> place(300, 400, parse_grid("192x256,256x192", step_px=64, align_px=8)).bucket
    Size(height_px=192, width_px=256)
    """
    if height_px < 1 or width_px < 1:
        raise ValueError(f"a picture of {height_px}x{width_px} px has no place")
    bucket = grid.sizes[0]
    for size in grid.sizes[1:]:
        kept, best = _kept(size, height_px, width_px), _kept(bucket, height_px, width_px)
        share, best_share = kept[0] * best[1], best[0] * kept[1]
        if (share, size.height_px * size.width_px) > (best_share, bucket.height_px * bucket.width_px):
            bucket = size
    height, width = bucket.height_px, bucket.width_px
    if height * width_px >= width * height_px:  # the height decides: the width is cropped
        resized = height, _round(width_px * height, height_px)
    else:
        resized = _round(height_px * width, width_px), width
    return Placement(
        bucket=bucket,
        source=(height_px, width_px),
        resized=resized,
        top=(resized[0] - height) // 2,
        left=(resized[1] - width) // 2,
    )


def _kept(size: Size, height_px: int, width_px: int) -> tuple[int, int]:
    """Give the share of the picture that the bucket keeps, as numerator and denominator."""
    across, down = size.width_px * height_px, size.height_px * width_px
    return (across, down) if across <= down else (down, across)


def _round(numerator: int, denominator: int) -> int:
    """Divide and round half up; never below the exact quotient's floor, so that a cover stays one."""
    return (2 * numerator + denominator) // (2 * denominator)


def _outwards(begin: int, length: int, source: int, resized: int) -> tuple[int, int]:
    return begin * source // resized, min(source, -(-(begin + length) * source // resized))
