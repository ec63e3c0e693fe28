"""Taking one sample out of a store, as a safetensors file that any tool reads."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.errors import CorruptError, StoreError
from bucketline.store.block import CHECKSUM, row_checksum
from bucketline.store.durable import write_durably
from bucketline.store.tensor_file import header_bytes_for, lay_out, write_header

if TYPE_CHECKING:
    from pathlib import Path

    from bucketline.store.reader import Store


def write_sample(store: Store, sample_id: str, output: Path) -> dict[str, Any]:
    """Write a sample's columns (a row's shape, without K) and `caption.N.COLUMN` tokens; give its record as JSON.

    Raises:
        StoreError: where the store has no such sample, or the file cannot be written.
        CorruptError: where the row's bytes are not those that were written.
    """
    shard, record = store.sample(sample_id)
    spec = store.manifest.specs[record.bucket]
    ranges = shard.block_ranges(record.bucket, np.array([record.row]))
    data = int(ranges.offset[0]) + spec.header_bytes
    rows, k = int(ranges.rows[0]), int(ranges.row_in_block[0])
    row = {
        column.name: shard.read(data + rows * spec.prefix_bytes[column.name] + k * column.row_bytes, column.row_bytes)
        for column in spec.columns
    }
    if row_checksum(spec, row) != int.from_bytes(row[CHECKSUM], "little"):
        raise CorruptError(f"sample {sample_id!r}: the row's bytes are not those that were written; run `store verify`")
    tensors = [(column.name, column.dtype, column.shape, row[column.name]) for column in spec.columns]
    ordinal = store.shards.index(shard)
    for n, caption_row in enumerate(record.caption_rows):
        for column in store.text.tokens:
            values = store.read_caption(ordinal, caption_row)[column.name]
            tensors.append((f"caption.{n}.{column.name}", column.dtype, values.shape, values.tobytes()))
    report = {**asdict(record), "content": record.content.hex()}
    placed = lay_out([(name, dtype, shape) for name, dtype, shape, _ in tensors])
    metadata = {"format": "bucketline.sample/1", "record": json.dumps(report)}
    header = write_header(placed, metadata, header_bytes_for(placed, metadata))
    try:
        write_durably(output, header + b"".join(values for *_, values in tensors))
    except OSError as error:
        raise StoreError(f"{output} cannot be written: {error.strerror}") from error
    return report
