"""Sample records: what is known of a sample beside its columns, as msgpack under the digest of its id."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import msgpack

from bucketline.errors import CorruptError
from bucketline.store.digests import checksum

MAX_RECORD_BYTES = 1 << 26


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRecord:
    """One sample: who it is, where it lies, what it was made of. Sizes and boxes are height first, in pixels."""

    id: str
    bucket: str
    row: int  # in its bucket of its shard
    split: str
    source: str  # path or key in the source
    source_bytes: int
    source_mtime_ns: int
    content: bytes  # 16 bytes, the digest of the source's bytes
    original_size: tuple[int, int]  # upright
    resized: tuple[int, int]
    crop: tuple[int, int, int, int]  # top, left, height, width in the resized picture
    crop_in_source: tuple[int, int, int, int]  # the same box in the upright source picture, rounded outwards
    captions: tuple[str, ...]
    caption_rows: tuple[int, ...]  # in this shard; the first of them are the row's `captions`


_TUPLES = ("original_size", "resized", "crop", "crop_in_source", "captions", "caption_rows")


def encode_record(record: SampleRecord) -> bytes:
    """Give the record's bytes."""
    packed: bytes = msgpack.packb(asdict(record), use_bin_type=True, unicode_errors="surrogateescape")
    return packed


def decode_record(data: bytes | memoryview, item: str) -> SampleRecord:
    """Read a record back.

    Raises:
        CorruptError: where the bytes are not a record; `item` is named.
    """
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
        raise TypeError("a field is of another type")
    if [*map(len, sizes), *map(len, boxes)] != [2, 2, 4, 4] or type(record.content) is not bytes:
        raise TypeError("a size, a box or the content's digest is of another form")


def captions_checksum(captions: tuple[str, ...]) -> int:
    """Give the checksum that stands in the index for a sample's captions, so that a changed caption is noticed."""
    return checksum(
        *(
            len(c.encode("utf-8", "surrogateescape")).to_bytes(8, "little") + c.encode("utf-8", "surrogateescape")
            for c in captions
        )
    )
