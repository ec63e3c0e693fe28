"""One sample as a self-contained safetensors file."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from bucketline.files.atomic_write import write_or_explain
from bucketline.store.format.safetensors_header import header_bytes_for, lay_out, write_header
from bucketline.store.format.sample_record import SampleRecord
from bucketline.store.format.text_block import delivered
from bucketline.store.read.verified_sample import added_values, checked_captions, checked_entries, checked_row

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from bucketline.store.format.safetensors_header import Tensor
    from bucketline.store.format.text_block import Entry, RaggedSpec
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

    Ragged entries are `ragged.NAME.COLUMN`, of its captions `caption.N.ragged.NAME.COLUMN`. Quantised tokens are written as
    F16, without scales.

    Raises:
        CorruptError: if the row or a caption does not match its checksum.
    """
    row = checked_row(store, shard, record) | added_values(store, shard, record)
    stored = checked_captions(store, shard, record)
    captions = [delivered(store.text, caption) for caption in stored]
    of_captions, of_row = checked_entries(store, shard, record, row, stored)
    tokens = RaggedTokens(
        of_captions={name: [own[name].num_tokens for own in of_captions] for name in of_captions[0]} if of_captions else {},
        of_row={name: entry.num_tokens for name, entry in of_row.items()},
    )
    placed, metadata = _lay_out(store, record, [caption.num_tokens for caption in captions], tokens)
    values = [row[column.name] for column in store.bucket(record.bucket).columns]
    for name, entry in of_row.items():
        values += _values(store.ragged_specs[name], entry)
    for caption, entries in zip(captions, of_captions, strict=True):
        values += _values(store.text.delivered, caption)
        for name, entry in entries.items():
            values += _values(store.ragged_specs[name], entry)
    return write_header(placed, metadata, header_bytes_for(placed, metadata)) + b"".join(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedTokens:
    """The token counts of a sample's ragged entries, by the names of their groups."""

    of_captions: Mapping[str, Sequence[int]]  # for each caption in record order
    of_row: Mapping[str, int]  # of the groups of which it has an entry


NO_ENTRIES = RaggedTokens(of_captions={}, of_row={})


def sample_file_bytes(store: Store, record: SampleRecord, num_tokens: Sequence[int], ragged: RaggedTokens = NO_ENTRIES) -> int:
    """Return the length of a sample's file from the token counts of its captions and entries, without reading values."""
    placed, metadata = _lay_out(store, record, num_tokens, ragged)
    return header_bytes_for(placed, metadata) + placed[-1].end


def record_as_json(record: SampleRecord) -> dict[str, Any]:
    """Return a record as a JSON-serialisable dictionary."""
    return {**{name: getattr(record, name) for name in _FIELDS}, "content": record.content.hex()}


def _lay_out(
    store: Store, record: SampleRecord, num_tokens: Sequence[int], ragged: RaggedTokens
) -> tuple[list[Tensor], dict[str, str]]:
    columns = [(column.name, column.dtype, column.shape) for column in store.bucket(record.bucket).columns]
    for name, tokens in ragged.of_row.items():
        columns += _shapes(f"ragged.{name}", store.ragged_specs[name], tokens)
    for n, tokens in enumerate(num_tokens):
        columns += _shapes(f"caption.{n}", store.text.delivered, tokens)
        for name, each in ragged.of_captions.items():
            columns += _shapes(f"caption.{n}.ragged.{name}", store.ragged_specs[name], each[n])
    return lay_out(columns), {"format": "bucketline.sample/1", "record": json.dumps(record_as_json(record))}


def _shapes(prefix: str, spec: RaggedSpec, num_tokens: int) -> list[tuple[str, str, tuple[int, ...]]]:
    return [
        *((f"{prefix}.{column.name}", column.dtype, column.shape) for column in spec.fixed),
        *((f"{prefix}.{column.name}", column.dtype, (num_tokens, *column.shape)) for column in spec.tokens),
    ]


def _values(spec: RaggedSpec, entry: Entry) -> list[bytes]:
    return [
        *(entry.fixed[column.name] for column in spec.fixed),
        *(entry.tokens[column.name] for column in spec.tokens),
    ]
