"""A sealed shard's reader: maps ids, rows and captions to byte ranges through its sidecar.

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
from bucketline.store.format.block import CHECKSUM, DIGEST_BYTES, DTYPES, sample_digest
from bucketline.store.format.manifest import SHARD_ID_BYTES, shard_paths
from bucketline.store.format.schema import MAX_RECORD_BYTES, SampleRecord, captions_checksum, decode_record
from bucketline.store.format.text import TEXT_GROUP
from bucketline.store.shard.meta import INDEX, entry_checksums, index_dtype
from bucketline.store.shard.row_locator import BlockRanges, BlockTable
from bucketline.store.shard.sidecar import open_listed, read_exactly

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from bucketline.store.format.manifest import ShardEntry
    from bucketline.store.shard.row_locator import ShardSource
    from bucketline.store.shard.sidecar import DroppedRows, Sidecar


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
    is_view = digests.strides[-1] == digests.itemsize  # an index is not copied
    return (digests if is_view else np.ascontiguousarray(digests)).view(KEY).reshape(-1)


def positions_of(wanted: NDArray[np.bytes_], keys: NDArray[np.bytes_]) -> NDArray[np.int64]:
    """Return the positions of digests in sorted ones, `[wanted]`; -1 for those that are not there."""
    if not len(keys):
        return np.full(len(wanted), -1)
    at = np.searchsorted(keys, wanted)  # in an index where it is, which is not copied
    return np.where(keys[np.minimum(at, len(keys) - 1)] == wanted, at, -1)


RANGE_BYTES = 16 << 10  # of an index that is read at once; of a longer one half as much, twice: it is enough among a million


def captions_cut(entry: ShardEntry, entries: NDArray[Any]) -> dict[str, int]:
    """Return by text encoder how many captions it cut, of the samples of some entries of a shard's index."""
    return dict(zip(sorted(entry.cut), entries["cut"].sum(axis=0, dtype=np.int64).tolist(), strict=True))


def index_bytes(entry: ShardEntry) -> int:
    """Return the length of a shard's index."""
    return entry.samples * index_dtype(len(entry.cut)).itemsize


def read_entries(read: Callable[[int, int], bytes], path: str, entry: ShardEntry, first: int, last: int) -> NDArray[Any]:
    """Return a range of a shard's index, each entry of which has proved itself; `read` returns one of its sidecar, `path`."""
    form = index_dtype(len(entry.cut))
    begin, end = (entry.meta.num_bytes - (entry.samples - n) * form.itemsize for n in (first, last))
    data = read(begin, end)
    if len(data) != end - begin:
        raise CorruptError(f"{path} ends at byte {begin + len(data)}, expected at least {end}; run `store verify`")
    entries = np.frombuffer(data, dtype=form)
    if (entry_checksums(entries, entry.shard_id) != entries[CHECKSUM]).any():
        raise CorruptError(f"{path}: entries of its index do not match their checksums; run `store verify`")
    return entries


def search_index(read: Callable[[int, int], bytes], path: str, entry: ShardEntry, keys: NDArray[np.bytes_]) -> NDArray[Any]:
    """Return the entries of those samples of a shard that have one of some sorted digests, by interpolation search.

    Digests are evenly spread. `read`: as of `read_entries`.
    """
    parts = []
    count = RANGE_BYTES // 2 // index_dtype(len(entry.cut)).itemsize
    left = [(keys, 0, entry.samples, 0, 1 << 128)]  # keys between two digests, and the entries between these
    while left:
        keys, first, last, low, high = left.pop()
        if not len(keys) or first == last:
            continue
        at = first + (_number(keys[len(keys) // 2 :]) - low) * (last - first) // (high - low) - count // 2
        begin = max(first, min(at, last - count))
        end = min(begin + count, last)
        entries = read_entries(read, path, entry, begin, end)
        own = keys_of(entries["digest"])
        before, after = np.searchsorted(keys, own[:1])[0], np.searchsorted(keys, own[-1:], side="right")[0]
        found = positions_of(keys[before:after], own)
        parts.append(entries[found[found >= 0]])
        left.append((keys[:before], first, begin, low, _number(own)))
        left.append((keys[after:], end, last, _number(own[-1:]), high))
    return np.concatenate(parts)


def _number(keys: NDArray[np.bytes_]) -> int:
    """Return the first of some digests as a number, in their sort order."""
    return int.from_bytes(keys[:1].tobytes(), "big")


class SealedShard:
    """A shard of one generation of a store."""

    def __init__(
        self,
        store: Path,
        entry: ShardEntry,
        *,
        plain_reads: bool = False,
        source: ShardSource | None = None,
        dropped: DroppedRows | None = None,
    ) -> None:
        """Open nothing yet. With `plain_reads`, map neither the shard nor its sidecar. `source`: see there.

        `dropped`: the dropped rows of the generation's shards; None of a shard that has none.
        """
        self.entry, self.source, self.dropped = entry, source, dropped
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
        return BlockTable(
            [self.entry], [self.paths], plain_reads=self._plain_reads, sources=[self.source], dropped=[self.dropped]
        ), 0

    @property
    def _table(self) -> tuple[BlockTable, int]:
        return self._shared or self._own

    @property
    def meta(self) -> Sidecar:
        table, ordinal = self._table
        return table.meta.file(ordinal)

    @property
    def groups(self) -> list[str]:
        """Names of the groups of which the shard has blocks, by their numbers in the index."""
        return sorted(self.entry.groups)

    @cached_property
    def index(self) -> NDArray[Any]:
        """Return the entries of the shard's samples, sorted by the digests of their ids, `[samples]`; see `index_dtype`."""
        form, samples = index_dtype(len(self.entry.cut)), self.entry.samples
        rows = self._column(INDEX, DTYPES["U8"], (samples, form.itemsize)).reshape(-1).view(form)
        numbers = rows["bucket"]
        if len(numbers) and int(numbers.max()) >= len(self.entry.groups):
            raise CorruptError(f"{self.paths.meta}: an entry names a bucket that the shard does not have; run `store verify`")
        return rows

    def _column(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        values = self.meta.column(name)
        if values.dtype != dtype or values.shape != shape:
            raise CorruptError(
                f"{self.paths.meta}: the tensor {name!r} is {values.dtype} {list(values.shape)}, expected {dtype} "
                f"{list(shape)}; run `store verify`"
            )
        return values

    def dropped_rows(self, group: str) -> NDArray[np.uint32]:
        """Return the sorted row numbers of a bucket's dropped rows."""
        if group not in self.entry.groups or not self.entry.groups[group].dropped:
            return np.empty(0, dtype="<u4")
        assert self.dropped is not None, f"shard {self.name} was opened without its dropped rows"
        return self.dropped.of(self.name, group)

    def is_live(self, group: str) -> NDArray[np.bool_]:
        """Return for each row of a bucket whether it is live, `[rows]`."""
        live = np.ones(self.entry.groups[group].rows, dtype=bool)
        live[self.dropped_rows(group)] = False
        return live

    def live_entries(self) -> NDArray[np.bool_]:
        """Return for each entry of the index whether its row is live, `[samples]`."""
        bucket, row = (self.index[name].astype(np.int64) for name in ("bucket", "row"))
        sizes = np.array([self.entry.groups[name].rows for name in self.groups], dtype=np.int64)
        if (row >= sizes[bucket]).any():
            raise CorruptError(f"{self.paths.meta}: an entry names a row that the shard does not have; run `store verify`")
        live = np.concatenate([np.empty(0, dtype=bool), *map(self.is_live, self.groups)])  # by row, bucket after bucket
        found: NDArray[np.bool_] = live[(np.cumsum(sizes) - sizes)[bucket] + row]
        return found

    def block_ranges(self, group: str, rows: NDArray[np.int64]) -> BlockRanges:
        table, ordinal = self._table
        return table.find([(group, len(rows))], np.full_like(rows, ordinal), rows)

    def keys(self) -> NDArray[np.bytes_]:
        """Return the sorted digests of the shard's samples, as `as_keys` does, `[samples]`."""
        return keys_of(self.index["digest"])

    def positions(self, keys: NDArray[np.bytes_]) -> NDArray[np.int64]:
        """Return samples' index positions, by `as_keys` of their digests; -1 if the shard has no such sample."""
        return positions_of(keys, self.keys())

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
            here = self.index["bucket"] == self.groups.index(group)
            positions = np.flatnonzero(here & np.isin(self.index["row"], rows))
        except (StoreError, LookupError, ValueError):
            return names
        for position in positions.tolist():
            with suppress(StoreError, LookupError):
                entry = self.index_entry(position)
                names[entry.row] = self.record(entry).id
        return names

    def index_entry(self, position: int) -> IndexEntry:
        return self.index_entries(np.array([position]))[0]

    def index_entries(self, positions: NDArray[np.int64]) -> list[IndexEntry]:
        """Return the index entries at some positions."""
        return [
            IndexEntry(
                digest=own["digest"].tobytes(),
                bucket=self.groups[own["bucket"]],
                row=int(own["row"]),
                source_bytes=int(own["source_bytes"]),
                source_mtime_ns=int(own["source_mtime_ns"]),
                content=own["content"].tobytes(),
                captions=int(own["captions"]),
                record_offset=int(own["record_offset"]),
                record_bytes=int(own["record_bytes"]),
            )
            for own in self.index[positions]
        ]

    def record(self, entry: IndexEntry, data: bytes | None = None) -> SampleRecord:
        """Return a sample's record, read from the shard's file unless its `data` are given."""
        if entry.record_bytes > MAX_RECORD_BYTES:
            raise CorruptError(f"{self.paths.meta}: a record of {entry.record_bytes} bytes is too long")
        if entry.record_offset > self.entry.lmdb.num_bytes:
            raise CorruptError(
                f"{self.paths.meta}: a record at byte {entry.record_offset} is beyond the end of the shard's file"
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
        _ = self.meta  # first: a damaged one is an error at once, and lines of a remote shard are checked by it
        ranges = [(offset, len(out)) for offset, out in zip(offsets, outs, strict=True)]
        with self.opened() as fd, nullcontext() if self.source is None else self.source.reading(self.entry, ranges):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # no readahead of neighbouring megabytes
            for offset, out in zip(offsets, outs, strict=True):
                read_exactly(self.paths.lmdb, fd, offset, out)

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
        at = self.meta.about("shard_id_at")
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
        return self._column("caption_digest", DTYPES["U8"], (self.entry.groups[TEXT_GROUP].rows, DIGEST_BYTES))

    def caption_rows(self) -> NDArray[np.uint32]:
        """Return the row numbers of the captions in the order of `caption_digests`, `[N]`."""
        return self._column("caption_row", DTYPES["U32"], (self.entry.groups[TEXT_GROUP].rows,))
