"""The file of a column that was added to a shard's rows: blocks in LMDB like those of a shard, and extents.

It is made in `pending/` and moved to `shards/` when it is complete, its extents first. What no generation lists is found again
by what its extents say of it: the column, and the shard whose rows it belongs to.
"""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Protocol

import lmdb
import msgpack
import numpy as np

from bucketline.errors import CorruptError, StoreError
from bucketline.files.atomic_write import create_held, move_durably, write_durably
from bucketline.files.disk_space import remedy_for_failed_write
from bucketline.store.format.block import ID, encode_block
from bucketline.store.format.hashing import file_digest, line_sums
from bucketline.store.format.layout import FORMAT_VERSION, META_KEY, block_key, shard_paths
from bucketline.store.format.manifest import COLUMN_SHARD_NAME, ColumnShardEntry, FileEntry, group_entry
from bucketline.store.format.schema import ColumnEntry, column_entries
from bucketline.store.shard.row_locator import EXTENTS_FORMAT, LINE_CHECKSUM
from bucketline.store.shard.sidecar import PagedFile
from bucketline.store.write.seal import SPARE_BYTES, TRANSACTION_BYTES, column_extents
from bucketline.typed_json import decode, encode

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from bucketline.store.format.block import BlockSpec, Row
    from bucketline.store.format.manifest import ShardEntry
    from bucketline.store.shard.reader import SealedShard

MAKING = ".column"  # the suffix of what is being made in `pending/`
COLUMN_FIELDS = ("column", "rows_of", "filled", "forms", "dropped")  # in the metadata of its extents, in this order
ADDING_LOCK = "column.lock"  # in `pending/`, held by the one process that adds a column


class ColumnValues(Protocol):
    """The values of a column for the rows of one shard."""

    def rows(self, bucket: str) -> Iterator[bytes | None]:
        """Yield the value of each row of a bucket, in order; None for a row that is not live, or has none."""

    def spec(self, bucket: str) -> BlockSpec:
        """Return the columns of the bucket's blocks, as they are known after `rows` has yielded a value."""

    def blank(self, bucket: str) -> bytes:
        """Return what is stored where `rows` yields None."""

    num_missing: int  # live rows for which it has yielded None


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundColumn:
    """The file of an added column in `shards/`, by what its extents say of it."""

    column: str
    rows_of: str  # id of the shard whose rows it belongs to
    filled: int  # live rows that had no value of their own
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
        about = {"column": column, "rows_of": shard.entry.shard_id, "filled": values.num_missing, "forms": encode(forms)}
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
    """Return the buckets of which a shard has live rows."""
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
    spec, blank = values.spec(bucket), values.blank(bucket)
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
        column, rows_of, filled = str(about["column"]), str(about["rows_of"]), int(about["filled"])
        dropped = about.get("dropped")
        return FoundColumn(column=column, rows_of=rows_of, filled=filled, dropped=dropped, forms=forms, entry=entry)
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptError(f"{paths.extents} does not describe an added column ({error!r:.200})") from error


def column_files(store: Path, shard: str = "*") -> list[str]:
    """Return the names of the added columns' complete files in `shards/`, of one shard or of all."""
    return sorted(path.stem for path in (store / "shards").glob(f"{shard}.*.lmdb") if COLUMN_SHARD_NAME.fullmatch(path.stem))


def found_columns(store: Path, entry: ShardEntry) -> dict[str, ColumnShardEntry]:
    """Return the added columns whose files in `shards/` are of a shard's rows, by name."""
    found = (describe_column_shard(store, name) for name in column_files(store, entry.name))
    return {one.column: one.entry for one in found if one.rows_of == entry.shard_id}
