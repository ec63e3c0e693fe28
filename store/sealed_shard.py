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
from bucketline.store.digests import DIGEST_BYTES
from bucketline.store.layout import shard_paths
from bucketline.store.paged_file import PagedFile
from bucketline.store.record import MAX_RECORD_BYTES, SampleRecord, decode_record
from bucketline.store.text_block import TEXT_GROUP

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from bucketline.store.manifest import ShardEntry

EXTENTS_FORMAT = "bucketline.extents/1"
INDEX_FORMAT = "bucketline.index/1"
DROPPED_FORMAT = "bucketline.dropped/1"
KEY = "S16"  # sixteen bytes, compared as bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRanges:
    """For each of some rows, the block that it lies in."""

    block: NDArray[np.int64]  # number within its group
    offset: NDArray[np.int64]  # of the block in the shard's file, in bytes
    length: NDArray[np.int64]  # of the block, in bytes
    rows: NDArray[np.int64]  # K, or N for captions
    row_in_block: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexEntry:
    """What the index knows of one sample."""

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
        self._shifted: dict[str, NDArray[np.int64]] = {}

    @cached_property
    def extents(self) -> PagedFile:
        return PagedFile(self.paths.extents, self.entry.extents.num_bytes, EXTENTS_FORMAT)

    @cached_property
    def index(self) -> PagedFile:
        return PagedFile(self.paths.index, self.entry.index.num_bytes, INDEX_FORMAT)

    @cached_property
    def _dropped(self) -> PagedFile | None:
        dropped = self.entry.dropped
        if dropped is None:
            return None
        return PagedFile(self.paths.dropped(dropped.generation), dropped.num_bytes, DROPPED_FORMAT)

    def dropped_rows(self, group: str) -> NDArray[np.uint32]:
        """Give the sorted row numbers of a bucket that are no longer live."""
        if self._dropped is None or group not in self._dropped_places:
            return np.empty(0, dtype="<u4")
        first, count = self._dropped_places[group]
        return self._dropped.slice("rows", first, first + count)

    @cached_property
    def _dropped_places(self) -> dict[str, tuple[int, int]]:
        """For each bucket with dropped rows, where they begin in the list and how many they are, as the manifest has it."""
        assert self._dropped is not None
        counts = sorted((name, group.dropped) for name, group in self.entry.groups.items() if group.dropped)
        places, at = {}, 0
        for name, count in counts:
            places[name] = (at, count)
            at += count
        listed = {name: {"first": first, "count": count} for name, (first, count) in places.items()}
        if self._dropped.metadata.get("groups") != listed or len(self._dropped.column("rows")) != at:
            raise CorruptError(f"{self._dropped.path}: its groups are not those of the manifest; run `store verify`")
        return places

    def live_rows(self, group: str, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Give the row number of the n-th live row of a bucket, for each n (rank-select over the dropped rows).

        The n-th live row is n + j where j dropped rows come before it: those with `dropped[j] - j <= n`.
        """
        if self.entry.groups[group].dropped == 0:
            return ranks
        if group not in self._shifted:
            dropped = self.dropped_rows(group).astype(np.int64)
            self._shifted[group] = dropped - np.arange(len(dropped))
        return ranks + np.searchsorted(self._shifted[group], ranks, side="right")

    def block_ranges(self, group: str, rows: NDArray[np.int64]) -> BlockRanges:
        """Find the blocks that rows of a group (a bucket, or `text`) lie in.

        Raises:
            CorruptError: where the extents do not cover a row, or point outside the shard's file.
        """
        entry = self.entry.groups[group]
        first_rows = self.extents.column("first_row")[entry.first_block : entry.first_block + entry.blocks]
        block = np.searchsorted(first_rows, rows.astype("<u8"), side="right").astype(np.int64) - 1
        at = np.maximum(block, 0) + entry.first_block
        offset, length, first_row, num_rows = (
            self.extents.take(name, at).astype(np.int64) for name in ("offset", "length", "first_row", "rows")
        )
        row_in_block = rows - first_row
        bad = (block < 0) | (row_in_block < 0) | (row_in_block >= num_rows) | (length > self.entry.lmdb.num_bytes - offset)
        bad |= (offset < 0) | (length < 0)
        if bad.any():
            row = int(rows[np.argmax(bad)])
            raise CorruptError(f"{self.paths.extents}: no block of {group} holds row {row}; run `store verify`")
        return BlockRanges(block=block, offset=offset, length=length, rows=num_rows, row_in_block=row_in_block)

    def positions(self, keys: NDArray[np.bytes_]) -> NDArray[np.int64]:
        """Give where in the index samples stand, by `as_keys` of their digests; -1 where the shard has no such sample."""
        stored = self.index.column("digest").reshape(-1).view(KEY)
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

    def index_entry(self, position: int) -> IndexEntry:
        """Read the index at a position, checked."""
        return self.index_entries(np.array([position]))[0]

    def index_entries(self, positions: NDArray[np.int64]) -> list[IndexEntry]:
        """Read the index at some positions, checked."""
        groups = self.index.metadata.get("groups", [])
        names = ("bucket", "row", "source_bytes", "source_mtime_ns", "captions", "record_offset", "record_bytes")
        numbers = zip(*(self.index.take(name, positions).tolist() for name in names), strict=True)
        contents = self.index.take("content", positions)
        entries = []
        for (bucket, row, source_bytes, mtime_ns, captions, offset, num_bytes), content in zip(numbers, contents, strict=True):
            if bucket >= len(groups) or groups[bucket] not in self.entry.groups:
                raise CorruptError(f"{self.paths.index}: an entry names a bucket that the shard does not have")
            entries.append(
                IndexEntry(
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
        data = self.read(entry.record_offset, entry.record_bytes)
        record = decode_record(data, f"shard {self.name}, row {entry.row} of {entry.bucket}")
        if record.bucket != entry.bucket or record.row != entry.row:
            raise CorruptError(
                f"shard {self.name}: the record of row {entry.row} of {entry.bucket} says {record.row} of {record.bucket!r}"
            )
        return record

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Read a byte range of the shard's file.

        Raises:
            CorruptError: where the file ends before the range does.
        """
        with self.opened() as fd:
            data = os.pread(fd, num_bytes, offset)
            while 0 < len(data) < num_bytes and (more := os.pread(fd, num_bytes - len(data), offset + len(data))):
                data += more
        if len(data) != num_bytes:
            raise CorruptError(f"{self.paths.lmdb} ends at byte {offset + len(data)}, expected {offset + num_bytes} at least")
        return data

    @contextmanager
    def opened(self) -> Iterator[int]:
        """Open the shard's file for a moment: a store may have more shards than a process may have open files.

        Raises:
            StoreError: where it is missing or cannot be opened.
            CorruptError: where it has not the length that the manifest gives.
        """
        try:
            fd = os.open(self.paths.lmdb, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise StoreError(
                f"{self.paths.lmdb} is missing, the manifest lists it; restore it, or pack the source again into a new store"
            ) from error
        except OSError as error:
            raise StoreError(f"{self.paths.lmdb} cannot be opened: {error.strerror}") from error
        try:
            num_bytes = os.fstat(fd).st_size
            if num_bytes != self.entry.lmdb.num_bytes:
                raise CorruptError(f"{self.paths.lmdb} has {num_bytes} bytes, the manifest says {self.entry.lmdb.num_bytes}")
            yield fd
        finally:
            os.close(fd)

    def caption_digests(self) -> NDArray[Any]:
        """Give the sorted digests of the shard's captions, `[N]` of 16 bytes."""
        num_captions = self.entry.groups[TEXT_GROUP].rows
        keys: NDArray[Any] = self.index.slice("caption_digest", 0, num_captions).reshape(-1, DIGEST_BYTES)
        return keys
