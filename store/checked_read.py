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

if TYPE_CHECKING:
    from bucketline.store.reader import Store
    from bucketline.store.record import SampleRecord
    from bucketline.store.sealed_shard import IndexEntry
    from bucketline.store.text_block import Caption


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
        try:
            caption = store.caption(shard, row)
        except CorruptError as error:
            raise CorruptError(f"sample {record.id!r:.200}, caption {n}: {error}") from error
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
    starts = np.empty((len(rows), 2), dtype="<i8")
    outs = [pair.view("u1").data for pair in starts]
    store.shards[shard].read_into(located.starts_offsets().tolist(), outs)
    store.check_starts(located, starts, int(located.tokens.max()))
    counts: list[int] = (starts[:, 1] - starts[:, 0]).tolist()
    return counts
