"""Reading one sample with every checksum compared: its row, its captions, and what its record says of both.

For what leaves the store (`get`, `export`, `ingest peek`): bytes that are not those that were written are an error here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bucketline.errors import CorruptError
from bucketline.store.block import CAPTIONS, CHECKSUM, ID, row_checksum
from bucketline.store.digests import caption_digest, sample_digest
from bucketline.store.record import captions_checksum
from bucketline.store.text_block import STARTS, Caption, caption_checksum

if TYPE_CHECKING:
    from bucketline.store.reader import LocatedCaptions, Store
    from bucketline.store.record import SampleRecord
    from bucketline.store.sealed_shard import IndexEntry


def checked_row(store: Store, shard: int, record: SampleRecord) -> dict[str, bytes]:
    """Read a sample's row, column by column.

    Raises:
        CorruptError: where the bytes are not those that were written, or the row is not this sample's.
    """
    reader, spec = store.shards[shard], store.manifest.specs[record.bucket]
    ranges = reader.block_ranges(record.bucket, np.array([record.row]))
    data = int(ranges.offset[0]) + spec.header_bytes
    rows, k = int(ranges.rows[0]), int(ranges.row_in_block[0])
    row = {
        column.name: reader.read(data + rows * spec.prefix_bytes[column.name] + k * column.row_bytes, column.row_bytes)
        for column in spec.columns
    }
    item = f"sample {record.id!r:.200}"
    if row_checksum(spec, row) != int.from_bytes(row[CHECKSUM], "little"):
        raise CorruptError(f"{item}: the row's bytes are not those that were written; run `store verify`")
    if row[ID] != sample_digest(record.id):
        raise CorruptError(f"{item}: the row that its record names is another sample's; run `store verify`")
    in_row = np.frombuffer(row[CAPTIONS], dtype="<i4")
    if tuple(in_row[in_row >= 0].tolist()) != caption_rows(record)[: len(in_row)]:
        raise CorruptError(f"{item}: row and record name different captions; run `store verify`")
    return row


def check_record(entry: IndexEntry, record: SampleRecord) -> None:
    """Hold a record, which has no checksum of its own, against what the index knows of it.

    Raises:
        CorruptError: where they differ.
    """
    in_index = (entry.captions, entry.content, entry.source_bytes, entry.source_mtime_ns)
    if in_index != (captions_checksum(record.captions), record.content, record.source_bytes, record.source_mtime_ns):
        raise CorruptError(f"sample {record.id!r:.200}: its record is not the one that the index knows; run `store verify`")


def caption_rows(record: SampleRecord) -> tuple[int, ...]:
    """Give a record's caption rows.

    Raises:
        CorruptError: where they are no numbers.
    """
    if any(type(row) is not int or row < 0 for row in record.caption_rows):
        raise CorruptError(f"sample {record.id!r:.200}: the captions of its record are no row numbers; run `store verify`")
    return record.caption_rows


def checked_captions(store: Store, shard: int, record: SampleRecord) -> list[Caption]:
    """Read the embeddings of a sample's captions, in the order of its record; where it has none, that of the empty one.

    Raises:
        CorruptError: where the bytes are not those that were written, or an embedding is another caption's.
    """
    texts = record.captions or ("",)
    found = []
    for n, row in enumerate(caption_rows(record)):
        caption = _checked_caption(store, shard, row, f"sample {record.id!r:.200}, caption {n}")
        if n < len(texts) and caption.digest != caption_digest(texts[n]):
            raise CorruptError(f"sample {record.id!r:.200}: its caption {n} is not that of its record; run `store verify`")
        found.append(caption)
    return found


def caption_tokens(store: Store, shard: int, rows: tuple[int, ...]) -> list[int]:
    """Give how many tokens captions have, by their rows in a shard.

    Raises:
        CorruptError: where the shard does not say.
    """
    if not rows:
        return []
    located = store.locate_captions(np.full(len(rows), shard), np.array(rows))
    spans = (_span(store, located, n) for n in range(len(rows)))
    return [end - first for first, end in spans]


def _span(store: Store, located: LocatedCaptions, n: int) -> tuple[int, int]:
    """Give the first token of the n-th located caption in its block, and the one after its last."""
    reader = store.shards[int(located.shard[n])]
    first, end = np.frombuffer(reader.read(int(located.starts_offsets()[n]), 16), dtype="<i8").tolist()
    if not 0 <= first <= end <= int(located.tokens[n]):
        raise CorruptError(
            f"shard {reader.name}: `{STARTS}` of caption {int(located.row[n])} are {first} to {end}; run `store verify`"
        )
    return first, end


def _checked_caption(store: Store, shard: int, row: int, item: str) -> Caption:
    located = store.locate_captions(np.array([shard]), np.array([row]))
    reader = store.shards[shard]
    num_captions, num_tokens, k = (int(v[0]) for v in (located.captions, located.tokens, located.row_in_block))
    first, end = _span(store, located, 0)
    # a block's tensors: starts, checksums, fixed, tokens, digests
    at = int(located.data[0]) + 8 * (num_captions + 1)
    checksum = int.from_bytes(reader.read(at + 8 * k, 8), "little")
    at += 8 * num_captions
    fixed, tokens = {}, {}
    for column in store.text.fixed:
        fixed[column.name] = reader.read(at + k * column.row_bytes, column.row_bytes)
        at += num_captions * column.row_bytes
    for column in store.text.tokens:
        tokens[column.name] = reader.read(at + first * column.row_bytes, (end - first) * column.row_bytes)
        at += num_tokens * column.row_bytes
    caption = Caption(digest=reader.read(at + 16 * k, 16), num_tokens=end - first, tokens=tokens, fixed=fixed)
    if caption_checksum(store.text, caption) != checksum:
        raise CorruptError(f"{item}: its bytes are not those that were written; run `store verify`")
    return caption
