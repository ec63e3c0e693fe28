"""Write the values of a column that is added to a shard's rows: a file next to the shard's, and its sidecar.

The file has blocks in LMDB like those of a shard. It is made in `pending/` and moved to `shards/` when it is complete, its
sidecar first. What no generation lists is found again by what its sidecar says of it: the column, and the shard whose rows it
belongs to.
"""

from __future__ import annotations

import os
import uuid
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Protocol

import lmdb
import msgpack
import numpy as np

from bucketline.errors import CorruptError, StoreError
from bucketline.files.atomic_write import create_held, move_durably, remedy_for_failed_write, write_durably
from bucketline.store.format.block import ID, BlockSpec, bytes_digest, encode_block
from bucketline.store.format.manifest import FORMAT_VERSION, META_KEY, block_key, shard_paths
from bucketline.store.format.schema import column_entries
from bucketline.store.shard.meta import ColumnMeta, read_column_meta
from bucketline.store.write.seal import SPARE_BYTES, TRANSACTION_BYTES, rebuilt_meta
from bucketline.typed_json import encode

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from bucketline.store.format.block import Row
    from bucketline.store.shard.reader import SealedShard

MAKING = ".column"  # the suffix of what is being made in `pending/`
COLUMN_FIELDS = ("column", "rows_of", "forms", "dropped")  # in the metadata of its sidecar, in this order
ADDING_LOCK = "column.lock"  # in `pending/`, held by the one process that adds a column


class ColumnValues(Protocol):
    """The values of a column for the rows of one shard."""

    def rows(self, bucket: str) -> Iterator[bytes | None]:
        """Yield the value of each row of a bucket, in order; None for a row that is not live, which gets zeros."""

    def spec(self, bucket: str) -> BlockSpec:
        """Return the columns of the bucket's blocks, as they are known after `rows` has yielded a value."""


def write_column_shard(store: Path, shard: SealedShard, column: str, values: ColumnValues) -> ColumnMeta:
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
        about["dropped"] = digest_of_dropped(shard)
        write_durably(paths.meta, rebuilt_meta(making, about))
        move_durably(making, paths.lmdb)
    except (lmdb.Error, OSError) as error:
        remedy = remedy_for_failed_write(making.parent)
        raise StoreError(f"{making} cannot be written: {error}; {remedy}") from error
    finally:
        making.unlink(missing_ok=True)
        if held is not None:
            os.close(held)
    return read_column_meta(store, name)


def digest_of_dropped(shard: SealedShard) -> str:
    """Return the digest of a shard's dropped rows, bucket after bucket; an empty string if it has none."""
    rows = [(bucket, shard.dropped_rows(bucket)) for bucket in sorted(shard.entry.live)]
    data = b"".join(b"%b\0%b" % (bucket.encode("ascii"), own.tobytes()) for bucket, own in rows if len(own))
    return bytes_digest(data) if data else ""


def _buckets(shard: SealedShard) -> list[str]:
    return sorted(bucket for bucket, live in shard.entry.live.items() if live)


def _write_blocks(path: Path, name: str, shard_id: bytes, shard: SealedShard, column: str, values: ColumnValues) -> None:
    with lmdb.open(str(path), subdir=False, lock=False, map_size=SPARE_BYTES, sync=False) as env:
        map_bytes = SPARE_BYTES
        for bucket in _buckets(shard):
            blocks = _blocks(column, values, bucket, ids_by_row(shard, bucket))
            waiting: list[tuple[bytes, bytes]] = []
            for number, block in enumerate(blocks):
                waiting.append((block_key(bucket, number), block))
                if sum(len(own) for _, own in waiting) >= TRANSACTION_BYTES:
                    map_bytes = _put(env, waiting, map_bytes)
            map_bytes = _put(env, waiting, map_bytes)
        with env.begin(write=True) as txn:  # which all keys of blocks come before
            txn.put(META_KEY, msgpack.packb({"format_version": FORMAT_VERSION, "shard": name, "shard_id": shard_id}))
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
    index = shard.index[shard.index["bucket"] == shard.groups.index(bucket)]
    rows, ids = index["row"], np.zeros((shard.entry.groups[bucket].rows, 16), dtype=np.uint8)
    if len(rows) != len(ids) or int(rows.max(initial=0)) >= len(ids):
        raise CorruptError(f"{shard.paths.meta}: its rows of {bucket} are not those of the manifest; run `store verify`")
    ids[rows] = index["digest"]
    return ids
