"""One sample as a self-contained safetensors file."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from bucketline.files.atomic_write import write_or_explain
from bucketline.store.format.safetensors_header import header_bytes_for, lay_out, write_header
from bucketline.store.format.sample_record import SampleRecord
from bucketline.store.format.text_block import delivered
from bucketline.store.read.verified_sample import checked_captions, checked_row

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from bucketline.store.format.safetensors_header import Tensor
    from bucketline.store.read.store import Store

_FIELDS = tuple(field.name for field in fields(SampleRecord))


def write_sample(store: Store, sample_id: str, output: Path) -> dict[str, Any]:
    """Write a sample's file atomically and return its record as JSON.

    Raises:
        StoreError: if the store has no such sample, or the file cannot be written.
        CorruptError: if the row or a caption does not match its checksum.
    """
    shard, record = store.sample(sample_id)
    data = sample_file(store, store.shards.index(shard), record)
    write_or_explain(output, data)
    return record_as_json(record)


def sample_file(store: Store, shard: int, record: SampleRecord) -> bytes:
    """Return a sample's file: its columns (a row's shape, without K) and `caption.N.COLUMN` for its captions.

    Quantised tokens are written as F16, without scales.

    Raises:
        CorruptError: if the row or a caption does not match its checksum.
    """
    row = checked_row(store, shard, record)
    captions = [delivered(store.text, caption) for caption in checked_captions(store, shard, record)]
    placed, metadata = _lay_out(store, record, [caption.num_tokens for caption in captions])
    values = [row[column.name] for column in store.manifest.specs[record.bucket].columns]
    for caption in captions:
        values += [caption.fixed[column.name] for column in store.text.delivered.fixed]
        values += [caption.tokens[column.name] for column in store.text.delivered.tokens]
    return write_header(placed, metadata, header_bytes_for(placed, metadata)) + b"".join(values)


def sample_file_bytes(store: Store, record: SampleRecord, num_tokens: Sequence[int]) -> int:
    """Return the length of a sample's file from its captions' token counts, without reading values."""
    placed, metadata = _lay_out(store, record, num_tokens)
    return header_bytes_for(placed, metadata) + placed[-1].end


def record_as_json(record: SampleRecord) -> dict[str, Any]:
    """Return a record as a JSON-serialisable dictionary."""
    return {**{name: getattr(record, name) for name in _FIELDS}, "content": record.content.hex()}


def _lay_out(store: Store, record: SampleRecord, num_tokens: Sequence[int]) -> tuple[list[Tensor], dict[str, str]]:
    columns = [(column.name, column.dtype, column.shape) for column in store.manifest.specs[record.bucket].columns]
    for n, tokens in enumerate(num_tokens):
        columns += [(f"caption.{n}.{column.name}", column.dtype, column.shape) for column in store.text.delivered.fixed]
        columns += [(f"caption.{n}.{c.name}", c.dtype, (tokens, *c.shape)) for c in store.text.delivered.tokens]
    return lay_out(columns), {"format": "bucketline.sample/1", "record": json.dumps(record_as_json(record))}
