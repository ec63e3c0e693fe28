"""One sealed shard as a reader sees it: ids, rows and captions to byte ranges, by its sidecars alone.

LMDB is not opened here. Files are opened at first use, so that a store of thousands of shards opens at once.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.errors import CorruptError, StoreError
from bucketline.store.block_table import BlockRanges, BlockTable, check_shard_id, dropped_places
from bucketline.store.digests import DIGEST_BYTES, sample_digest
from bucketline.store.keyed_values import KeyedValues
from bucketline.store.layout import SHARD_ID_BYTES, Places, shard_paths
from bucketline.store.paged_file import OPEN_FLAGS, PagedFile
from bucketline.store.record import MAX_RECORD_BYTES, SampleRecord, captions_checksum, decode_record
from bucketline.store.tensor_file import DTYPES
from bucketline.store.text_block import TEXT_GROUP

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from bucketline.store.manifest import ShardEntry

INDEX_FORMAT = "bucketline.index/1"
_INDEX_COLUMNS: dict[str, tuple[str, tuple[int, ...]]] = {
    **dict.fromkeys(("record_offset", "source_bytes", "captions"), ("U64", ())),
    "source_mtime_ns": ("I64", ()),
    **dict.fromkeys(("record_bytes", "row", "caption_row"), ("U32", ())),
    "bucket": ("U16", ()),
    **dict.fromkeys(("digest", "content", "caption_digest"), ("U8", (DIGEST_BYTES,))),
}
KEY = "S16"  # sixteen bytes, compared as bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexEntry:
    """What the index knows of one sample."""

    digest: bytes  # 16 bytes, of its id
    bucket: str
    row: int
    source_bytes: int
    source_mtime_ns: int
    content: bytes
    captions: int  # checksum of its captions
    record_offset: int
    record_bytes: int


def as_keys(digests: list[bytes]) -> NDArray[np.bytes_]:
    """Give 16-byte digests as an array that sorts and compares as the index does."""
    return np.frombuffer(b"".join(digests), dtype=KEY)


class SealedShard:
    """A shard of one generation of a store."""

    def __init__(self, store: Path, entry: ShardEntry) -> None:
        self.entry = entry
        self.name = entry.name
        self.paths = shard_paths(store, entry.name)
        self._is_ours = False  # whether its file has been seen to hold the shard's id

    @cached_property
    def table(self) -> BlockTable:
        return BlockTable([self.entry], [self.paths])

    @property
    def extents(self) -> PagedFile:
        return self.table.extents.file(0)

    @cached_property
    def index(self) -> PagedFile:
        file = PagedFile(self.paths.index, self.entry.index.num_bytes, INDEX_FORMAT)
        check_shard_id(self.entry, file)
        groups = file.metadata.get("groups")
        if not isinstance(groups, list) or any(not isinstance(name, str) or name not in self.entry.groups for name in groups):
            raise CorruptError(f"{self.paths.index}: its buckets are not those of the manifest; run `store verify`")
        captions, samples = self.entry.groups[TEXT_GROUP].rows, self.entry.samples
        for name, (dtype, shape) in _INDEX_COLUMNS.items():
            values = file.column(name)
            expected = (captions if name.startswith("caption_") else samples, *shape)
            if values.dtype != DTYPES[dtype] or values.shape != expected:
                raise CorruptError(
                    f"{self.paths.index}: the tensor {name!r} is {values.dtype} {list(values.shape)}, expected {dtype} "
                    f"{list(expected)}; run `store verify`"
                )
        return file

    @cached_property
    def _by_key(self) -> KeyedValues | None:
        return KeyedValues(self) if self.places is Places.KEY else None

    @property
    def places(self) -> Places:
        return Places(self.extents.metadata["places"])

    def dropped_rows(self, group: str) -> NDArray[np.uint32]:
        """Give the sorted row numbers of a bucket that are no longer live."""
        places = dropped_places(self.entry)
        if group not in places:
            return np.empty(0, dtype="<u4")
        first, count = places[group]
        return self.table.dropped.file(0).slice("rows", first, first + count)

    def block_ranges(self, group: str, rows: NDArray[np.int64]) -> BlockRanges:
        """Find the blocks that rows of a group (a bucket, or `text`) lie in.

        Raises:
            CorruptError: where the extents do not cover a row, or point outside the shard's file.
        """
        return self.table.find(group, np.zeros_like(rows), rows)

    def positions(self, keys: NDArray[np.bytes_]) -> NDArray[np.int64]:
        """Give where in the index samples stand, by `as_keys` of their digests; -1 where the shard has no such sample."""
        stored = self.index.column("digest").reshape(-1).view(KEY)
        if len(stored) == 0:
            return np.full(len(keys), -1)
        at = np.searchsorted(stored, keys).astype(np.int64)
        # The search touched pages that nobody has checked. Its outcome is right where the two entries that it lies between,
        # checked, do hold the key between them: a damaged page on the way can only lead to a place where they do not.
        above = self._checked_keys(np.minimum(at, len(stored) - 1))
        below = self._checked_keys(np.maximum(at - 1, 0))
        astray = ((at < len(stored)) & (above < keys)) | ((at > 0) & (below >= keys))
        if astray.any():
            raise CorruptError(f"{self.paths.index}: its digests are not in order; run `store verify`")
        return np.where((at < len(stored)) & (above == keys), at, -1)

    def _checked_keys(self, at: NDArray[np.int64]) -> NDArray[np.bytes_]:
        return np.ascontiguousarray(self.index.take("digest", at)).reshape(-1).view(KEY)

    def find(self, digest: bytes) -> IndexEntry | None:
        """Look a sample up by the digest of its id; None where the shard has no live row of it."""
        position = int(self.positions(as_keys([digest]))[0])
        if position < 0:
            return None
        entry = self.index_entry(position)
        dropped = self.dropped_rows(entry.bucket)
        at = int(np.searchsorted(dropped, entry.row))
        return None if at < len(dropped) and int(dropped[at]) == entry.row else entry

    def name_of(self, group: str, row: int) -> str | None:
        """Name the sample of a row, by a scan of the index; None where it does not tell. For messages about damage."""
        try:
            rows = self.index.slice("row", 0, self.entry.samples)
            buckets = self.index.slice("bucket", 0, self.entry.samples)
            at = np.flatnonzero((rows == row) & (buckets == self.index.metadata["groups"].index(group)))
            return self.record(self.index_entry(int(at[0]))).id if len(at) else None
        except (StoreError, LookupError, ValueError):
            return None

    def index_entry(self, position: int) -> IndexEntry:
        """Read the index at a position, checked."""
        return self.index_entries(np.array([position]))[0]

    def index_entries(self, positions: NDArray[np.int64]) -> list[IndexEntry]:
        """Read the index at some positions, checked."""
        groups = self.index.metadata.get("groups", [])
        names = ("bucket", "row", "source_bytes", "source_mtime_ns", "captions", "record_offset", "record_bytes")
        numbers = zip(*(self.index.take(name, positions).tolist() for name in names), strict=True)
        contents, digests = (self.index.take(name, positions) for name in ("content", "digest"))
        entries = []
        for own, content, digest in zip(numbers, contents, digests, strict=True):
            bucket, row, source_bytes, mtime_ns, captions, offset, num_bytes = own
            if bucket >= len(groups) or groups[bucket] not in self.entry.groups:
                raise CorruptError(f"{self.paths.index}: an entry names a bucket that the shard does not have")
            entries.append(
                IndexEntry(
                    digest=digest.tobytes(),
                    bucket=groups[bucket],
                    row=row,
                    source_bytes=source_bytes,
                    source_mtime_ns=mtime_ns,
                    content=content.tobytes(),
                    captions=captions,
                    record_offset=offset,
                    record_bytes=num_bytes,
                )
            )
        return entries

    def record(self, entry: IndexEntry) -> SampleRecord:
        """Read a sample's record out of the shard's file."""
        if entry.record_bytes > MAX_RECORD_BYTES:
            raise CorruptError(f"{self.paths.index}: a record of {entry.record_bytes} bytes is too long")
        if entry.record_offset > self.entry.lmdb.num_bytes:
            raise CorruptError(f"{self.paths.index}: a record at byte {entry.record_offset} lies beyond the shard's file")
        data = self.read(entry.record_offset, entry.record_bytes)
        record = decode_record(data, f"shard {self.name}, row {entry.row} of {entry.bucket}")
        if record.bucket != entry.bucket or record.row != entry.row:
            raise CorruptError(
                f"shard {self.name}: the record of row {entry.row} of {entry.bucket} says {record.row} of {record.bucket!r}"
            )
        found = (record.source_bytes, record.source_mtime_ns, record.content, captions_checksum(record.captions))
        known = (entry.source_bytes, entry.source_mtime_ns, entry.content, entry.captions)
        if found != known or sample_digest(record.id) != entry.digest:
            raise CorruptError(
                f"shard {self.name}: the record of row {entry.row} of {entry.bucket}, {record.id!r:.200}, is not the one that "
                "the index knows; run `store verify`"
            )
        return record

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Read a byte range of the shard's file (or, where its places are by key, of its values).

        Raises:
            CorruptError: where the file ends before the range does.
        """
        data = bytearray(num_bytes)
        self.read_into([offset], [memoryview(data)])
        return bytes(data)

    def read_into(self, offsets: list[int], outs: list[memoryview]) -> None:
        """Read byte ranges, each as long as its `out`, with plain reads: what goes wrong on the medium is an error here.

        Raises:
            StoreError: where the file is missing, or the medium fails.
            CorruptError: where the file ends before a range does.
        """
        if self._by_key is not None:
            for offset, out in zip(offsets, outs, strict=True):
                out[:] = self._by_key.read(offset, len(out))
            return
        with self.opened() as fd:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # what is missing is read, and not megabytes beside it
            for offset, out in zip(offsets, outs, strict=True):
                self._fill(fd, offset, out)

    def _fill(self, fd: int, offset: int, out: memoryview) -> None:
        done = 0
        try:
            while done < len(out) and (count := os.preadv(fd, [out[done:]], offset + done)):
                done += count
        except OSError as error:
            raise StoreError(
                f"{self.paths.lmdb} cannot be read at byte {offset + done}: {error.strerror}; the medium may be failing"
            ) from error
        if done != len(out):
            raise CorruptError(f"{self.paths.lmdb} ends at byte {offset + done}, expected {offset + len(out)} at least")

    @contextmanager
    def opened(self) -> Iterator[int]:
        """Open the shard's file for a moment: a store may have more shards than a process may have open files.

        Raises:
            StoreError: where it is missing or cannot be opened.
            CorruptError: where it has not the length that the manifest gives.
        """
        try:
            fd = os.open(self.paths.lmdb, OPEN_FLAGS)
        except FileNotFoundError as error:
            raise StoreError(
                f"{self.paths.lmdb} is missing, the manifest lists it; restore it, open the store anew if `store compact --gc` "
                "removed it, or pack the source again into a new store"
            ) from error
        except OSError as error:
            raise StoreError(f"{self.paths.lmdb} cannot be opened: {error.strerror}") from error
        try:
            num_bytes = os.fstat(fd).st_size
            if num_bytes != self.entry.lmdb.num_bytes:
                raise CorruptError(f"{self.paths.lmdb} has {num_bytes} bytes, the manifest says {self.entry.lmdb.num_bytes}")
            if not self._is_ours:
                self._check_id(fd)
            yield fd
        finally:
            os.close(fd)

    def _check_id(self, fd: int) -> None:
        """Hold the id that stands in the shard's file against the manifest's: files of equal length may be exchanged."""
        if self.places is Places.FILE:
            at = self.extents.metadata.get("shard_id_at")
            found = bytearray()
            if type(at) is int and 0 <= at < 1 << 62:
                found = bytearray(SHARD_ID_BYTES)
                self._fill(fd, at, memoryview(found))
            if found.hex() != self.entry.shard_id:
                raise CorruptError(
                    f"{self.paths.lmdb} belongs to another shard: it has the id {found.hex() or 'none'}, the manifest lists "
                    f"{self.name} with the id {self.entry.shard_id}; restore the file that belongs there"
                )
        self._is_ours = True

    def caption_digests(self) -> NDArray[Any]:
        """Give the sorted digests of the shard's captions, `[N]` of 16 bytes."""
        num_captions = self.entry.groups[TEXT_GROUP].rows
        keys: NDArray[Any] = self.index.slice("caption_digest", 0, num_captions).reshape(-1, DIGEST_BYTES)
        return keys
