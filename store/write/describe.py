"""Describe a sealed shard, and a column that was added to one: manifest entries and buckets, read from their files.

The file of an added column has blocks in LMDB like those of a shard, and extents. It is made in `pending/` and moved to
`shards/` when it is complete, its extents first. What no generation lists is found again by what its extents say of it: the
column, and the shard whose rows it belongs to. Of a shard whose file is no longer here, since it was sent to object storage,
the description is noted next to it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import uuid
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Protocol

import lmdb
import msgpack
import numpy as np

from bucketline.errors import CorruptError, StoreError
from bucketline.files.atomic_write import create_held, move_durably, remedy_for_failed_write, write_durably, write_or_explain
from bucketline.files.paths import read_regular
from bucketline.store.format.block import (
    ID,
    IMAGE_AXES,
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    BlockSpec,
    Column,
    encode_block,
    file_digest,
    line_sums,
    read_header,
)
from bucketline.store.format.manifest import (
    COLUMN_SHARD_NAME,
    FORMAT_VERSION,
    META_KEY,
    ColumnShardEntry,
    FileEntry,
    RaggedTotals,
    ShardEntry,
    block_key,
    group_entry,
    pending_path,
    shard_paths,
)
from bucketline.store.format.schema import BucketEntry, ColumnEntry, bucket_entry, column_entries
from bucketline.store.format.text import TEXT_GROUP, TextError, is_bucket
from bucketline.store.shard.reader import SealedShard
from bucketline.store.shard.row_locator import EXTENTS_FORMAT, LINE_CHECKSUM
from bucketline.store.shard.sidecar import PagedFile
from bucketline.store.write.seal import SPARE_BYTES, TRANSACTION_BYTES, column_extents
from bucketline.typed_json import decode, encode

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from bucketline.store.format.block import Row
    from bucketline.store.format.manifest import Manifest

MAKING = ".column"  # the suffix of what is being made in `pending/`
COLUMN_FIELDS = ("column", "rows_of", "forms", "dropped")  # in the metadata of its extents, in this order
ADDING_LOCK = "column.lock"  # in `pending/`, held by the one process that adds a column


class ColumnValues(Protocol):
    """The values of a column for the rows of one shard."""

    def rows(self, bucket: str) -> Iterator[bytes | None]:
        """Yield the value of each row of a bucket, in order; None for a row that is not live, which gets zeros."""

    def spec(self, bucket: str) -> BlockSpec:
        """Return the columns of the bucket's blocks, as they are known after `rows` has yielded a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundColumn:
    """The file of an added column in `shards/`, by what its extents say of it."""

    column: str
    rows_of: str  # id of the shard whose rows it belongs to
    dropped: str | None  # digest of the list of the rows that were dropped then, which have no value; "" without one
    forms: dict[str, ColumnEntry]  # by bucket
    entry: ColumnShardEntry


def write_column_shard(store: Path, shard: SealedShard, column: str, values: ColumnValues) -> FoundColumn:
    """Write a column's values of a shard's rows. Return the entry of the new file, which is in `shards/`, and its form."""
    shard_id = uuid.uuid4()
    name = f"{shard.name}.{shard_id.hex}"
    making, paths = store / "pending" / f"{name}{MAKING}", shard_paths(store, name)
    held: int | None = None
    try:
        held = create_held(making)
        _write_blocks(making, name, shard_id.bytes, shard, column, values)
        forms = {bucket: column_entries((values.spec(bucket).column(column),))[column] for bucket in _buckets(shard)}
        about = {"column": column, "rows_of": shard.entry.shard_id, "forms": encode(forms)}
        about["dropped"] = digest_of_dropped(shard.entry)
        write_durably(paths.extents, column_extents(making, name, about))
        move_durably(making, paths.lmdb)
    except (lmdb.Error, OSError) as error:
        remedy = remedy_for_failed_write(making.parent)
        raise StoreError(f"{making} cannot be written: {error}; {remedy}") from error
    finally:
        making.unlink(missing_ok=True)
        if held is not None:
            os.close(held)
    return describe_column_shard(store, name)


def digest_of_dropped(entry: ShardEntry) -> str:
    """Return the digest of a shard's list of dropped rows; an empty string without one."""
    return entry.dropped.digest if entry.dropped else ""


def _buckets(shard: SealedShard) -> list[str]:
    return sorted(bucket for bucket, live in shard.entry.live.items() if live)


def _write_blocks(path: Path, name: str, shard_id: bytes, shard: SealedShard, column: str, values: ColumnValues) -> None:
    with lmdb.open(str(path), subdir=False, lock=False, map_size=SPARE_BYTES, sync=False) as env:
        with env.begin(write=True) as txn:
            txn.put(META_KEY, msgpack.packb({"format_version": FORMAT_VERSION, "shard": name, "shard_id": shard_id}))
        map_bytes = SPARE_BYTES
        for bucket in _buckets(shard):
            blocks = _blocks(column, values, bucket, ids_by_row(shard, bucket))
            waiting: list[tuple[bytes, bytes]] = []
            for number, block in enumerate(blocks):
                waiting.append((block_key(bucket, number), block))
                if sum(len(own) for _, own in waiting) >= TRANSACTION_BYTES:
                    map_bytes = _put(env, waiting, map_bytes)
            map_bytes = _put(env, waiting, map_bytes)
        env.sync(True)


def _put(env: Any, waiting: list[tuple[bytes, bytes]], map_bytes: int) -> int:  # noqa: ANN401 - lmdb has no types
    """Append blocks in one transaction, and forget them; return the length of the map, which is only address space."""
    map_bytes += 2 * sum(len(block) for _, block in waiting)
    env.set_mapsize(map_bytes)
    with env.begin(write=True) as txn:
        for key, block in waiting:
            txn.put(key, block, append=True)
    waiting.clear()
    return map_bytes


def _blocks(column: str, values: ColumnValues, bucket: str, ids: NDArray[np.uint8]) -> Iterator[bytes]:
    """Yield the blocks of a bucket; `ids`: digests of the rows' samples, `[rows, 16]`."""
    rows, first_row = values.rows(bucket), 0
    waiting: list[bytes | None] = []
    for value in rows:  # until the first value says what the rows' form is
        waiting.append(value)
        if value is not None:
            break
    spec = values.spec(bucket)
    blank = bytes(spec.column(column).row_bytes)
    rows = chain(waiting, rows)
    while own := list(islice(rows, spec.rows_per_block)):
        block: list[Row] = [
            {ID: ids[first_row + k].tobytes(), column: blank if value is None else value} for k, value in enumerate(own)
        ]
        yield encode_block(spec, block, first_row)
        first_row += len(block)
    if first_row != len(ids):
        raise AssertionError(f"{bucket} has {len(ids)} rows, {first_row} values were given")


def ids_by_row(shard: SealedShard, bucket: str) -> NDArray[np.uint8]:
    """Return the digests of the samples of a bucket's rows, dropped ones included, `[rows, 16]`."""
    index, samples = shard.index, shard.entry.samples
    own = index.slice("bucket", 0, samples) == index.metadata["groups"].index(bucket)
    rows, ids = index.slice("row", 0, samples)[own], np.zeros((shard.entry.groups[bucket].rows, 16), dtype=np.uint8)
    if len(rows) != len(ids) or int(rows.max(initial=0)) >= len(ids):
        raise CorruptError(f"{index.path}: its rows of {bucket} are not those of the manifest; run `store verify`")
    ids[rows] = index.slice("digest", 0, samples)[own]
    return ids


def describe_column_shard(store: Path, name: str) -> FoundColumn:
    """Return the entry of an added column's file in `shards/`, and what its extents say of it."""
    paths, files = shard_paths(store, name), []
    for path in (paths.lmdb, paths.extents):
        try:
            num_bytes, digest = file_digest(path)
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error.strerror}") from error
        files.append(FileEntry(num_bytes=num_bytes, digest=digest))
    extents = PagedFile(paths.extents, files[1].num_bytes, EXTENTS_FORMAT, plain_reads=True)
    about, sums = extents.metadata, line_sums(paths.lmdb).finish()
    if not extents.has(LINE_CHECKSUM) or extents.slice(LINE_CHECKSUM, 0, len(sums)).tolist() != sums:
        raise CorruptError(f"{paths.lmdb} does not match the checksums in {paths.extents}")
    try:
        groups = {bucket: group_entry(place) for bucket, place in dict(about["groups"]).items()}
        entry = ColumnShardEntry(shard_id=str(about["shard_id"]), lmdb=files[0], extents=files[1], groups=groups)
        forms = decode(dict[str, ColumnEntry], about["forms"])
        column, rows_of = str(about["column"]), str(about["rows_of"])
        return FoundColumn(column=column, rows_of=rows_of, dropped=about.get("dropped"), forms=forms, entry=entry)
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptError(f"{paths.extents} does not describe an added column ({error!r:.200})") from error


def column_files(store: Path, shard: str = "*") -> list[str]:
    """Return the names of the added columns' complete files in `shards/`, of one shard or of all."""
    return sorted(path.stem for path in (store / "shards").glob(f"{shard}.*.lmdb") if COLUMN_SHARD_NAME.fullmatch(path.stem))


def found_columns(store: Path, entry: ShardEntry) -> dict[str, ColumnShardEntry]:
    """Return the added columns whose files in `shards/` are of a shard's rows, by name."""
    found = (describe_column_shard(store, name) for name in column_files(store, entry.name))
    return {one.column: one.entry for one in found if one.rows_of == entry.shard_id}


SENT = ".sent"
_MAX_NOTE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A sealed shard's manifest entry and its buckets' entries, and the error of the captions that were quantised for it."""

    entry: ShardEntry
    buckets: tuple[BucketEntry, ...]
    text_error: TextError | None = None


def sent_note(store: Path, name: str) -> Path:
    """Return the path of a shard's description, which is there if the shard was sent."""
    return store / "shards" / f"{name}{SENT}"


def note_description(store: Path, described: Described) -> None:
    """Write a shard's description next to it."""
    write_or_explain(sent_note(store, described.entry.name), json.dumps(encode(described)).encode())


def noted_description(store: Path, name: str) -> Described | None:
    """Return the description that is noted next to a shard; None if there is none."""
    path = sent_note(store, name)
    try:
        found = decode(Described, json.loads(read_regular(path, _MAX_NOTE_BYTES)))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptError(f"{path} is damaged ({error!s:.200}); remove shards/{name}.* and rerun the command") from error
    if found.entry.name != name:
        raise CorruptError(f"{path} describes the shard {found.entry.name}; remove shards/{name}.* and rerun the command")
    return found


def describe_shard(store: Path, name: str, manifest: Manifest) -> Described:
    """Return what a sealed shard is, noted or read from its files.

    A copy of rows has their added columns in files of its own, which `RowCopier` has written.
    """
    if (noted := noted_description(store, name)) is not None:
        return noted
    paths = shard_paths(store, name)
    again = f"move {paths.lmdb} to {pending_path(store, name)} and rerun the command, which seals it again"
    files = []
    for path in (paths.lmdb, paths.extents, paths.index):
        try:
            num_bytes, digest = file_digest(path)
        except FileNotFoundError as error:
            raise StoreError(f"{path} is missing, although its shard exists; {again}") from error
        files.append(FileEntry(num_bytes=num_bytes, digest=digest))
    try:
        found = _described(store, name, manifest, files)
    except CorruptError as error:
        raise CorruptError(f"{error}; {again}") from error
    if not manifest.added:
        return found
    return dataclasses.replace(found, entry=dataclasses.replace(found.entry, added=found_columns(store, found.entry)))


def _described(store: Path, name: str, manifest: Manifest, files: list[FileEntry]) -> Described:
    """Return what a shard's sidecars and blocks say of it. `files` are its own file, its extents and its index."""
    extents = PagedFile(shard_paths(store, name).extents, files[1].num_bytes, EXTENTS_FORMAT)
    entry = entry_of_extents(name, files, extents, manifest)
    shard = SealedShard(store, entry)
    record_bytes = int(shard.index.column("record_bytes").sum(dtype=np.int64))
    cut = shard.captions_cut(np.arange(entry.samples))
    buckets = tuple(_bucket_of(shard, group) for group in entry.groups if is_bucket(group))
    error = dict(extents.metadata["text"]).get("error")  # which `entry_of_extents` has checked
    text_error = None if error is None else decode(TextError, error)
    entry = dataclasses.replace(entry, record_bytes=record_bytes, cut=cut)
    return Described(entry=entry, buckets=buckets, text_error=text_error)


def entry_of_extents(name: str, files: list[FileEntry], extents: PagedFile, manifest: Manifest) -> ShardEntry:
    """Return a shard's manifest entry as its extents describe it, with no dropped row, and 0 for `record_bytes`."""
    spec = manifest.text.spec()
    try:
        groups = {group: group_entry(place) for group, place in dict(extents.metadata["groups"]).items()}
        text = dict(extents.metadata["text"])
        if (error := text.pop("error", None)) is not None:
            decode(TextError, error)
        totals = decode(RaggedTotals, text)
        return ShardEntry(
            name=name,
            shard_id=str(extents.metadata["shard_id"]),
            lmdb=files[0],
            extents=files[1],
            index=files[2],
            dropped=None,
            groups=groups,
            samples=sum(group.rows for name, group in groups.items() if is_bucket(name)),
            record_bytes=0,
            caption_bytes=totals.tokens * spec.token_bytes + groups[TEXT_GROUP].rows * spec.fixed_bytes,
            max_tokens=totals.max_tokens,
            ragged=decode(dict[str, RaggedTotals], extents.metadata.get("ragged", {})),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptError(f"{extents.path} does not describe a shard ({error!r:.200})") from error


def _bucket_of(shard: SealedShard, group: str) -> BucketEntry:
    """Return a bucket's entry, its columns read from the header of its first block."""
    place = shard.block_ranges(group, np.array([0]))
    block_bytes = int(place.length[0])
    head = shard.read(int(place.offset[0]), min(block_bytes, LENGTH_BYTES + MAX_HEADER_BYTES))
    tensors, metadata, _ = read_header(head, block_bytes, f"shard {shard.name}, block 0 of {group}")
    columns = tuple(Column(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape[1:]) for tensor in tensors)
    axes = tuple(metadata["axes"].split(",")) if "axes" in metadata else IMAGE_AXES
    return bucket_entry(BlockSpec(bucket=group, columns=columns, axes=axes))
