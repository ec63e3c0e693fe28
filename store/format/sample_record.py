"""Sample records: a sample's metadata outside its columns, as msgpack keyed by the digest of its id; the share a crop keeps."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import msgpack

from bucketline.errors import CorruptError, StoreError
from bucketline.store.format.block import DIGEST_BYTES, checksum, text_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_RECORD_BYTES = 1 << 26
MAX_MTIME_NS = (1 << 63) - 1  # the limit of the index's I64: 11 April 2262
MAX_RESIZED_PX = (1 << 31) - 1  # per side; crop offsets are smaller, and the column `crop` is an I32
UNKNOWN_BOX = (-1, -1, -1, -1)  # `crop_in_source` of an image whose crop is unknown; its `crop` begins at -1, -1
_MAX_SOURCE_BYTES = (1 << 64) - 1  # the limit of the index's U64


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRecord:
    """One sample: its id, location and provenance. Sizes and boxes are height first, in pixels."""

    id: str
    bucket: str
    row: int  # in its shard's bucket
    split: str
    source: str  # path or key in the source
    source_bytes: int
    source_mtime_ns: int
    content: bytes  # 16 bytes, the digest of the source's bytes
    original_size: tuple[int, int]  # upright
    resized: tuple[int, int]
    crop: tuple[int, int, int, int]  # top, left, height, width in the resized image; top and left are -1 if unknown
    crop_in_source: tuple[int, int, int, int]  # the same box in the upright source image, rounded outwards; or UNKNOWN_BOX
    captions: tuple[str, ...]
    caption_rows: tuple[int, ...]  # in this shard; the first ones are the row's `captions`

    @property
    def text_bytes(self) -> int:
        """Size of the record's texts, its only unbounded part."""
        return sum(len(text_bytes(text)) for text in (self.id, self.source, *self.captions))


_NAMES = tuple(field.name for field in fields(SampleRecord))
_TUPLES = ("original_size", "resized", "crop", "crop_in_source", "captions", "caption_rows")


def storable_mtime_ns(mtime_ns: int) -> int:
    """Return an mtime clamped to a record's range, 1970 to 2262."""
    return min(max(0, mtime_ns), MAX_MTIME_NS)


def refuse_unsealable(record: SampleRecord) -> None:
    """Check that the index can hold a record's values: once it is committed, its shard could not be sealed."""
    for name, value, largest in (
        ("source_mtime_ns", record.source_mtime_ns, MAX_MTIME_NS),
        ("source_bytes", record.source_bytes, _MAX_SOURCE_BYTES),
    ):
        if not 0 <= value <= largest:
            raise StoreError(f"sample {record.id!r:.200} has the {name} {value}, expected 0 to {largest}")
    if len(record.content) != DIGEST_BYTES:
        raise StoreError(
            f"sample {record.id!r:.200} has a content digest of {len(record.content)} bytes, expected {DIGEST_BYTES}"
        )


def encode_record(record: SampleRecord, **changes: int | tuple[int, ...]) -> bytes:
    """Return the serialised bytes of a record, with `changes` in place of some fields."""
    values = {name: getattr(record, name) for name in _NAMES}  # `asdict` copies each value, which takes ten times as long
    values |= changes
    packed: bytes = msgpack.packb(values, use_bin_type=True, unicode_errors="surrogateescape")
    return packed


def decode_record(data: bytes | memoryview, item: str) -> SampleRecord:
    try:
        if len(data) > MAX_RECORD_BYTES:
            raise ValueError(f"{len(data)} bytes are too many")
        fields: dict[str, Any] = msgpack.unpackb(data, raw=False, unicode_errors="surrogateescape", strict_map_key=True)
        for name in _TUPLES:
            fields[name] = tuple(fields[name])
        record = SampleRecord(**fields)
        _check_types(record)
    except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
        raise CorruptError(f"{item}: its sample record is damaged ({error!r:.200})") from error
    return record


def _check_types(record: SampleRecord) -> None:
    sizes, boxes = (record.original_size, record.resized), (record.crop, record.crop_in_source)
    texts = (record.id, record.bucket, record.split, record.source, *record.captions)
    numbers = (record.row, record.source_bytes, record.source_mtime_ns, *sizes[0], *sizes[1], *boxes[0], *boxes[1])
    if {type(text) for text in texts} != {str} or {type(n) for n in (*numbers, *record.caption_rows)} != {int}:
        raise TypeError("a field has the wrong type")
    if [*map(len, sizes), *map(len, boxes)] != [2, 2, 4, 4] or type(record.content) is not bytes:
        raise TypeError("a size, a box or the content's digest has the wrong form")
    if not 0 <= record.source_mtime_ns <= MAX_MTIME_NS:
        raise ValueError(f"source_mtime_ns is {record.source_mtime_ns}")


def captions_checksum(captions: tuple[str, ...]) -> int:
    """Return the checksum of a sample's captions; the index stores it so that changed captions are detected."""
    return checksum(*(len(text).to_bytes(8, "little") + text for text in map(text_bytes, captions)))


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
