"""A sealed shard's reader: maps ids, rows and captions to byte ranges through the sidecars.

LMDB is not opened here. Files are opened on first use, so that a store of thousands of shards opens quickly.
"""

from __future__ import annotations

import os
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.errors import CorruptError, StoreError
from bucketline.forks import cached_property
from bucketline.store.format.block import DIGEST_BYTES, DTYPES, sample_digest
from bucketline.store.format.manifest import SHARD_ID_BYTES, shard_paths
from bucketline.store.format.schema import MAX_RECORD_BYTES, SampleRecord, captions_checksum, decode_record
from bucketline.store.format.text import TEXT_GROUP
from bucketline.store.shard.row_locator import BlockRanges, BlockTable, check_shard_id, dropped_places
from bucketline.store.shard.sidecar import PagedFile, open_listed, read_exactly

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from numpy.typing import NDArray

    from bucketline.store.format.manifest import ShardEntry
    from bucketline.store.shard.row_locator import ShardSource


INDEX_FORMAT = "bucketline.index/1"
_INDEX_COLUMNS: dict[str, tuple[str, tuple[int, ...]]] = {
    **dict.fromkeys(("record_offset", "source_bytes", "captions"), ("U64", ())),
    "source_mtime_ns": ("I64", ()),
    **dict.fromkeys(("record_bytes", "row", "caption_row"), ("U32", ())),
    "bucket": ("U16", ()),
    **dict.fromkeys(("digest", "content", "caption_digest"), ("U8", (DIGEST_BYTES,))),
}
CUT_PREFIX = "cut/"  # then a text encoder: of each sample, the captions that it cut; only if there are any
KEY = "S16"  # sixteen bytes, compared bytewise


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexEntry:
    """A sample's entry in the index."""

    digest: bytes  # 16 bytes, of its id
    bucket: str
    row: int
    source_bytes: int
    source_mtime_ns: int
    content: bytes
    captions: int  # checksum of its captions
    record_offset: int
    record_bytes: int

    def describes(self, record: SampleRecord) -> bool:
        """Return True if the record, which has no checksum, is that of the entry."""
        own = (self.digest, self.bucket, self.row, self.source_bytes, self.source_mtime_ns, self.content, self.captions)
        source = (record.source_bytes, record.source_mtime_ns, record.content, captions_checksum(record.captions))
        return own == (sample_digest(record.id), record.bucket, record.row, *source)


def as_keys(digests: list[bytes]) -> NDArray[np.bytes_]:
    """Return 16-byte digests as an array in the index's sort order."""
    return np.frombuffer(b"".join(digests), dtype=KEY)


def keys_of(digests: NDArray[Any]) -> NDArray[np.bytes_]:
    """Return an array of 16-byte digests, `[n, 16]` of uint8 or `[n, 2]` of uint64, as `as_keys` does."""
    return np.ascontiguousarray(digests).view(KEY).reshape(-1)


class SealedShard:
    """A shard of one generation of a store."""

    def __init__(self, store: Path, entry: ShardEntry, *, plain_reads: bool = False, source: ShardSource | None = None) -> None:
        """Open nothing yet. With `plain_reads`, map neither the shard nor its sidecars. `source`: see there."""
        self.entry, self.source = entry, source
        self._store, self._plain_reads = store, plain_reads
        self.name = entry.name
        self.paths = shard_paths(store, entry.name) if source is None else source.paths(entry)
        self.takes_any_length = False  # whether to read a file whose length differs from the manifest's
        self._is_ours = False  # whether the file's shard id has been checked
        self._shared: tuple[BlockTable, int] | None = None

    def column_shard(self, column: str) -> SealedShard:
        """Return the file of an added column of the shard's rows, as a shard without captions, records and index."""
        return SealedShard(self._store, self.entry.column_shard(column), plain_reads=self._plain_reads, source=self.source)

    def share(self, table: BlockTable, ordinal: int) -> None:
        """Use the sidecars of a table over many shards, in which this is number `ordinal`, so that they are mapped once."""
        self._shared = table, ordinal

    @cached_property
    def _own(self) -> tuple[BlockTable, int]:
        return BlockTable([self.entry], [self.paths], plain_reads=self._plain_reads, sources=[self.source]), 0

    @property
    def _table(self) -> tuple[BlockTable, int]:
        return self._shared or self._own

    @property
    def extents(self) -> PagedFile:
        table, ordinal = self._table
        return table.extents.file(ordinal)

    @cached_property
    def index(self) -> PagedFile:
        if self.source is not None:
            self.source.fetch([(self.paths.index, self.entry.index)])
        file = PagedFile(self.paths.index, self.entry.index.num_bytes, INDEX_FORMAT, plain_reads=self._plain_reads)
        check_shard_id(self.entry, file)
        groups = file.metadata.get("groups")
        if not isinstance(groups, list) or any(not isinstance(name, str) or name not in self.entry.groups for name in groups):
            raise CorruptError(f"{self.paths.index}: its buckets are not those of the manifest; run `store verify`")
        captions, samples = self.entry.groups[TEXT_GROUP].rows, self.entry.samples
        cuts = {name: ("U16", ()) for name in file.names if name.startswith(CUT_PREFIX)}
        for name, (dtype, shape) in (_INDEX_COLUMNS | cuts).items():
            values = file.column(name)
            expected = (captions if name.startswith("caption_") else samples, *shape)
            if values.dtype != DTYPES[dtype] or values.shape != expected:
                raise CorruptError(
                    f"{self.paths.index}: the tensor {name!r} is {values.dtype} {list(values.shape)}, expected {dtype} "
                    f"{list(expected)}; run `store verify`"
                )
        return file

    def dropped_rows(self, group: str) -> NDArray[np.uint32]:
        """Return the sorted row numbers of a bucket's dropped rows."""
        places = dropped_places(self.entry)
        if group not in places:
            return np.empty(0, dtype="<u4")
        first, count = places[group]
        table, ordinal = self._table
        return table.dropped.file(ordinal).slice("rows", first, first + count)

    def is_live(self, group: str) -> NDArray[np.bool_]:
        """Return for each row of a bucket whether it is live, `[rows]`."""
        live = np.ones(self.entry.groups[group].rows, dtype=bool)
        dropped = self.dropped_rows(group)
        if len(dropped) and int(dropped.max()) >= len(live):
            raise CorruptError(f"shard {self.name}: row {int(dropped.max())} of {group} is dropped, it has {len(live)} rows")
        live[dropped] = False
        return live

    def live_entries(self) -> NDArray[np.bool_]:
        """Return for each entry of the index whether its row is live, `[samples]`."""
        groups = self.index.metadata["groups"]
        bucket, row = (self.index.slice(name, 0, self.entry.samples).astype(np.int64) for name in ("bucket", "row"))
        sizes = np.array([self.entry.groups[name].rows for name in groups], dtype=np.int64)
        if len(bucket) and (int(bucket.max()) >= len(groups) or (row >= sizes[bucket]).any()):
            raise CorruptError(f"{self.paths.index}: an entry names a row that the shard does not have; run `store verify`")
        live = np.concatenate([np.empty(0, dtype=bool), *map(self.is_live, groups)])  # by row, bucket after bucket
        found: NDArray[np.bool_] = live[(np.cumsum(sizes) - sizes)[bucket] + row]
        return found

    def block_ranges(self, group: str, rows: NDArray[np.int64]) -> BlockRanges:
        table, ordinal = self._table
        return table.find(group, np.full_like(rows, ordinal), rows)

    def keys(self) -> NDArray[np.bytes_]:
        """Return the sorted digests of the shard's samples, as `as_keys` does, `[samples]`."""
        return keys_of(self.index.slice("digest", 0, self.entry.samples))

    def positions(self, keys: NDArray[np.bytes_]) -> NDArray[np.int64]:
        """Return samples' index positions, by `as_keys` of their digests; -1 if the shard has no such sample."""
        stored = self.index.column("digest").reshape(-1).view(KEY)
        if len(stored) == 0:
            return np.full(len(keys), -1)
        at = np.searchsorted(stored, keys).astype(np.int64)
        # The search touched unchecked pages. Its result is right if the two neighbouring entries, checked, enclose the key: a
        # damaged page on the way can only lead to a place where they do not.
        above = self._checked_keys(np.minimum(at, len(stored) - 1))
        below = self._checked_keys(np.maximum(at - 1, 0))
        astray = ((at < len(stored)) & (above < keys)) | ((at > 0) & (below >= keys))
        if astray.any():
            raise CorruptError(f"{self.paths.index}: its digests are not in order; run `store verify`")
        return np.where((at < len(stored)) & (above == keys), at, -1)

    def _checked_keys(self, at: NDArray[np.int64]) -> NDArray[np.bytes_]:
        return keys_of(self.index.take("digest", at))

    def find(self, digest: bytes) -> IndexEntry | None:
        """Return a sample's index entry by the digest of its id; None if the shard has no live row of it."""
        position = int(self.positions(as_keys([digest]))[0])
        if position < 0:
            return None
        entry = self.index_entry(position)
        dropped = self.dropped_rows(entry.bucket)
        at = int(np.searchsorted(dropped, entry.row))
        return None if at < len(dropped) and int(dropped[at]) == entry.row else entry

    def name_of(self, group: str, row: int) -> str | None:
        """Return the id of a row's sample, as `names_of` does; None if it cannot be determined."""
        return self.names_of(group, [row]).get(row)

    def describe_row(self, group: str, row: int) -> str:
        """Return a row's sample, number and shard for a message; only the last two if the sample cannot be determined."""
        name, place = self.name_of(group, row), f"row {row} of {group} in shard {self.name}"
        return place if name is None else f"sample {name!r:.200}, {place}"

    def names_of(self, group: str, rows: Sequence[int]) -> dict[int, str]:
        """Return the sample ids of a bucket's rows by one index scan, for messages about damage: those that can be read."""
        names: dict[int, str] = {}
        if not rows:
            return names
        try:
            here = self.index.slice("bucket", 0, self.entry.samples) == self.index.metadata["groups"].index(group)
            positions = np.flatnonzero(here & np.isin(self.index.slice("row", 0, self.entry.samples), rows))
        except (StoreError, LookupError, ValueError):
            return names
        for position in positions.tolist():
            with suppress(StoreError, LookupError):
                entry = self.index_entry(position)
                names[entry.row] = self.record(entry).id
        return names

    def captions_cut(self, positions: NDArray[np.int64]) -> dict[str, int]:
        """Return by text encoder how many captions it cut, of the samples at some positions in the index."""
        names = [name for name in self.index.names if name.startswith(CUT_PREFIX)]
        found = {name.removeprefix(CUT_PREFIX): int(self.index.take(name, positions).sum(dtype=np.int64)) for name in names}
        return {encoder: count for encoder, count in found.items() if count}

    def index_entry(self, position: int) -> IndexEntry:
        return self.index_entries(np.array([position]))[0]

    def index_entries(self, positions: NDArray[np.int64]) -> list[IndexEntry]:
        """Return the checked index entries at some positions."""
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

    def record(self, entry: IndexEntry, data: bytes | None = None) -> SampleRecord:
        """Return a sample's record, read from the shard's file unless its `data` are given."""
        if entry.record_bytes > MAX_RECORD_BYTES:
            raise CorruptError(f"{self.paths.index}: a record of {entry.record_bytes} bytes is too long")
        if entry.record_offset > self.entry.lmdb.num_bytes:
            raise CorruptError(
                f"{self.paths.index}: a record at byte {entry.record_offset} is beyond the end of the shard's file"
            )
        data = self.read(entry.record_offset, entry.record_bytes) if data is None else data
        record = decode_record(data, f"shard {self.name}, row {entry.row} of {entry.bucket}")
        if not entry.describes(record):
            raise CorruptError(
                f"shard {self.name}: the record of row {entry.row} of {entry.bucket}, {record.id!r:.200}, row {record.row} of "
                f"{record.bucket!r:.200}, does not match the index; run `store verify`"
            )
        return record

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Return a byte range of the shard's file."""
        data = bytearray(num_bytes)
        self.read_into([offset], [memoryview(data)])
        return bytes(data)

    def read_into(self, offsets: list[int], outs: list[memoryview]) -> None:
        """Read byte ranges into `outs`, one each, with plain reads: a failing medium raises an error."""
        _ = self.extents  # first: a damaged one is an error at once, and lines of a remote shard are checked by it
        with self.opened() as fd, self._reading([(offset, len(out)) for offset, out in zip(offsets, outs, strict=True)]):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # no readahead of neighbouring megabytes
            path = self.paths.lmdb
            for offset, out in zip(offsets, outs, strict=True):
                read_exactly(path, fd, offset, out)

    def _reading(self, ranges: list[tuple[int, int]]) -> AbstractContextManager[None]:
        return nullcontext() if self.source is None else self.source.reading(self.entry, ranges)

    @contextmanager
    def opened(self) -> Iterator[int]:
        """Yield a descriptor of the shard's file. It is not kept open: a store may have more shards than the limit."""
        if self.source is not None:
            self.source.open_shard(self.entry)
        with open_listed(self.paths.lmdb, None if self.takes_any_length else self.entry.lmdb.num_bytes) as fd:
            if not self._is_ours and self.source is None:  # a source compares every line with the shard's own checksums
                self._check_id(fd)
            yield fd

    def _check_id(self, fd: int) -> None:
        """Compare the shard id in the file with the manifest's: files of equal length may have been swapped."""
        at = self.extents.metadata.get("shard_id_at")
        found = bytearray()
        if type(at) is int and 0 <= at < 1 << 62:
            found = bytearray(SHARD_ID_BYTES)
            read_exactly(self.paths.lmdb, fd, at, memoryview(found))
        if found.hex() != self.entry.shard_id:
            raise CorruptError(
                f"{self.paths.lmdb} belongs to another shard: it has the id {found.hex() or 'none'}, the manifest lists "
                f"{self.name} with the id {self.entry.shard_id}; restore the file that belongs there"
            )
        self._is_ours = True

    def caption_digests(self) -> NDArray[np.uint8]:
        """Return the sorted digests of the shard's captions, `[N, 16]`."""
        return self.index.slice("caption_digest", 0, self.entry.groups[TEXT_GROUP].rows)
