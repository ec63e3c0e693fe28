"""Read samples: all live ones of a store in order, and one with everything about it verified; and the report of `store info`.

They are found through the indexes, without reading rows. Memory use: 4 bytes for each row of one bucket of one shard.
"""

from __future__ import annotations

import fnmatch
import json
import re
import stat
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.errors import CorruptError
from bucketline.files.atomic_write import write_or_explain
from bucketline.store.format.block import (
    CAPTIONS,
    CHECKSUM,
    CROP,
    ID,
    ORIGINAL_SIZE,
    RAGGED_PREFIX,
    EntriesOf,
    header_bytes_for,
    lay_out,
    row_checksum,
    sample_digest,
    write_header,
)
from bucketline.store.format.schema import SampleRecord
from bucketline.store.format.text import TEXT_GROUP, delivered
from bucketline.store.read.files import files_of
from bucketline.typed_json import encode

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from bucketline.store.format.block import BlockSpec
    from bucketline.store.format.text import Entry, RaggedSpec
    from bucketline.store.read.files import LostShard
    from bucketline.store.read.store import OpenShards, Store
    from bucketline.store.shard.reader import SealedShard


NOWHERE = (1 << 32) - 1  # larger than any position
CHUNK_ROWS = 1 << 12  # index rows searched at a time
ENTRIES = 256  # index entries read at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """A filter on samples; None matches all."""

    split: str | None = None
    bucket: str | None = None  # by name
    match: str | None = None  # id pattern with *, ? and []; * also matches slashes


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One live sample and its location."""

    shard: int  # ordinal in the store
    row: int  # in the store's bucket, as `Bucket.read` and `Bucket.read_ragged` take it; `record.row` is that in the shard
    record: SampleRecord


def buckets_of(store: Store, selection: Selection) -> list[str]:
    """Return the sorted names of the selected buckets."""
    if selection.bucket is not None:
        store.bucket(selection.bucket)
    return sorted(
        bucket.name for bucket in store.buckets(selection.split) if selection.bucket is None or bucket.name == selection.bucket
    )


def live_samples(store: Store, selection: Selection) -> Iterator[Listed]:
    """Yield the selected live samples in the store's order."""
    names = buckets_of(store, selection)
    pattern = None if selection.match is None else re.compile(fnmatch.translate(selection.match))
    before = dict.fromkeys(names, 0)
    for ordinal, shard in enumerate(store.shards):
        for name in names:
            if name not in shard.entry.groups:
                continue
            positions = live_positions(shard, name)
            for first in range(0, len(positions), ENTRIES):
                entries = shard.index_entries(positions[first : first + ENTRIES].astype(np.int64))
                for rank, entry in enumerate(entries, first):
                    record = shard.record(entry)
                    if pattern is None or pattern.fullmatch(record.id):
                        yield Listed(shard=ordinal, row=before[name] + rank, record=record)
            before[name] += len(positions)


def live_positions(shard: SealedShard, bucket: str) -> NDArray[np.uint32]:
    """Return the index positions of a bucket's live rows, in row order."""
    group = shard.entry.groups[bucket]
    number = shard.groups.index(bucket)
    at = np.full(group.rows, NOWHERE, dtype="<u4")
    for begin in range(0, shard.entry.samples, CHUNK_ROWS):
        end = min(begin + CHUNK_ROWS, shard.entry.samples)
        here = np.flatnonzero(shard.index["bucket"][begin:end] == number)
        rows = shard.index["row"][begin:end][here]
        if len(rows) and int(rows.max()) >= group.rows:
            raise CorruptError(f"{shard.paths.meta}: has row {int(rows.max())} of {bucket}, the shard has {group.rows} rows")
        at[rows] = begin + here
    live = shard.is_live(bucket)
    if (at == NOWHERE).any() or int(live.sum()) != group.live:
        raise CorruptError(f"{shard.paths.meta}: does not list every row of {bucket} once; run `store verify`")
    return at[live]


# ------------------------------------------------------------------------------------------------------------- verified sample
# Read one sample and verify everything: its row, its captions, their ragged entries, and that its record matches them.
#
# For samples that leave the store (`get`, `export`, `ingest peek`): damaged bytes are an error here. A sample's file is a
# self-contained safetensors file.


def checked_row(store: Store, shard: int, record: SampleRecord) -> dict[str, bytes]:
    """Return a sample's row, column by column."""
    spec = store.manifest.specs[record.bucket]
    row = _values(store.shards[shard], spec, record, [column.name for column in spec.columns])
    item = f"sample {record.id!r:.200}"
    if row_checksum(spec, row) != int.from_bytes(row[CHECKSUM], "little"):
        raise CorruptError(f"{item}: the row's bytes do not match their checksum; run `store verify`")
    if row[ID] != sample_digest(record.id):
        raise CorruptError(f"{item}: the row that its record names belongs to another sample; run `store verify`")
    compare_with_record(record, {name: np.frombuffer(row[name], "<i4") for name in (CAPTIONS, ORIGINAL_SIZE, CROP)}, item)
    return row


def compare_with_record(record: SampleRecord, row: Mapping[str, NDArray[Any]], item: str) -> None:
    """Compare the columns derived from a record with those stored in the row."""
    num_captions = len(row[CAPTIONS])
    expected = {
        CAPTIONS: (record.caption_rows + (-1,) * num_captions)[:num_captions],
        ORIGINAL_SIZE: record.original_size,
        CROP: record.crop[:2],
    }
    for name, values in expected.items():
        if tuple(row[name].tolist()) != values:
            raise CorruptError(
                f"{item}: its {name} is {row[name].tolist()}, its record says {list(values)}; run `store verify`"
            )


def added_values(store: Store, shard: int, record: SampleRecord) -> dict[str, bytes]:
    """Return a sample's values of the added columns that all rows of its bucket have, each compared with its checksum."""
    found = {}
    for column in store.bucket(record.bucket).columns:
        if column.name in store.added:
            spec = store.added[column.name].specs[record.bucket]
            reader = store.files[int(store.added[column.name].shard[shard])]
            row = _values(reader, spec, record, [own.name for own in spec.columns])
            is_intact = row_checksum(spec, row) == int.from_bytes(row[CHECKSUM], "little")
            if not is_intact or row[ID] != sample_digest(record.id):
                raise CorruptError(
                    f"sample {record.id!r:.200}: the bytes of its {column.name} do not match their checksum, or are another "
                    "sample's; run `store verify`"
                )
            found[column.name] = row[column.name]
    return found


def _values(reader: SealedShard, spec: BlockSpec, record: SampleRecord, names: Iterable[str]) -> dict[str, bytes]:
    ranges = reader.block_ranges(record.bucket, np.array([record.row]))
    data = int(ranges.offset[0]) + spec.header_bytes
    rows, k = int(ranges.rows[0]), int(ranges.row_in_block[0])
    columns = [spec.column(name) for name in names]
    return {
        column.name: reader.read(data + rows * spec.prefix_bytes[column.name] + k * column.row_bytes, column.row_bytes)
        for column in columns
    }


def caption_rows(record: SampleRecord) -> tuple[int, ...]:
    if any(type(row) is not int or row < 0 for row in record.caption_rows):
        raise CorruptError(f"sample {record.id!r:.200}: the captions of its record are not row numbers; run `store verify`")
    return record.caption_rows


def checked_captions(store: Store, shard: int, record: SampleRecord) -> list[dict[str, Entry]]:
    """Return the entries of a sample's captions by group, in record order; of the empty caption if it has none."""
    sample = sample_digest(record.id)
    digests = [store.manifest.caption_digest(text, sample) for text in record.captions or ("",)]
    found = []
    for n, row in enumerate(caption_rows(record)):
        try:
            found.append(caption_entries(store, shard, row, digests[n] if n < len(digests) else None))
        except CorruptError as error:
            raise CorruptError(f"sample {record.id!r:.200}, caption {n}: {error}") from error
    return found


def checked_entries(store: Store, shard: int, record: SampleRecord, row: Mapping[str, bytes]) -> dict[str, Entry]:
    """Return the ragged entries that a sample's row has, by group; `row` as `checked_row` returns it."""
    try:
        entries = row_entries(store, shard, row)
    except CorruptError as error:
        raise CorruptError(f"sample {record.id!r:.200}: {error}") from error
    return {group: entry for group, entry in entries.items() if entry is not None}


def caption_entries(store: OpenShards, shard: int, row: int, digest: bytes | None = None) -> dict[str, Entry]:
    """Return a caption's entries, in `text` and in the ragged groups of captions. `digest` is the caption's, if known."""
    found = {spec.group: store.entry(spec, shard, row) for spec in store.groups.values() if spec.of is EntriesOf.CAPTIONS}
    digest = found[TEXT_GROUP].digest if digest is None else digest
    if other := [group for group, entry in found.items() if entry.digest != digest]:
        raise CorruptError(
            f"shard {store.shards[shard].name}: {store.groups[other[0]].label} {row} is not that of the expected caption; run "
            "`store verify`"
        )
    return found


def row_entries(store: OpenShards, shard: int, row: Mapping[str, Any]) -> dict[str, Entry | None]:
    """Return a row's entries in the groups of rows; None of those of which it may lack one and does.

    `row` has the columns by name, as bytes or as numbers.
    """
    found: dict[str, Entry | None] = {}
    for group, spec in store.groups.items():
        if spec.of is EntriesOf.ROWS:
            own = row[group]
            number = int.from_bytes(own, "little", signed=True) if isinstance(own, bytes) else int(own)
            found[group] = None if number == -1 and spec.optional else store.entry(spec, shard, number)
    return found


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


# ------------------------------------------------------------------------------------------------------------------------ info
# The report of `store info`.


def info(store: Store, lost: Sequence[LostShard] = ()) -> dict[str, Any]:
    """Return the JSON report of `store info` for a store and its lost shards."""
    manifest = store.manifest
    roles = {name: asdict(column) for name, column in manifest.columns.items()}
    roles |= {name: {"role": column.role, "encoder": None, "optional": False} for name, column in manifest.added.items()}
    return {
        "format_version": manifest.format_version,
        "generation": manifest.generation,
        "samples": manifest.samples,
        "withdrawn": len(manifest.withdrawn),
        "payload_bytes": manifest.payload_bytes,
        "disk_bytes": _stored_bytes(store),
        "shards": len(manifest.shards),
        "lost_shards": [asdict(shard) for shard in lost],
        "encoders": manifest.encoders,
        "rules": manifest.rules,
        "max_captions": manifest.max_captions,
        "text": {
            name: {"dtype": c.dtype, "shape": list(c.shape)}
            for name, c in sorted({**manifest.text.tokens, **manifest.text.fixed}.items())
        },
        "text_error": encode(manifest.text_error),
        "captions_cut": manifest.captions_cut,
        "ragged": {
            name: {
                **{key: value for key, value in asdict(group).items() if key != "header_bytes"},
                "entries": sum(own.rows for shard in manifest.shards if (own := shard.groups.get(RAGGED_PREFIX + name))),
                "max_tokens": store.max_entry_tokens[name],
            }
            for name, group in manifest.ragged.items()
        },
        "added": {
            name: {"role": column.role, "rows": sum(one.live_samples for one in manifest.shards if name in one.added)}
            for name, column in manifest.added.items()
        },
        "buckets": [
            {
                "name": bucket.name,
                **bucket.axes,
                "axes": list(bucket.axes),
                "split": bucket.split,
                "rows": bucket.num_rows,
                "columns": {
                    c.name: {"dtype": c.dtype, "shape": list(c.shape), **roles.get(c.name, {})} for c in bucket.columns
                },
            }
            for bucket in store.buckets()
        ],
    }


def _stored_bytes(store: Store) -> int:
    """Return the bytes that a store takes: of a disk's allocated ones, of a web server's, which lists nothing, the shards'."""
    if store.source is None:
        return disk_bytes(store.path)
    if store.folder.is_read_only:
        return sum(expected.num_bytes for entry in store.manifest.shards for _, expected in files_of(store.path, entry))
    return sum(file.num_bytes for file in store.folder.names())


def disk_bytes(store: Path) -> int:
    """Return the disk space allocated to a store's files, in bytes (512 per block).

    Lock files are excluded: they are non-empty only while held, so a packing run would count its own.
    """
    total = 0
    for path in store.rglob("*"):
        try:
            status = path.lstat()
        except FileNotFoundError:  # a concurrent pack has removed the file
            continue
        if stat.S_ISREG(status.st_mode) and path.suffix != ".lock":
            total += status.st_blocks * 512
    return total
