"""A shard's sidecar, `NAME.meta`: its manifest entry, block table, sums of lines, captions by digest, and last its index.

The index has an entry of fixed length for each sample, sorted by the digest of the id, at the end of the file; each proves
itself, so that a range of them can be read without the rest.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from bucketline.errors import CorruptError, StoreError
from bucketline.files.paths import open_regular
from bucketline.store.format.block import CHECKSUM, DIGEST_BYTES, bytes_digest
from bucketline.store.format.manifest import (
    COLUMN_SHARD_NAME,
    ColumnShardEntry,
    FileEntry,
    ShardEntry,
    pending_path,
    shard_paths,
)
from bucketline.store.format.schema import BucketEntry, ColumnEntry
from bucketline.store.format.text import TextError
from bucketline.store.shard.sidecar import Sidecar
from bucketline.typed_json import decode

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

META_FORMAT = "bucketline.shard/1"
LINE_CHECKSUM = "line_checksum"  # the tensor with a checksum for each 8 MiB of the shard's file
INDEX = "index"  # the last tensor


def index_dtype(encoders: int) -> np.dtype[Any]:
    """Return the form of an entry of the index of a shard of whose captions so many text encoders cut some."""
    fields = [
        ("digest", "u1", (DIGEST_BYTES,)),  # of the sample's id
        ("content", "u1", (DIGEST_BYTES,)),
        ("record_offset", "<u8", ()),
        ("source_bytes", "<u8", ()),
        ("source_mtime_ns", "<i8", ()),
        ("captions", "<u8", ()),  # a checksum
        ("record_bytes", "<u4", ()),
        ("row", "<u4", ()),
        ("bucket", "<u2", ()),  # a number in the sorted names of the shard's groups
        ("cut", "<u2", (encoders,)),  # captions cut, by the sorted names of these encoders
    ]
    used = sum(np.dtype((dtype, shape)).itemsize for _, dtype, shape in fields)
    return np.dtype([*fields, ("zeros", "u1", (-used % 8,)), (CHECKSUM, "<u8", ())])


def entry_seed(shard_id: str) -> int:
    """Return the seed of the checksums of a shard's index entries: an entry of another shard does not match."""
    return int.from_bytes(bytes.fromhex(shard_id)[:8], "little")


def entry_checksums(entries: NDArray[Any], shard_id: str) -> NDArray[np.uint64]:
    """Return the checksums of index entries: of their bytes up to it."""
    data, seed, size = memoryview(np.ascontiguousarray(entries).tobytes()), entry_seed(shard_id), entries.dtype.itemsize
    sums = (xxhash.xxh3_64_intdigest(data[at : at + size - 8], seed) for at in range(0, len(data), size))
    return np.fromiter(sums, dtype="<u8", count=len(entries))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardMeta:
    """A sealed shard's manifest entry and its buckets' entries, and the error of the captions that were quantised for it."""

    entry: ShardEntry
    buckets: tuple[BucketEntry, ...]
    text_error: TextError | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnMeta:
    """The file of an added column in `shards/`."""

    column: str
    rows_of: str  # id of the shard whose rows it belongs to
    dropped: str  # digest of the rows that were dropped then, which have no value; "" without any
    forms: dict[str, ColumnEntry]  # by bucket
    entry: ColumnShardEntry


def decode_meta(data: bytes, path: Path | str, name: str) -> ShardMeta:
    """Return what the bytes of the sidecar of the shard `name` say of it."""
    about, own = _entry_in(data, path)
    try:
        return ShardMeta(
            entry=decode(ShardEntry, {**about["entry"], "name": name, "meta": own, "added": {}}),
            buckets=decode(tuple[BucketEntry, ...], about["buckets"]),
            text_error=None if about["text_error"] is None else decode(TextError, about["text_error"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptError(f"{path} does not describe a shard ({error!r:.200})") from error


def _entry_in(data: bytes, path: Path | str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a sidecar's metadata, after comparing its checksums, and its own length and digest."""
    return Sidecar(path, data, META_FORMAT).metadata, {"num_bytes": len(data), "digest": bytes_digest(data)}


def read_meta(store: Path, name: str, *, with_columns: bool = False) -> ShardMeta:
    """Return what the sidecar of a sealed shard in `shards/` says of it; reads the shard's id in its own file, and no more.

    A copy of rows has their added columns in files of its own: they are in its entry `with_columns`.
    """
    paths = shard_paths(store, name)
    again = f"move {paths.lmdb} to {pending_path(store, name)} and rerun the command, which seals it again"
    try:
        data = _read(paths.meta)
        found = decode_meta(data, paths.meta, name)
        _check_length(paths.lmdb, found.entry.lmdb)
        _check_id(paths.lmdb, found.entry.shard_id, Sidecar(paths.meta, data, META_FORMAT).about("shard_id_at"))
    except FileNotFoundError as error:
        if not paths.lmdb.exists():
            again = "the shard was removed, or its rows rewritten meanwhile: rerun the command, which packs what is lacking"
        raise StoreError(f"{error.filename} is missing; {again}") from error
    except CorruptError as error:
        raise CorruptError(f"{error}; {again}") from error
    if with_columns:
        columns = (read_column_meta(store, own) for own in column_files(store, name))
        found.entry.added.update({one.column: one.entry for one in columns if one.rows_of == found.entry.shard_id})
    return found


def _read(path: Path) -> bytes:
    with open(open_regular(path), "rb") as file:  # noqa: PTH123 - opens a descriptor
        return file.read()


def _check_length(path: Path, listed: FileEntry) -> None:
    if (found := path.stat().st_size) != listed.num_bytes:
        raise CorruptError(f"{path} has {found} bytes, its sidecar says {listed.num_bytes}")


def _check_id(path: Path, shard_id: str, at: object) -> None:
    """Compare the id in a shard's own file: two shards of equal length may have had their sidecars exchanged.

    One that was sent to a bucket is a sparse file here, of zeros.
    """
    with open(open_regular(path), "rb") as file:  # noqa: PTH123 - opens a descriptor
        found = os.pread(file.fileno(), len(shard_id) // 2, at) if isinstance(at, int) and 0 <= at < 1 << 62 else b""
    if found.hex() not in (shard_id, "0" * len(shard_id)):
        raise CorruptError(f"{path} has the id {found.hex() or None}, its sidecar says {shard_id}")


def read_column_meta(store: Path, name: str) -> ColumnMeta:
    """Return what the sidecar of an added column's file in `shards/` says of it."""
    paths = shard_paths(store, name)
    try:
        about, own = _entry_in(_read(paths.meta), paths.meta)
        entry = decode(ColumnShardEntry, {**about["entry"], "meta": own})
        _check_length(paths.lmdb, entry.lmdb)
        forms = decode(dict[str, ColumnEntry], about["forms"])
        column, rows_of, dropped = (str(about[key]) for key in ("column", "rows_of", "dropped"))
        return ColumnMeta(column=column, rows_of=rows_of, dropped=dropped, forms=forms, entry=entry)
    except OSError as error:
        raise StoreError(f"{paths.meta} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptError(f"{paths.meta} does not describe an added column ({error!r:.200})") from error


def column_files(store: Path, shard: str = "*") -> list[str]:
    """Return the names of the added columns' complete files in `shards/`, of one shard or of all."""
    return sorted(path.stem for path in (store / "shards").glob(f"{shard}.*.lmdb") if COLUMN_SHARD_NAME.fullmatch(path.stem))
