"""Seal a shard: rewrite it in key order, locate and verify every block's byte range, write extents and index.

`python -m bucketline.store.write.seal STORE NAME` seals a shard that an interrupted run left. It is a separate process because
LMDB follows pointers in a file that has not been checked yet: if that crashes, only this process dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import struct
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lmdb
import msgpack
import numpy as np

from bucketline.errors import BucketlineError, CorruptError, LockedError, StoreError
from bucketline.files.atomic_write import CREATE, FILE_MODE, move_durably, write_durably
from bucketline.files.disk_space import remedy_for_failed_write
from bucketline.files.locks import FileLock
from bucketline.store.format.block import CHECKSUM
from bucketline.store.format.columns import RAGGED_PREFIX
from bucketline.store.format.hashing import DIGEST_BYTES, LINE_BYTES, READ_BYTES, LineSums
from bucketline.store.format.layout import (
    IN_FILE,
    META_KEY,
    SAMPLE_PREFIX,
    SHARD_ID_BYTES,
    TEXT_ERROR,
    pending_path,
    shard_paths,
    split_block_key,
)
from bucketline.store.format.safetensors_header import DTYPES, LENGTH_BYTES, MAX_HEADER_BYTES, read_header
from bucketline.store.format.sample_record import captions_checksum, decode_record
from bucketline.store.format.text_block import DIGEST, STARTS, TEXT_GROUP, is_bucket
from bucketline.store.format.text_error import TextError
from bucketline.store.shard.read_lmdb import read_lmdb
from bucketline.store.shard.reader import INDEX_FORMAT, keys_of
from bucketline.store.shard.row_locator import EXTENTS_FORMAT, LINE_CHECKSUM
from bucketline.store.shard.sidecar import encode_paged
from bucketline.typed_json import decode, encode

_NOT_LMDB = (lmdb.InvalidError, lmdb.CorruptedError, lmdb.VersionMismatchError, lmdb.PageNotFoundError)
SPARE_BYTES = 1 << 24  # for the new file's map: only addresses
TRANSACTION_BYTES = 32 << 20  # memory that LMDB holds while appending
MIN_PAGE_BYTES = 4096  # of supported systems
_MAX_PAGE_BYTES = 1 << 15  # that LMDB takes
_PAGE_HEAD = struct.Struct("=16x I 20x I")  # page 0 in the LMDB 0.9 format: magic number and page size
_MAGIC = 0xBEEFC0DE
_PLACE = struct.Struct("<QQQ")  # a value's offset, length and address
_memcmp = ctypes.CDLL(None).memcmp  # comparing memoryviews goes element by element: twenty times slower
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_FAILED, _LOCKED, _DAMAGED = 1, 3, 4  # exit codes of the sealing process
_FROM_OUTSIDE = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)  # signals that are not caused by the file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from io import FileIO

    from numpy.typing import NDArray

    from bucketline.store.format.layout import ShardPaths


def seal(store: Path, name: str) -> bool:
    """Seal the pending shard `name`, which its writer has closed. Return False if it was empty and was removed.

    The order makes every crash harmless: the sidecars are written first, the shard's file last, and only a shard's file under
    `shards/` makes a shard. If it exists already, a crash came before the pending file was removed; it is removed now.

    Raises:
        StoreError: if a different sealed shard has that name, the disk is full, or the file cannot be opened.
        CorruptError: if a block or record is invalid.
    """
    pending, paths = pending_path(store, name), shard_paths(store, name)
    copy = pending.with_suffix(".sealing")
    if os.path.lexists(paths.lmdb):
        if os.path.lexists(pending):  # if not, a sealer that outlived its command has just finished
            _refuse_another(pending, paths, name)
            _remove(pending)
        return True
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
        remedy = remedy_for_failed_write(pending.parent)  # before the copy is removed, which frees space
        _remove_if_possible(copy)
        raise StoreError(f"{pending} cannot be sealed: {error}; {remedy}") from error
    return True


def may_have_commits(pending: Path) -> bool:
    """Return whether a pending shard may hold a sample: False if it ends with LMDB's first two pages, which are written first.

    The page size is read from the file: another machine may have written it. If it is unreadable, the smallest page size is
    assumed, and sealing then reports the damage; unless all bytes are 0, as a power failure leaves what was not synced.
    """
    with pending.open("rb") as file:
        head = file.read(2 * _MAX_PAGE_BYTES)
        num_bytes = os.fstat(file.fileno()).st_size
    page_bytes = MIN_PAGE_BYTES
    if len(head) >= _PAGE_HEAD.size:
        magic, said = _PAGE_HEAD.unpack_from(head)
        page_bytes = max(said, MIN_PAGE_BYTES) if magic == _MAGIC else MIN_PAGE_BYTES
    return num_bytes > 2 * page_bytes and (num_bytes > len(head) or any(head))


def _refuse_another(pending: Path, paths: ShardPaths, name: str) -> None:
    """Check that the sealed shard of the same name holds every block, record and caption of a pending one.

    Raises:
        StoreError: if it does not, naming both.
    """
    is_same = False
    with contextlib.suppress(*_NOT_LMDB, lmdb.Error, OSError, StoreError):
        has_sidecars = paths.extents.is_file() and paths.index.is_file()
        is_same = has_sidecars and paths.lmdb.is_file() and _walk_file(paths.lmdb, name) == _walk_file(pending, name)
    if not is_same:
        raise StoreError(
            f"{paths.lmdb} exists and differs from what {pending} would become; a sealed shard never changes: "
            f"rename the pending file to {pending.with_stem(f'{name}-2').name}, or another name that no shard has, and rerun "
            "the command, which adopts it as a shard of its own"
        )


def _walk_file(path: Path, name: str) -> _Found:
    """Walk a shard's file without its offsets, which may differ for equal keys and values."""
    with read_lmdb(path) as (_, txn):
        return _walk(((bytes(key), value, 0) for key, value in txn.cursor()), name)


def seal_apart(store: Path, name: str) -> None:
    """Seal a shard that another run left, in a separate process. Its pending file is gone afterwards.

    Raises:
        LockedError: if its writer is still running.
        CorruptError: if it is damaged, with what to do about it.
        StoreError: if it cannot be sealed for another reason.
    """
    command = [sys.executable, "-P", "-m", "bucketline.store.write.seal", str(store), name]  # -P: ignore the current folder
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    pending = pending_path(store, name)
    if done.returncode == 0 and not os.path.lexists(pending):  # the sealing process removes it last
        return
    reason = (done.stderr.strip().splitlines() or [f"the process ended with {done.returncode}"])[-1]
    if done.returncode == _LOCKED:
        raise LockedError(reason)
    if done.returncode == _FAILED:
        raise StoreError(reason)
    if done.returncode == 0 or -done.returncode in _FROM_OUTSIDE:
        raise StoreError(
            f"{pending} is not sealed: the process for it ended with {done.returncode}; the file is unchanged: "
            "rerun the command"
        )
    raise CorruptError(
        f"{pending}, left by an interrupted run, cannot be sealed: {reason}; "
        "move that file elsewhere and rerun the command, which packs its samples again"
    )


def rebuilt_sidecars(path: Path) -> tuple[bytes, bytes]:
    """Return the contents of a sealed shard's extents and index, rebuilt from its file; the caller has verified its digest.

    Raises:
        CorruptError: if the file is not a shard.
    """
    try:
        extents, index = _describe(path, path.stem)
    except lmdb.Error as error:
        raise CorruptError(f"{path} cannot be opened by LMDB: {error}") from error
    if index is None:
        raise CorruptError(f"{path} holds no sample")
    return extents, index


def column_extents(path: Path, name: str, about: Mapping[str, object]) -> bytes:
    """Return the contents of the extents of an added column's file, with `about` in their metadata.

    Raises:
        CorruptError: if the file is not one.
    """
    try:
        found, own, lines = _examined(path, name)
    except lmdb.Error as error:
        raise CorruptError(f"{path} cannot be opened by LMDB: {error}") from error
    if not found.blocks or not found.shard_id:
        raise CorruptError(f"{path} holds no block, or no id")
    return _extents(found, {**own, **about}, lines)


def _write_anew(pending: Path, copy: Path) -> None:
    """Rewrite a shard's values to a new file in key order.

    LMDB's own compacting copy keeps leaf pages as full as random-order writes left them, two thirds; appending in key order
    fills them: 1.6 % of the payload at rows of 8 KiB (`bench/store/disk_bytes.py`).
    """
    copy.unlink(missing_ok=True)
    os.close(os.open(copy, CREATE, FILE_MODE))
    map_bytes = 2 * pending.stat().st_size + SPARE_BYTES
    with (
        read_lmdb(pending) as (_, reading),
        lmdb.open(str(copy), subdir=False, lock=False, map_size=map_bytes, sync=False) as target,
    ):
        items = reading.cursor().iternext()
        while _append(target, items):
            pass
        target.sync(True)


def _append(target: Any, items: Iterator[tuple[memoryview, memoryview]]) -> bool:  # noqa: ANN401 - lmdb has no types
    """Append some items in one transaction. Return False if none is left."""
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
    with contextlib.suppress(OSError):  # otherwise the next run removes it
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
_PACKED = struct.Struct("<16s16sQQqQIII")  # the same, packed


@dataclass(slots=True)
class _Found:
    """Result of walking a shard, packed: a shard may have a million samples, and a record object takes 2 KiB."""

    blocks: dict[str, list[tuple[int, int, int, int]]] = field(default_factory=dict)  # offset, length, first row, rows
    samples: bytearray = field(default_factory=bytearray)  # of _ENTRY
    buckets: dict[str, int] = field(default_factory=dict)  # bucket names of the samples, by their numbers in `samples`
    captions: bytearray = field(default_factory=bytearray)  # digests in row order
    tokens: dict[str, int] = field(default_factory=dict)  # of the captions and of ragged entries, by group
    max_tokens: dict[str, int] = field(default_factory=dict)  # likewise, of the longest
    text_error: TextError | None = None
    shard_id: bytes = b""
    shard_id_at: int = 0


class _UnconfirmedError(Exception):
    """A value is not at its expected file offset."""


def _describe(path: Path, name: str) -> tuple[bytes, bytes | None]:
    """Return the contents of a shard's extents and index files; None for the index if it holds no sample."""
    found, about, lines = _examined(path, name)
    if not found.samples:
        return b"", None
    return _extents(found, about, lines), _index(found, name)


def _examined(path: Path, name: str) -> tuple[_Found, dict[str, object], LineSums]:
    """Return what is in a file, what its extents say of it, and the checksums of its lines.

    Raises:
        StoreError: if a value is not where the format of LMDB has it, as with another engine or a medium that fails.
    """
    with read_lmdb(path) as (env, txn), path.open("rb", buffering=0) as file:
        page_bytes, lines, placed = env.stat()["psize"], LineSums(), bytearray()
        try:
            found = _walk(_located(txn, os.fstat(file.fileno()).st_size, page_bytes, placed), name)
            _read_back(file, placed, lines)
        except _UnconfirmedError as error:
            raise StoreError(
                f"shard {name} cannot be sealed: a read of {path.name} gives other bytes than LMDB "
                f"{'.'.join(map(str, lmdb.version()))} does, expected the same; what is committed stays in pending/: check the "
                "disk, install the lmdb package that bucketline requires, and rerun"
            ) from error
    about = {"places": IN_FILE, "shard_id": found.shard_id.hex(), "shard_id_at": found.shard_id_at, "page_bytes": page_bytes}
    return found, about, lines


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
        raise CorruptError(f"shard {name} has no id: the value of {META_KEY!r} is missing")
    return found


def _note_meta(found: _Found, offset: int, value: bytes, name: str) -> None:
    try:
        meta = msgpack.unpackb(value, raw=False)
        found.shard_id = bytes(meta["shard_id"])
        found.text_error = decode(TextError, error) if (error := meta.get(TEXT_ERROR)) is not None else None
    except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
        raise CorruptError(f"shard {name}: the value of {META_KEY!r} is damaged ({error!r:.200})") from error
    if len(found.shard_id) != SHARD_ID_BYTES:
        raise CorruptError(f"shard {name}: its id has {len(found.shard_id)} bytes, expected {SHARD_ID_BYTES}")
    found.shard_id_at = offset + value.index(found.shard_id)


def _note_record(found: _Found, digest: bytes, offset: int, value: memoryview, name: str) -> None:
    sample = decode_record(value, f"shard {name}")
    bucket = found.buckets.setdefault(sample.bucket, len(found.buckets))
    if len(digest) != DIGEST_BYTES or len(sample.content) != DIGEST_BYTES:
        raise CorruptError(f"shard {name}: a sample's key or content digest does not have {DIGEST_BYTES} bytes")
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
    if is_bucket(group):
        return
    data = block[header_bytes:]
    starts = np.frombuffer(data[place[STARTS].begin : place[STARTS].end], dtype="<i8")
    found.tokens[group] = found.tokens.get(group, 0) + int(starts[-1])
    found.max_tokens[group] = max(found.max_tokens.get(group, 0), int(np.diff(starts).max()))
    if group == TEXT_GROUP:
        found.captions += data[place[DIGEST].begin :][: DIGEST_BYTES * entries[-1][3]]


def _located(
    txn: Any,  # noqa: ANN401 - lmdb has no types
    num_bytes: int,
    page_bytes: int,
    placed: bytearray,
) -> Iterator[tuple[bytes, memoryview, int]]:
    """Yield a shard's keys and values in key order, each with its file offset, which `_read_back` verifies from `placed`.

    A page begins with its own number (LMDB 0.9 format), so a value's offset follows from its address.
    """
    for key, value in txn.cursor():
        address = np.frombuffer(value, dtype="u1").ctypes.data
        in_page = address % page_bytes
        page = int.from_bytes(ctypes.string_at(address - in_page, 8), sys.byteorder)
        offset = page * page_bytes + in_page
        if offset + len(value) > num_bytes:
            raise _UnconfirmedError
        placed += _PLACE.pack(offset, len(value), address)
        yield bytes(key), value, offset


def _read_back(file: FileIO, packed: bytearray, lines: LineSums) -> None:
    """Read a shard's file once, compare each value with LMDB's memory, and pass all bytes to `lines`.

    `packed` has each value's offset in the file, its length and its address, as _PLACE.

    Raises:
        _UnconfirmedError: if a value is not at its offset.
    """
    placed: NDArray[np.uint64] = np.frombuffer(packed, dtype="<u8").reshape(-1, 3)
    offsets, lengths, addresses = (column.tolist() for column in placed[np.argsort(placed[:, 0], kind="stable")].T)
    if any(offset + length > other for offset, length, other in zip(offsets, lengths, offsets[1:], strict=False)):
        raise _UnconfirmedError
    buffer = memoryview(bytearray(READ_BYTES))
    address = np.frombuffer(buffer, dtype="u1").ctypes.data
    at = n = 0
    while count := file.readinto(buffer):
        end = at + count
        while n < len(offsets) and offsets[n] < end:
            begin, stop = max(offsets[n], at), min(offsets[n] + lengths[n], end)
            if _memcmp(address + begin - at, addresses[n] + begin - offsets[n], stop - begin):
                raise _UnconfirmedError
            if stop < offsets[n] + lengths[n]:
                break  # it continues in what is read next
            n += 1
        lines.update(buffer[:count])
        at = end
    if n < len(offsets):  # the file is shorter than it was
        raise _UnconfirmedError


def _extents(found: _Found, about: Mapping[str, object], lines: LineSums) -> bytes:
    groups: dict[str, dict[str, int]] = {}
    entries: list[tuple[int, int, int, int]] = []
    for group, own in sorted(found.blocks.items()):
        groups[group] = {"first_block": len(entries), "blocks": len(own), "rows": sum(entry[3] for entry in own)}
        entries.extend(own)
    table = np.array(entries, dtype="<u8")
    fields = ("offset", "length", "first_row", "rows")
    lengths = {
        group: {"tokens": found.tokens.get(group, 0), "max_tokens": found.max_tokens.get(group, 0)}
        for group in (TEXT_GROUP, *sorted(found.tokens))
    }
    text: dict[str, object] = {**lengths.pop(TEXT_GROUP)}
    if found.text_error is not None:
        text["error"] = encode(found.text_error)
    tensors = [(field, "U64", table[:, at]) for at, field in enumerate(fields)]
    tensors.append((LINE_CHECKSUM, "U64", np.array(lines.finish(), dtype="<u8")))
    if lengths:
        about = {"ragged": {group.removeprefix(RAGGED_PREFIX): own for group, own in lengths.items()}, **about}
    return encode_paged(tensors, {"format": EXTENTS_FORMAT, "groups": groups, "text": text, "line_bytes": LINE_BYTES, **about})


def _index(found: _Found, name: str) -> bytes:
    groups = sorted(found.blocks)
    if strange := found.buckets.keys() - found.blocks.keys():
        raise CorruptError(f"shard {name}: a sample record names the bucket {min(strange)!r:.80}, which has no block")
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
    """Return the stable sort order of digests `[n, 16]`."""
    return np.argsort(keys_of(digests), kind="stable")


def main() -> int:
    """Seal one shard under its lock; the last line of stderr is the error."""
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
