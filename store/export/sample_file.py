"""One sample as a self-contained safetensors file."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from bucketline.files.atomic_write import write_or_explain
from bucketline.store.format.safetensors_header import header_bytes_for, lay_out, write_header
from bucketline.store.format.sample_record import SampleRecord
from bucketline.store.format.text_block import TEXT_GROUP, delivered
from bucketline.store.read.verified_sample import added_values, checked_captions, checked_entries, checked_row

if TYPE_CHECKING:
    from pathlib import Path

    from bucketline.store.format.text_block import Entry, RaggedSpec
    from bucketline.store.read.store import Store

_FIELDS = tuple(field.name for field in fields(SampleRecord))


def write_sample(store: Store, sample_id: str, output: Path) -> dict[str, Any]:
    """Write a sample's file atomically and return its record as JSON."""
    shard, record = store.sample(sample_id)
    data = sample_file(store, store.shards.index(shard), record)
    write_or_explain(output, data)
    return record_as_json(record)


def sample_file(store: Store, shard: int, record: SampleRecord) -> bytes:
    """Return a sample's file: its columns (a row's shape, without K) and `caption.N.COLUMN` for its captions.

    Ragged entries are `ragged.NAME.COLUMN`, of its captions `caption.N.ragged.NAME.COLUMN`. Quantised tokens are written as
    F16, without scales.
    """
    row = checked_row(store, shard, record) | added_values(store, shard, record)
    tensors = [(column.name, column.dtype, column.shape, row[column.name]) for column in store.bucket(record.bucket).columns]
    for group, entry in checked_entries(store, shard, record, row).items():
        tensors += _tensors(group.replace("/", "."), store.groups[group], entry)
    for n, caption in enumerate(checked_captions(store, shard, record)):
        for group, entry in caption.items():
            prefix = f"caption.{n}" if group == TEXT_GROUP else f"caption.{n}.{group.replace('/', '.')}"
            tensors += _tensors(prefix, store.groups[group], entry)
    placed = lay_out([tensor[:3] for tensor in tensors])
    metadata = {"format": "bucketline.sample/1", "record": json.dumps(record_as_json(record))}
    return write_header(placed, metadata, header_bytes_for(placed, metadata)) + b"".join(tensor[3] for tensor in tensors)


def record_as_json(record: SampleRecord) -> dict[str, Any]:
    """Return a record as a JSON-serialisable dictionary."""
    return {**{name: getattr(record, name) for name in _FIELDS}, "content": record.content.hex()}


def _tensors(prefix: str, spec: RaggedSpec, entry: Entry) -> list[tuple[str, str, tuple[int, ...], bytes]]:
    """Return name, dtype, shape and bytes of an entry's values as they are delivered."""
    entry, spec = delivered(spec, entry), spec.delivered
    fixed = [(f"{prefix}.{own.name}", own.dtype, own.shape, entry.fixed[own.name]) for own in spec.fixed]
    shape = (entry.num_tokens,)
    return fixed + [(f"{prefix}.{own.name}", own.dtype, shape + own.shape, entry.tokens[own.name]) for own in spec.tokens]
