"""Seal a shard: put its blocks and records in key order, locate and verify every block's byte range, write its sidecar.

`python -m bucketline.store.write.seal STORE NAME` seals a shard that an interrupted run left. It is a separate process because
LMDB follows pointers in a file that has not been checked yet: if that crashes, only this process dies.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import struct
import subprocess
import sys
from array import array
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import lmdb
import msgpack
import numpy as np

from bucketline.errors import BucketlineError, CorruptError, LockedError, StoreError
from bucketline.files.atomic_write import FileLock, create_aside, move_durably, remedy_for_failed_write, write_durably
from bucketline.files.paths import open_regular
from bucketline.store.format.block import (
    CAPTIONS,
    CHECKSUM,
    CROP,
    DIGEST_BYTES,
    DTYPES,
    ID,
    IMAGE_AXES,
    LENGTH_BYTES,
    LINE_BYTES,
    MAX_HEADER_BYTES,
    ORIGINAL_SIZE,
    RAGGED_PREFIX,
    READ_BYTES,
    BlockSpec,
    Column,
    FileSums,
    caption_digest,
    read_header,
    sample_digest,
)
from bucketline.store.format.manifest import (
    META_KEY,
    SAMPLE_PREFIX,
    SHARD_ID_BYTES,
    TEXT_ERROR,
    pending_path,
    sample_key,
    shard_paths,
    split_block_key,
)
from bucketline.store.format.schema import BucketEntry, bucket_entry, captions_checksum, decode_record
from bucketline.store.format.text import DIGEST, STARTS, TEXT_GROUP, TextError, is_bucket
from bucketline.store.shard.meta import INDEX, LINE_CHECKSUM, META_FORMAT, entry_checksums, index_dtype
from bucketline.store.shard.reader import keys_of
from bucketline.store.shard.sidecar import encode_sidecar
from bucketline.typed_json import decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from io import FileIO

    from numpy.typing import NDArray

    from bucketline.store.format.manifest import ShardPaths


# -------------------------------------------------------------------------------------------------------------- shard contents
# Describe a shard's file: walk it through LMDB, check that its rows and records go together, make its sidecar.
#
# Sealing does this with the file that it has written, and refuses one with a fault. `store verify` does it again, and
# compares.

_KEPT = (ID, CAPTIONS, ORIGINAL_SIZE, CROP, DIGEST)  # columns of blocks that records, or other groups, repeat
_from_buffer, _BYTE = np.frombuffer, np.dtype("u1")  # looked up for each record
_SAMPLE = np.dtype(
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
        ("num_captions", "<u4"),
        (ORIGINAL_SIZE, "<i4", (2,)),
        (CROP, "<i4", (2,)),
    ]
)
_AS_NOTED = ("digest", "content", "record_offset", "source_bytes", "source_mtime_ns", "captions", "record_bytes", "row")
_PACKED = struct.Struct("<16s16sQQqQIIII2i2i")  # the same, packed


@dataclass(slots=True)
class ShardContents:
    """The contents of a shard's file, packed: a shard may have a million samples, and a record object takes 2 KiB."""

    name: str
    report: Callable[..., object] = field(compare=False)  # takes a fault: what is wrong, then group, block, row and sample
    page_bytes: int = field(default=0, compare=False)
    blocks: dict[str, list[tuple[int, int, int, int]]] = field(default_factory=dict)  # offset, length, first row, rows
    forms: dict[str, BlockSpec] = field(default_factory=dict)  # by bucket, of its first block
    caption_bytes: int = 0  # of the captions' columns
    samples: bytearray = field(default_factory=bytearray)  # of _SAMPLE
    caption_rows: array[int] = field(default_factory=lambda: array("i"))  # of the samples, one after the other
    buckets: dict[str, int] = field(default_factory=dict)  # bucket names of the samples, by their numbers in `samples`
    columns: dict[tuple[str, str], bytearray] = field(default_factory=dict)  # by group and name, in row order
    tokens: dict[str, int] = field(default_factory=dict)  # of the captions and of ragged entries, by group
    max_tokens: dict[str, int] = field(default_factory=dict)  # likewise, of the longest
    text_error: TextError | None = None
    cuts: dict[str, dict[int, int]] = field(default_factory=dict)  # by encoder: captions cut, by the sample's number
    shard_id: bytes = b""
    shard_id_at: int = 0

    def digests(self, group: str, name: str = DIGEST) -> NDArray[np.uint8]:
        """Return the digests of a group's entries, or of a bucket's rows, `[N, 16]`."""
        return np.frombuffer(self.columns.get((group, name), b""), dtype="u1").reshape(-1, DIGEST_BYTES)

    def meta(self, sums: FileSums, column: Mapping[str, object] | None = None) -> bytes:
        """Return the sidecar of the file whose `sums` were taken, after checking that its rows and records go together.

        `column` is what is noted of an added column, whose file has no captions and no records.
        """
        groups, entries = dict[str, list[int]](), list[tuple[int, int, int, int]]()
        for group, own in sorted(self.blocks.items()):
            groups[group] = [sum(entry[3] for entry in own), len(own), len(entries), 0]
            entries.extend(own)
        shard_id, lines = self.shard_id.hex(), sums.finish()
        entry: dict[str, object] = {
            "shard_id": shard_id,
            "lmdb": {"num_bytes": sums.num_bytes, "digest": sums.digest},
            "groups": groups,
        }
        about: dict[str, object] = {"format": META_FORMAT, "shard_id": shard_id, "shard_id_at": self.shard_id_at}
        about |= {"page_bytes": self.page_bytes, "line_bytes": LINE_BYTES}
        table = np.array(entries, dtype="<u8").reshape(-1, 4)
        tensors: list[tuple[str, str, NDArray[Any]]] = [
            (name, "U64", table[:, at]) for at, name in enumerate(("offset", "length", "first_row", "rows"))
        ]
        tensors.append((LINE_CHECKSUM, "U64", np.array(lines, dtype="<u8")))
        if column is not None:
            return encode_sidecar(tensors, {**about, "entry": entry, **column})
        index, captions = self._index(shard_id), self.digests(TEXT_GROUP)
        caption_row = _order(captions)
        tensors.append(("caption_row", "U32", caption_row.astype(DTYPES["U32"])))
        tensors.append(("caption_digest", "U8", captions[caption_row]))
        tensors.append((INDEX, "U8", index.view("u1").reshape(len(index), -1)))
        entry |= {
            "samples": len(index),
            "record_bytes": int(index["record_bytes"].sum(dtype=np.int64)),
            "caption_bytes": self.caption_bytes,
            "max_tokens": self.max_tokens.get(TEXT_GROUP, 0),
            "cut": {name: int(index["cut"][:, n].sum(dtype=np.int64)) for n, name in enumerate(sorted(self.cuts))},
            "ragged": {
                group.removeprefix(RAGGED_PREFIX): {"tokens": tokens, "max_tokens": self.max_tokens[group]}
                for group, tokens in sorted(self.tokens.items())
                if group != TEXT_GROUP
            },
        }
        about |= {"entry": entry, "buckets": encode(self.buckets_found())}
        return encode_sidecar(tensors, {**about, "text_error": encode(self.text_error)})

    def buckets_found(self) -> tuple[BucketEntry, ...]:
        """Return the entries of the buckets of which the file has blocks."""
        return tuple(bucket_entry(spec) for _, spec in sorted(self.forms.items()))

    def _index(self, shard_id: str) -> NDArray[Any]:
        """Return the entries of the index, after checking that rows and records go together."""
        if strange := self.buckets.keys() - self.blocks.keys():
            raise CorruptError(f"shard {self.name}: a sample record names the bucket {min(strange)!r:.80}, which has no block")
        groups, samples = sorted(self.blocks), np.frombuffer(self.samples, dtype=_SAMPLE)
        try:
            self._check(samples)
        except (ValueError, LookupError, ArithmeticError) as error:
            raise CorruptError(f"shard {self.name}: its rows cannot be compared with its records ({error!r:.200})") from error
        order = _order(samples["digest"])
        cut = np.zeros((len(samples), len(self.cuts)), dtype=DTYPES["U16"])
        for n, (_, counts) in enumerate(sorted(self.cuts.items())):
            cut[list(counts), n] = list(counts.values())
        own = samples[order]
        entries = np.zeros(len(own), dtype=index_dtype(len(self.cuts)))
        for name in _AS_NOTED:
            entries[name] = own[name]
        entries["bucket"] = np.array([groups.index(bucket) for bucket in self.buckets], dtype=DTYPES["U16"])[own["bucket"]]
        entries["cut"] = cut[order]
        entries[CHECKSUM] = entry_checksums(entries, shard_id)
        return entries

    def _check(self, samples: NDArray[Any]) -> None:
        """Check that records name each row once, and say of it what the row says, and that the captions are there."""
        captions = self.digests(TEXT_GROUP)
        if captions[:1].tobytes() != caption_digest(""):
            self.report("the shard's first caption is not the empty one", TEXT_GROUP, 0, 0)
        rows, buckets = np.frombuffer(self.caption_rows, dtype="<i4"), list(self.buckets)
        ends = np.cumsum(samples["num_captions"], dtype=np.int64)
        beyond = np.searchsorted(ends, np.flatnonzero((rows < 0) | (rows >= len(captions))), side="right")
        for at in sorted({*beyond.tolist(), *np.flatnonzero(samples["num_captions"] == 0).tolist()}):
            error = "the sample's record names captions that the shard does not have"
            self.report(error, buckets[samples["bucket"][at]], None, int(samples["row"][at]))
        for bucket in filter(is_bucket, self.blocks):
            self._check_rows(bucket, samples, np.append(rows, np.int32(-1)), ends)

    def _check_rows(self, bucket: str, samples: NDArray[Any], caption_rows: NDArray[np.int32], ends: NDArray[np.int64]) -> None:
        """Compare a bucket's rows with their records; `ends`: the end of each sample's part of `caption_rows`."""
        own = np.flatnonzero(samples["bucket"] == self.buckets.get(bucket, -1))
        own = own[np.argsort(samples["row"][own], kind="stable")]
        ids = self.digests(bucket, ID)
        if not np.array_equal(samples["row"][own], np.arange(len(ids))):
            self.report(f"the shard's records do not name each of its {len(ids)} rows once", bucket)
            return
        num_captions = samples["num_captions"][own].astype(np.int64)
        width = len(self.columns[bucket, CAPTIONS]) // 4 // len(ids)  # V
        places = (ends[own] - num_captions)[:, None] + np.arange(width)
        has, found = np.arange(width) < num_captions[:, None], caption_rows[np.minimum(places, len(caption_rows) - 1)]
        said = {CAPTIONS: np.where(has, found, -1), ORIGINAL_SIZE: samples[ORIGINAL_SIZE][own], CROP: samples[CROP][own]}
        for row in np.flatnonzero((ids != samples["digest"][own]).any(axis=1)).tolist():
            self.report("the row belongs to another sample than that whose record names it", bucket, None, row)
        for name, expected in said.items():
            stored = np.frombuffer(self.columns[bucket, name], dtype="<i4").reshape(expected.shape)
            for row in np.flatnonzero((stored != expected).any(axis=1)).tolist():
                error = f"the row's {name} is {stored[row].tolist()}, its sample's record says {expected[row].tolist()}"
                self.report(error, bucket, None, row)

    def note(self, key: bytes, value: memoryview, offset: int) -> None:
        """Take the next key, its value, and the value's offset in the file."""
        if (block_key := split_block_key(key)) is not None:
            self._note_block(*block_key, value, offset)
        elif key.startswith(SAMPLE_PREFIX):
            self._note_record(key[len(SAMPLE_PREFIX) :], value, offset)
        elif key == META_KEY:
            self._note_meta(bytes(value), offset)
        else:
            self.report(f"the key {key!r:.200} is not one of the format's")

    def _note_meta(self, value: bytes, offset: int) -> None:
        try:
            meta = msgpack.unpackb(value, raw=False)
            self.shard_id = bytes(meta["shard_id"])
            self.text_error = decode(TextError, error) if (error := meta.get(TEXT_ERROR)) is not None else None
        except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
            raise CorruptError(f"shard {self.name}: the value of {META_KEY!r} is damaged ({error!r:.200})") from error
        if len(self.shard_id) != SHARD_ID_BYTES:
            raise CorruptError(f"shard {self.name}: its id has {len(self.shard_id)} bytes, expected {SHARD_ID_BYTES}")
        self.shard_id_at = offset + value.index(self.shard_id)

    def _note_record(self, digest: bytes, value: memoryview, offset: int) -> None:
        try:
            sample = decode_record(value, "the sample with the digest " + digest.hex())
        except CorruptError as error:
            self.report(str(error))
            return
        bucket = self.buckets.setdefault(sample.bucket, len(self.buckets))
        if sample_digest(sample.id) != digest:
            self.report(f"the record of {sample.id!r:.200} is not stored under its id", sample.bucket, None, sample.row)
        source = sample.source_bytes, sample.source_mtime_ns, captions_checksum(sample.captions)
        numbers = len(value), sample.row, bucket, len(sample.caption_rows), *sample.original_size, *sample.crop[:2]
        try:
            if len(digest) != DIGEST_BYTES or len(sample.content) != DIGEST_BYTES:
                raise struct.error(f"its key or content digest does not have {DIGEST_BYTES} bytes")
            packed = _PACKED.pack(digest, sample.content, offset, *source, *numbers)
            self.caption_rows.extend(sample.caption_rows)
        except (struct.error, OverflowError) as error:
            raise CorruptError(
                f"shard {self.name}: the record of {sample.id!r:.200} has a number out of range ({error})"
            ) from error
        for encoder, count in Counter(cut[0] for cut in sample.cuts).items() if sample.cuts else ():
            self.cuts.setdefault(encoder, {})[len(self.samples) // _PACKED.size] = min(count, (1 << 16) - 1)
        self.samples += packed

    def _note_block(self, group: str, number: int, block: memoryview, offset: int) -> None:
        item = f"shard {self.name}, block {number} of {group}"
        entries = self.blocks.setdefault(group, [])
        tensors, metadata, header_bytes = read_header(block[: LENGTH_BYTES + MAX_HEADER_BYTES], len(block), item)
        place = {tensor.name: tensor for tensor in tensors}
        first_row, expected = metadata.get("first_row", ""), sum(entries[-1][2:]) if entries else 0
        if number != len(entries) or first_row != str(expected) or CHECKSUM not in place:
            raise CorruptError(f"{item} begins with row {first_row!r:.40}, expected block {len(entries)} with row {expected}")
        entries.append((offset, len(block), expected, place[CHECKSUM].shape[0]))
        data = block[header_bytes:]
        if not entries[1:] and is_bucket(group):
            columns = tuple(Column(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape[1:]) for tensor in tensors)
            axes = tuple(metadata["axes"].split(",")) if "axes" in metadata else IMAGE_AXES
            self.forms[group] = BlockSpec(bucket=group, columns=columns, axes=axes)
        for name in _KEPT:
            if name in place:
                self.columns.setdefault((group, name), bytearray()).extend(data[place[name].begin : place[name].end])
        if not is_bucket(group):
            starts = np.frombuffer(data[place[STARTS].begin : place[STARTS].end], dtype="<i8")
            self.tokens[group] = self.tokens.get(group, 0) + int(starts[-1])
            self.max_tokens[group] = max(self.max_tokens.get(group, 0), int(np.diff(starts).max()))
        if group == TEXT_GROUP:
            own = (tensor for tensor in tensors if tensor.name not in (STARTS, CHECKSUM, DIGEST))
            self.caption_bytes += sum(tensor.end - tensor.begin for tensor in own)


def _order(digests: NDArray[Any]) -> NDArray[np.int64]:
    """Return the stable sort order of digests `[n, 16]`."""
    return np.argsort(keys_of(digests), kind="stable")


def refusing(name: str) -> ShardContents:
    """Return the contents of a file that is not walked yet, whose first fault is raised as a CorruptError."""

    def refuse(error: str, group: str | None = None, block: int | None = None, row: int | None = None) -> NoReturn:
        place = "".join(f", {what} {n}" for what, n in (("block", block), ("row", row)) if n is not None)
        of = f" of {group}" if place else f", {group}" if group else ""
        raise CorruptError(f"shard {name}{place}{of}: {error}")

    return ShardContents(name=name, report=refuse)


def read_contents(
    path: Path, contents: ShardContents, sums: FileSums | None = None, on_value: Callable[[], object] = lambda: None
) -> FileSums:
    """Walk a file through LMDB, and return its checksums; `on_value` can end the walk by raising.

    Unless the caller has taken these `sums`, the file is read once for them.
    """
    found = sums or FileSums()
    with read_lmdb(path, readahead=sums is None) as (env, txn), path.open("rb", buffering=0) as file:
        contents.page_bytes = env.stat()["psize"]
        for key, value, offset in _located(txn, file, contents):
            on_value()
            contents.note(key, value, offset)
        if contents.blocks and not contents.shard_id:
            raise CorruptError(f"shard {contents.name} has no id: the value of {META_KEY!r} is missing")
        buffer = memoryview(bytearray(READ_BYTES))
        while sums is None and (count := file.readinto(buffer)):
            found.update(buffer[:count])
    return found


def _located(txn: Any, file: FileIO, contents: ShardContents) -> Iterator[tuple[bytes, memoryview, int]]:  # noqa: ANN401
    """Yield a shard's keys and values in key order, each with its file offset.

    LMDB maps the file as a whole, so that all offsets follow from that of the first value. Its page begins with its own number
    (LMDB 0.9 format); what a read finds there is compared.
    """
    num_bytes, page_bytes, begin, is_there = os.fstat(file.fileno()).st_size, contents.page_bytes, -1, False
    for key, value in txn.cursor():
        address = _from_buffer(value, _BYTE).__array_interface__["data"][0]
        if begin < 0:
            head, page = value[:page_bytes], address - address % page_bytes
            begin = page - int.from_bytes(ctypes.string_at(page, 8), sys.byteorder) * page_bytes
            is_there = begin > 0 and os.pread(file.fileno(), len(head), address - begin) == head
        offset = address - begin
        if not is_there or not 0 <= offset <= num_bytes - len(value):
            raise StoreError(
                f"shard {contents.name} cannot be sealed: a read of {file.name} gives other bytes than LMDB "
                f"{'.'.join(map(str, lmdb.version()))} does, expected the same; what is committed stays in pending/: check the "
                "disk, install the lmdb package that bucketline requires, and rerun"
            )
        yield bytes(key), value, offset


@contextmanager
def read_lmdb(path: Path, *, readahead: bool = True) -> Iterator[tuple[Any, Any]]:
    """Open a shard's file through LMDB; yield the environment and a transaction whose values are views of the file."""
    with (
        lmdb.open(str(path), subdir=False, lock=False, readonly=True, create=False, readahead=readahead) as env,
        env.begin(buffers=True) as txn,
    ):
        yield env, txn


# ------------------------------------------------------------------------------------------------------------------------ seal

_NOT_LMDB = (lmdb.InvalidError, lmdb.CorruptedError, lmdb.VersionMismatchError, lmdb.PageNotFoundError)
SPARE_BYTES = 1 << 24  # for the new file's map: only addresses
RECORDS = ".records"  # the suffix of a pending shard's records, in the order in which they were added
RECORDS_KEY = b"records"  # in a pending shard: how much of that file is committed, as RECORDS_END
RECORDS_END = struct.Struct("<QQ")  # bytes, and records
RECORD_HEAD = struct.Struct(f"<{DIGEST_BYTES}sI")  # before each record: the digest of its id, and its length
TRANSACTION_BYTES = 4 << 20  # of an append: beyond the processor's caches it takes half as much again
MIN_PAGE_BYTES = 4096  # of supported systems
_MAX_PAGE_BYTES = 1 << 15  # that LMDB takes
_PAGE_HEAD = struct.Struct("=16x I 20x I")  # page 0 in the LMDB 0.9 format: magic number and page size
_MAGIC = 0xBEEFC0DE
_FAILED, _LOCKED, _DAMAGED = 1, 3, 4  # exit codes of the sealing process
_FROM_OUTSIDE = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)  # signals that are not caused by the file


def seal(store: Path, name: str) -> bool:
    """Seal the pending shard `name`, which its writer has closed. Return False if it was empty and was removed.

    The order makes every crash harmless: the sidecar is written first, the shard's file last, and only a file under `shards/`
    makes a shard. If it is there already, a crash came before the pending files were removed; they are removed now.
    """
    pending, paths = pending_path(store, name), shard_paths(store, name)
    records = pending.with_suffix(RECORDS)
    is_there = os.path.lexists(paths.lmdb)
    if is_there and os.path.lexists(pending) and not _is_sealed(pending, paths):
        raise StoreError(
            f"{paths.lmdb} exists, and {pending} would become another shard of its name; a sealed shard never changes: "
            f"rename the pending file to {pending.with_stem(f'{name}-2').name}, or another name that no shard has, its "
            f"{RECORDS} file likewise, and rerun the command, which adopts it as a shard of its own"
        )
    try:
        if not is_there:
            paths.folder.mkdir(exist_ok=True)
            with _put_in_order(pending, records) as copy:
                sums = read_contents(copy, found := refusing(name))
                if is_there := bool(found.samples):
                    write_durably(paths.meta, found.meta(sums))
                    move_durably(copy, paths.lmdb)
        pending.unlink(missing_ok=True)
        records.unlink(missing_ok=True)
    except _NOT_LMDB as error:
        raise CorruptError(f"{pending} is damaged: {error}") from error
    except (lmdb.Error, OSError) as error:
        remedy = remedy_for_failed_write(pending.parent)
        raise StoreError(f"{pending} cannot be sealed: {error}; {remedy}") from error
    return is_there


def _is_sealed(pending: Path, paths: ShardPaths) -> bool:
    """Return whether a sealed shard is what a pending one became: it has the same id, and nothing was committed since."""
    with suppress(lmdb.Error, OSError), read_lmdb(pending) as (a, own), read_lmdb(paths.lmdb) as (b, sealed):
        num_entries = a.stat()["entries"] - 1 + committed_records(own)[1]  # without RECORDS_KEY
        return paths.meta.is_file() and own.get(META_KEY) == sealed.get(META_KEY) and b.stat()["entries"] == num_entries
    return False


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


def seal_apart(store: Path, name: str) -> None:
    """Seal a shard that another run left, in a separate process. Its pending file is gone afterwards."""
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


def rebuilt_meta(path: Path, column: Mapping[str, object] | None = None) -> bytes:
    """Return the sidecar of a shard's file, or of an added column's with what is noted of the `column`."""
    found = refusing(path.stem)
    try:
        sums = read_contents(path, found)
    except lmdb.Error as error:
        raise CorruptError(f"{path} cannot be opened by LMDB: {error}") from error
    if not (found.samples if column is None else found.blocks):
        raise CorruptError(f"{path} holds no {'sample' if column is None else 'block'}")
    return found.meta(sums, column)


@contextmanager
def _put_in_order(pending: Path, records: Path) -> Iterator[Path]:
    """Yield a temporary file with a pending shard's blocks and records in key order: streams fetch a bucket from few lines."""
    aside, fd = create_aside(pending)
    try:
        with read_lmdb(pending) as (_, txn):
            num_bytes, num_records = committed_records(txn)
            map_bytes = 2 * (pending.stat().st_size + num_bytes) + SPARE_BYTES
            with lmdb.open(str(aside), subdir=False, lock=False, map_size=map_bytes, meminit=False, sync=False) as env:
                rest = _records(records, num_bytes, num_records) if num_records else ()
                items = chain((item for item in txn.cursor() if item[0] != RECORDS_KEY), rest)
                while _append(env, items):
                    pass
        yield aside
    finally:
        aside.unlink(missing_ok=True)
        os.close(fd)


def committed_records(txn: Any) -> tuple[int, int]:  # noqa: ANN401 - lmdb has no types
    """Return how many bytes of a pending shard's file of records are committed, and how many records."""
    end: tuple[int, int] = RECORDS_END.unpack(txn.get(RECORDS_KEY, bytes(RECORDS_END.size)))
    return end


def _records(path: Path, num_bytes: int, num_records: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield the keys and values of committed records, in key order."""
    digests, begins, at = bytearray(), array("Q"), 0
    missing = f"{path} does not have the {num_records} records, {num_bytes} bytes, that were committed"
    with open(open_regular(path), "rb") as file:  # noqa: PTH123 - opens a descriptor
        if os.fstat(file.fileno()).st_size < num_bytes:
            raise CorruptError(missing)
        data = mmap.mmap(file.fileno(), num_bytes, prot=mmap.PROT_READ)
    with data:
        while at <= num_bytes - RECORD_HEAD.size:
            digest, length = RECORD_HEAD.unpack_from(data, at)
            digests += digest
            begins.append(at)
            at += RECORD_HEAD.size + length
        if (at, len(begins)) != (num_bytes, num_records):
            raise CorruptError(missing)
        for n in map(int, _order(np.frombuffer(digests, dtype="u1").reshape(-1, DIGEST_BYTES))):
            digest, length = RECORD_HEAD.unpack_from(data, begins[n])
            begin = begins[n] + RECORD_HEAD.size
            yield sample_key(digest), data[begin : begin + length]


def _append(target: Any, items: Iterator[tuple[bytes, bytes]]) -> bool:  # noqa: ANN401 - lmdb has no types
    """Append some items in one transaction. Return False if none is left."""
    num_bytes = 0
    with target.begin(write=True) as writing:
        for key, value in items:
            writing.put(key, value, append=True)
            num_bytes += len(value)
            if num_bytes >= TRANSACTION_BYTES:
                return True
    return False


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
