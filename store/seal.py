"""Sealing a shard: written anew in key order, every block's byte range found and confirmed, extents and index beside it.

`python -m bucketline.store.seal STORE NAME` seals a shard that an interrupted run left behind. It is a process of its own
because LMDB follows pointers in a file that nobody has checked yet: if that ends a process, it is this one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import lmdb
import msgpack
import numpy as np

from bucketline.errors import BucketlineError, CorruptError, LockedError, StoreError
from bucketline.store.block_table import EXTENTS_FORMAT
from bucketline.store.digests import DIGEST_BYTES
from bucketline.store.durable import move_durably, write_durably
from bucketline.store.layout import META_KEY, SAMPLE_PREFIX, SHARD_ID_BYTES, Places, pending_path, shard_paths, split_block_key
from bucketline.store.locks import FileLock
from bucketline.store.paged_file import encode_paged
from bucketline.store.record import captions_checksum, decode_record
from bucketline.store.sealed_shard import INDEX_FORMAT, KEY
from bucketline.store.tensor_file import DTYPES, LENGTH_BYTES, MAX_HEADER_BYTES, read_header
from bucketline.store.text_block import CHECKSUM, DIGEST, STARTS, TEXT_GROUP

_NOT_LMDB = (lmdb.InvalidError, lmdb.CorruptedError, lmdb.VersionMismatchError, lmdb.PageNotFoundError)
SPARE_BYTES = 1 << 24  # of the new file's map: only addresses
TRANSACTION_BYTES = 32 << 20  # what LMDB holds in memory while it appends
_FAILED, _LOCKED, _DAMAGED = 1, 3, 4  # exit codes of the process that seals

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray


def seal(store: Path, name: str) -> bool:
    """Seal the pending shard `name`; its writer has closed it. False where it held no sample and was removed.

    The order makes every crash harmless: the sidecars come first, the shard's file last, and only a shard's file under
    `shards/` makes a shard.

    Raises:
        CorruptError: where a block or record is not what a writer writes.
        StoreError: where the disk is full or the file cannot be opened.
    """
    pending, paths = pending_path(store, name), shard_paths(store, name)
    copy = pending.with_suffix(".sealing")
    if paths.lmdb.exists():
        raise StoreError(f"{paths.lmdb} exists; a sealed shard never changes, so {pending} cannot take its place")
    try:
        paths.folder.mkdir(exist_ok=True)
        _write_anew(pending, copy)
        extents, index = _describe(copy, name)
        if index is None:
            _remove(pending, copy)
            return False
        write_durably(paths.extents, extents)
        write_durably(paths.index, index)
        move_durably(copy, paths.lmdb)
        _remove(pending)
    except _NOT_LMDB as error:
        _remove_if_possible(copy)
        raise CorruptError(f"{pending} is damaged: {error}") from error
    except (lmdb.Error, OSError) as error:
        _remove_if_possible(copy)
        raise StoreError(f"{pending} cannot be sealed: {error}; mend that and run the same command again") from error
    return True


def seal_apart(store: Path, name: str) -> None:
    """Seal a shard that another run left behind, in a process of its own.

    Raises:
        LockedError: where its writer is still at work.
        CorruptError: where it is damaged, with what to do about it.
        StoreError: where it cannot be sealed for another reason.
    """
    command = [sys.executable, "-m", "bucketline.store.seal", str(store), name]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode == 0:
        return
    reason = (done.stderr.strip().splitlines() or [f"the process ended with {done.returncode}"])[-1]
    if done.returncode == _LOCKED:
        raise LockedError(reason)
    if done.returncode == _FAILED:
        raise StoreError(reason)
    raise CorruptError(
        f"{pending_path(store, name)}, left by an interrupted run, cannot be sealed: {reason}; "
        "move that file away and run the same command again, its samples will then be packed anew"
    )


def _write_anew(pending: Path, copy: Path) -> None:
    """Write a shard's values to a new file in the order of their keys.

    LMDB's own compacting copy keeps its leaf pages as full as the random order of writing left them, two thirds; appended
    in order they fill: 1.6 % of the payload at rows of 8 KiB (`bench/disk_bytes.py`).
    """
    copy.unlink(missing_ok=True)
    source = lmdb.open(str(pending), subdir=False, lock=False, readonly=True, create=False)
    try:
        map_bytes = 2 * pending.stat().st_size + SPARE_BYTES
        target = lmdb.open(str(copy), subdir=False, lock=False, map_size=map_bytes, sync=False)
        try:
            with source.begin(buffers=True) as reading:
                items = reading.cursor().iternext()
                while _append(target, items):
                    pass
            target.sync(True)
        finally:
            target.close()
    finally:
        source.close()


def _append(target: Any, items: Iterator[tuple[memoryview, memoryview]]) -> bool:  # noqa: ANN401 - lmdb has no types
    """Append some of the items in one transaction; False where there is none left."""
    num_bytes = 0
    with target.begin(write=True) as writing:
        for key, value in items:
            writing.put(key, value, append=True)
            num_bytes += len(value)
            if num_bytes >= TRANSACTION_BYTES:
                return True
    return False


def _remove(*paths: Path) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _remove_if_possible(path: Path) -> None:
    with contextlib.suppress(OSError):  # else the next run removes it
        path.unlink(missing_ok=True)


_ENTRY = np.dtype(
    [
        ("digest", "u1", (DIGEST_BYTES,)),
        ("content", "u1", (DIGEST_BYTES,)),
        ("record_offset", "<u8"),
        ("source_bytes", "<u8"),
        ("source_mtime_ns", "<i8"),
        ("captions", "<u8"),
        ("record_bytes", "<u4"),
        ("row", "<u4"),
        ("bucket", "<u4"),
    ]
)
_PACKED = struct.Struct("<16s16sQQqQIII")  # the same


@dataclass(slots=True)
class _Found:
    """What a walk over a shard finds, packed: a shard may have a million samples, and a record takes 2 KiB as an object."""

    blocks: dict[str, list[tuple[int, int, int, int]]] = field(default_factory=dict)  # offset, length, first row, rows
    samples: bytearray = field(default_factory=bytearray)  # of _ENTRY
    buckets: dict[str, int] = field(default_factory=dict)  # the samples', by the numbers that `samples` has
    captions: bytearray = field(default_factory=bytearray)  # digests, in the order of their rows
    tokens: int = 0
    max_tokens: int = 0
    shard_id: bytes = b""
    shard_id_at: int = 0


class _UnconfirmedError(Exception):
    """A value does not lie where it was expected in the file."""


def _describe(path: Path, name: str) -> tuple[bytes, bytes | None]:
    """Give the contents of a shard's extents and index files; no index where it holds no sample.

    Where a value's place in the file cannot be confirmed by reading it back (another engine, another page format), the
    whole shard is described by key: readers then ask LMDB for its values.
    """
    env = lmdb.open(str(path), subdir=False, lock=False, readonly=True, create=False)
    try:
        page_bytes = env.stat()["psize"]
        with path.open("rb", buffering=0) as file, env.begin(buffers=True) as txn:
            try:
                places = Places.FILE
                found = _walk(_confirmed(txn, file, page_bytes), name)
            except _UnconfirmedError:
                places = Places.KEY
                found = _walk(_end_to_end(txn), name)
    finally:
        env.close()
    if not found.samples:
        return b"", None
    about = {"places": places, "shard_id": found.shard_id.hex(), "shard_id_at": found.shard_id_at, "page_bytes": page_bytes}
    return _extents(found, about), _index(found, name)


def _walk(values: Iterator[tuple[bytes, memoryview, int]], name: str) -> _Found:
    found = _Found()
    for key, value, offset in values:
        if (block_key := split_block_key(key)) is not None:
            _note_block(found, *block_key, offset, value, name)
        elif key.startswith(SAMPLE_PREFIX):
            _note_record(found, key[len(SAMPLE_PREFIX) :], offset, value, name)
        elif key == META_KEY:
            _note_meta(found, offset, bytes(value), name)
    if found.samples and not found.shard_id:
        raise CorruptError(f"shard {name} does not say which it is: the value of {META_KEY!r} is missing")
    return found


def _note_meta(found: _Found, offset: int, value: bytes, name: str) -> None:
    try:
        found.shard_id = bytes(msgpack.unpackb(value, raw=False)["shard_id"])
    except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
        raise CorruptError(f"shard {name}: the value of {META_KEY!r} is damaged ({error!r:.200})") from error
    if len(found.shard_id) != SHARD_ID_BYTES:
        raise CorruptError(f"shard {name}: its id has {len(found.shard_id)} bytes, expected {SHARD_ID_BYTES}")
    found.shard_id_at = offset + value.index(found.shard_id)


def _note_record(found: _Found, digest: bytes, offset: int, value: memoryview, name: str) -> None:
    sample = decode_record(value, f"shard {name}")
    bucket = found.buckets.setdefault(sample.bucket, len(found.buckets))
    if len(digest) != DIGEST_BYTES or len(sample.content) != DIGEST_BYTES:
        raise CorruptError(f"shard {name}: a sample's key or content digest has not {DIGEST_BYTES} bytes")
    source = sample.source_bytes, sample.source_mtime_ns, captions_checksum(sample.captions)
    try:
        found.samples += _PACKED.pack(digest, sample.content, offset, *source, len(value), sample.row, bucket)
    except struct.error as error:
        raise CorruptError(f"shard {name}: the record of {sample.id!r:.200} has a number out of range ({error})") from error


def _note_block(found: _Found, group: str, number: int, offset: int, block: memoryview, name: str) -> None:
    item = f"shard {name}, block {number} of {group}"
    entries = found.blocks.setdefault(group, [])
    tensors, metadata, header_bytes = read_header(block[: LENGTH_BYTES + MAX_HEADER_BYTES], len(block), item)
    place = {tensor.name: tensor for tensor in tensors}
    first_row, expected = metadata.get("first_row", ""), sum(entry[3] for entry in entries)
    if number != len(entries) or first_row != str(expected) or CHECKSUM not in place:
        raise CorruptError(f"{item} begins with row {first_row!r:.40}, expected block {len(entries)} with row {expected}")
    entries.append((offset, len(block), expected, place[CHECKSUM].shape[0]))
    if group == TEXT_GROUP:
        data = block[header_bytes:]
        starts = np.frombuffer(data[place[STARTS].begin : place[STARTS].end], dtype="<i8")
        found.captions += data[place[DIGEST].begin :][: DIGEST_BYTES * entries[-1][3]]
        found.tokens += int(starts[-1])
        found.max_tokens = max(found.max_tokens, int(np.diff(starts).max()))


def _end_to_end(txn: Any) -> Iterator[tuple[bytes, memoryview, int]]:  # noqa: ANN401 - lmdb has no types
    """Walk a shard in key order: key, value, and where the value would begin if all of them lay end to end."""
    at = 0
    for key, value in txn.cursor():
        yield bytes(key), value, at
        at += len(value)


def _confirmed(txn: Any, file: BinaryIO, page_bytes: int) -> Iterator[tuple[bytes, memoryview, int]]:  # noqa: ANN401
    """Walk a shard in key order: key, value, and where in the file the value lies, confirmed by reading it back.

    A page of the file begins with its own number (LMDB 0.9 format), so a value's place follows from its address alone.
    """
    num_bytes = os.fstat(file.fileno()).st_size
    for key, value in txn.cursor():
        address = np.frombuffer(value, dtype="u1").ctypes.data
        in_page = address % page_bytes
        page = int.from_bytes(ctypes.string_at(address - in_page, 8), sys.byteorder)
        offset = page * page_bytes + in_page
        if offset + len(value) > num_bytes or os.pread(file.fileno(), len(value), offset) != value:
            raise _UnconfirmedError
        yield bytes(key), value, offset


def _extents(found: _Found, about: Mapping[str, object]) -> bytes:
    groups: dict[str, dict[str, int]] = {}
    entries: list[tuple[int, int, int, int]] = []
    for group, own in sorted(found.blocks.items()):
        groups[group] = {"first_block": len(entries), "blocks": len(own), "rows": sum(entry[3] for entry in own)}
        entries.extend(own)
    table = np.array(entries, dtype="<u8")
    fields = ("offset", "length", "first_row", "rows")
    text = {"tokens": found.tokens, "max_tokens": found.max_tokens}
    return encode_paged(
        [(name, "U64", table[:, at]) for at, name in enumerate(fields)],
        {"format": EXTENTS_FORMAT, "groups": groups, "text": text, **about},
    )


def _index(found: _Found, name: str) -> bytes:
    groups = sorted(found.blocks)
    if strange := found.buckets.keys() - found.blocks.keys():
        raise CorruptError(f"shard {name}: a sample record names the bucket {min(strange)!r:.80}, of which there is no block")
    samples: NDArray[Any] = np.frombuffer(found.samples, dtype=_ENTRY)
    samples = samples[_order(samples["digest"])]
    captions = np.frombuffer(found.captions, dtype="u1").reshape(-1, DIGEST_BYTES)
    caption_row = _order(captions)
    number_of = np.array([groups.index(bucket) for bucket in found.buckets], dtype=DTYPES["U16"])

    def column(name: str, dtype: str) -> tuple[str, str, NDArray[Any]]:
        return name, dtype, np.ascontiguousarray(samples[name], dtype=DTYPES[dtype])

    tensors = [
        *(column(name, "U64") for name in ("record_offset", "source_bytes")),
        column("source_mtime_ns", "I64"),
        column("captions", "U64"),
        *(column(name, "U32") for name in ("record_bytes", "row")),
        ("caption_row", "U32", caption_row.astype(DTYPES["U32"])),
        ("bucket", "U16", number_of[samples["bucket"]]),
        *(column(name, "U8") for name in ("digest", "content")),
        ("caption_digest", "U8", captions[caption_row]),
    ]
    return encode_paged(tensors, {"format": INDEX_FORMAT, "groups": groups, "shard_id": found.shard_id.hex()})


def _order(digests: NDArray[Any]) -> NDArray[np.int64]:
    """Give the order that sorts digests `[n, 16]`, equal ones as they stand."""
    keys = np.ascontiguousarray(digests).reshape(-1).view(KEY)
    return np.argsort(keys, kind="stable")


def main() -> int:
    """Seal one shard, under its lock; the last line of stderr says what went wrong."""
    store, name = Path(sys.argv[1]), sys.argv[2]
    lock_path = pending_path(store, name).with_suffix(".lock")
    try:
        with FileLock(lock_path):
            seal(store, name)
            lock_path.unlink(missing_ok=True)
    except BucketlineError as error:
        print(error, file=sys.stderr)
        if isinstance(error, LockedError):
            return _LOCKED
        return _DAMAGED if isinstance(error, CorruptError) else _FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
