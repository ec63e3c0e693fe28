"""The share of an image that a crop keeps: one formula for packing, scans, contact sheets and reports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bucketline.store.format.sample_record import UNKNOWN_BOX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bucketline.store.format.sample_record import SampleRecord


def kept_share(height_px: int, width_px: int, source_height_px: int, source_width_px: int) -> tuple[int, int]:
    """Return the share of an image that is kept if it is resized to cover a size and cropped to it, as a fraction.

    >>> kept_share(64, 64, 90, 120)
    (5760, 7680)
    """
    across, down = width_px * source_height_px, height_px * source_width_px
    return (across, down) if across <= down else (down, across)


def box_in_source(crop: Sequence[int], resized: Sequence[int], source: Sequence[int]) -> tuple[int, int, int, int]:
    """Return a crop (top, left, height, width) of a resized image in its source, rounded outwards to whole pixels."""
    top, bottom = _outwards(crop[0], crop[2], source[0], resized[0])
    left, right = _outwards(crop[1], crop[3], source[1], resized[1])
    return top, left, bottom - top, right - left


def cropped_away(record: SampleRecord) -> float | None:
    """Return the share of the source image that a sample's crop removed, 0 to 1; None if it is unknown.

    It is that of the crop before rounding, unless another program recorded a box in the source that is not that of its crop.
    """
    source, resized, box = record.original_size, record.resized, record.crop_in_source
    if box == UNKNOWN_BOX or min(*source, *resized) <= 0:
        return None
    _, _, height, width = record.crop
    kept, whole = box[2] * box[3], source[0] * source[1]
    if box == box_in_source(record.crop, resized, source):
        is_covering = height == resized[0] or width == resized[1]
        kept, whole = kept_share(height, width, *source) if is_covering else (height * width, resized[0] * resized[1])
    return max(0.0, 1.0 - kept / whole)


def _outwards(begin: int, length: int, source: int, resized: int) -> tuple[int, int]:
    return begin * source // resized, min(source, -(-(begin + length) * source // resized))
