"""Copy live rows of shards to new shards: in order, with their records and the captions and ragged entries that they use.

A new shard has rows of the same added columns, whose values go to new files next to it.

Rows are read a block at a time, located by the sidecar. Every row, record and caption is verified: the first that does not
check is an error, or its row is left out, as in a repair.
"""

from __future__ import annotations

import errno
import secrets
from array import array
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from bucketline.errors import CorruptError, StoreError
from bucketline.store.format.block import CAPTIONS, CHECKSUM, CROP, ID, ORIGINAL_SIZE, RAGGED_PREFIX, bad_rows, decode_block
from bucketline.store.format.manifest import COPY_PREFIX, pending_path, shard_paths
from bucketline.store.format.schema import MAX_RECORD_BYTES
from bucketline.store.format.text import EMPTY_CAPTION_ROW, TEXT_GROUP
from bucketline.store.read.samples import caption_entries, compare_with_record, live_positions, row_entries
from bucketline.store.shard.meta import read_meta
from bucketline.store.shard.reader import SealedShard
from bucketline.store.write.column import ids_by_row, write_column_shard
from bucketline.store.write.seal import RECORDS
from bucketline.store.write.shard_writer import ShardWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path
    from types import TracebackType

    from numpy.typing import NDArray

    from bucketline.store.format.block import BlockSpec
    from bucketline.store.format.schema import SampleRecord
    from bucketline.store.format.text import Entry
    from bucketline.store.read.store import Store
    from bucketline.store.shard.reader import IndexEntry
    from bucketline.store.shard.row_locator import BlockRanges

    Columns = Mapping[str, NDArray[Any]]  # of a block, `[K, …]` each, or of one of its rows

T = TypeVar("T")
_RECREATED = (CHECKSUM, CAPTIONS, ORIGINAL_SIZE, CROP, ID)  # columns that the writer creates itself


@dataclass(slots=True)
class LeftOut:
    """The live rows that did not check, and were not copied."""

    rows: int = 0
    ids: list[str] = field(default_factory=list)  # of those whose records can be read


class RowCopier:
    """Fills new shards with the live rows of a store's shards, in the given order. An exception in `with` discards them."""

    def __init__(
        self,
        store: Store,
        generation: int,
        on_bytes: Callable[[int], None] = lambda _: None,
        path: Path | None = None,
    ) -> None:
        """Read and write nothing yet. The shards' names are unique; `on_bytes` takes the row bytes copied.

        `path` is the folder of the new shards, laid out as a store; by default the store's.
        """
        self._store, self._on_bytes, self._path = store, on_bytes, path or store.path
        self._prefix = f"{COPY_PREFIX}{generation:06d}-{secrets.token_hex(4)}"
        self._writer: ShardWriter | None = None
        self._left_out: LeftOut | None = None
        self._digests: NDArray[np.uint8] = np.empty((0, 16), "u1")  # of the captions of the shard being read
        self._unreadable: dict[int, StoreError] = {}  # captions of it, by row
        self._columns: set[str] = set()  # the added columns of its rows
        self._taken: dict[str, array[int]] = {}  # by bucket, ordinal and row of each of its rows, in turn
        self._shard_bytes = 0
        self._num_named = 0
        self._sealed: list[str] = []

    def copy(self, ordinals: range, shard_bytes: int, left_out: LeftOut | None = None) -> list[str]:
        """Copy all live rows of some shards. Return the names of the new sealed shards.

        The new shards are full at `shard_bytes`, but for the last. One ends, too, where the next shard's rows have other added
        columns. With `left_out`, rows that do not check are noted there.
        """
        self._sealed, self._shard_bytes, self._left_out = [], shard_bytes, left_out
        for ordinal in ordinals:
            shard = self._store.shards[ordinal]
            digests = self._tried(caption_digests, shard)
            if isinstance(digests, StoreError):
                self._leave_out(shard.entry.live_samples)
                continue
            self._digests, self._unreadable = digests, {}
            for group, num_live in sorted(shard.entry.live.items()):
                positions = self._tried(live_positions, shard, group) if num_live else np.empty(0, "<u4")
                if isinstance(positions, StoreError):
                    self._leave_out(num_live)
                else:
                    self._group(ordinal, group, positions.astype(np.int64))
        self._seal()
        return self._sealed

    def _leave_out(self, rows: int, *ids: str) -> None:
        if self._left_out is not None:
            self._left_out.rows += rows
            self._left_out.ids += ids

    def _tried(self, read: Callable[..., T], *args: object) -> T | StoreError:
        """Return what is read, or the error if rows without it are to be left out."""
        return read(*args) if self._left_out is None else tried(read, *args)

    def __enter__(self) -> RowCopier:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self.discard()

    def discard(self) -> None:
        """Remove all shards written so far, including the current one."""
        if self._writer is not None:
            self._writer.close()
        for number in range(self._num_named):
            name = f"{self._prefix}-{number:04d}"
            pending, paths = pending_path(self._path, name), shard_paths(self._path, name)
            added = paths.folder.glob(f"{name}.*.*")
            for path in (pending, pending.with_suffix(RECORDS), paths.lmdb, paths.meta, *added):
                path.unlink(missing_ok=True)

    def _group(self, ordinal: int, group: str, positions: NDArray[np.int64]) -> None:
        """Copy a bucket's live rows, given by their positions in the index, in row order."""
        shard, spec = self._store.shards[ordinal], self._store.manifest.specs[group]
        rows = shard.index["row"][positions].astype(np.int64)
        first = 0
        while first < len(rows):
            ranges = self._tried(shard.block_ranges, group, rows[first : first + 1])
            columns: Columns | StoreError
            if isinstance(ranges, StoreError):
                end, first_row, columns = first + 1, int(rows[first]), ranges
            else:
                first_row = int(rows[first] - ranges.row_in_block[0])
                end = int(np.searchsorted(rows, first_row + ranges.rows[0]))
                columns = self._tried(read_block, shard, spec, first_row, ranges)
            self._rows(ordinal, spec, first_row, columns, shard.index_entries(positions[first:end]))
            self._on_bytes((end - first) * spec.row_bytes)
            first = end

    def _rows(
        self, ordinal: int, spec: BlockSpec, first_row: int, columns: Columns | StoreError, entries: list[IndexEntry]
    ) -> None:
        """Copy rows of a block, given by their entries in the index; `columns` may be why the block cannot be read."""
        bad = frozenset[int]() if isinstance(columns, StoreError) else frozenset(bad_rows(spec, columns))
        for entry, record in zip(entries, self._records(self._store.shards[ordinal], entries), strict=True):
            if self._writer and (self._writer.is_full or self._columns != self._store.shards[ordinal].entry.added.keys()):
                self._seal()
            k = entry.row - first_row
            if isinstance(self._tried(self._row, ordinal, spec, columns, record, entry, k, k in bad), StoreError):
                self._leave_out(1, *([] if isinstance(record, StoreError) else [record.id]))

    def _row(
        self,
        ordinal: int,
        spec: BlockSpec,
        columns: Columns | StoreError,
        record: SampleRecord | StoreError,
        entry: IndexEntry,
        k: int,
        is_bad: bool,  # noqa: FBT001 - for `_tried`
    ) -> None:
        """Copy row k of a block after checking all of it; nothing of it is written if it does not check."""
        shard, columns, record, digests = self._store.shards[ordinal], _given(columns), _given(record), self._digests
        if is_bad:
            raise CorruptError(
                f"{shard.describe_row(entry.bucket, entry.row)}: its bytes do not match their checksum; "
                "`store drop` it, and rerun the command"
            )
        item = f"sample {record.id!r}, row {entry.row} of {entry.bucket} in shard {shard.name}"
        values = {name: column[k] for name, column in columns.items()}
        if values[ID].tobytes() != entry.digest:
            raise CorruptError(f"{item}: the row belongs to another sample; run `store verify`")
        compare_with_record(record, values, item)
        if strange := [row for row in record.caption_rows if not 0 <= row < len(digests)]:
            raise CorruptError(f"sample {record.id!r} in shard {shard.name} has no caption {strange[0]}")
        captions = [digests[row].tobytes() for row in record.caption_rows]
        new = {
            digest: self._caption(ordinal, row, digest)
            for digest, row in zip(captions, record.caption_rows, strict=True)
            if self._writer is None or not self._writer.has_caption(digest)
        }
        entries = row_entries(self._store, ordinal, values)
        writer = self._room(ordinal)  # last: it is never empty
        for own in new.values():
            writer.add_caption(own)
        latents = {name: v for name, v in values.items() if name not in _RECREATED and not name.startswith(RAGGED_PREFIX)}
        writer.add(spec=spec, latents=latents, record=record, captions=captions, entries=entries)
        self._taken.setdefault(entry.bucket, array("q")).extend((ordinal, entry.row))

    def _caption(self, ordinal: int, row: int, digest: bytes) -> dict[str, Entry]:
        """Return a caption's entries by group. One that cannot be read is read once."""
        if row in self._unreadable:
            raise self._unreadable[row]
        try:
            return caption_entries(self._store, ordinal, row, digest)
        except StoreError as error:
            self._unreadable[row] = error
            raise

    def _records(self, shard: SealedShard, entries: list[IndexEntry]) -> list[SampleRecord | StoreError]:
        """Return the records of samples, read together if none is unreadable."""
        data: list[bytes | None] = [None] * len(entries)
        if all(one.record_bytes <= MAX_RECORD_BYTES and one.record_offset <= shard.entry.lmdb.num_bytes for one in entries):
            outs = [bytearray(one.record_bytes) for one in entries]
            with suppress(StoreError):
                shard.read_into([one.record_offset for one in entries], [memoryview(out) for out in outs])
                data = [bytes(out) for out in outs]
        return [self._tried(shard.record, entry, own) for entry, own in zip(entries, data, strict=True)]

    def _room(self, ordinal: int) -> ShardWriter:
        if self._writer is None:
            columns = set(self._store.shards[ordinal].entry.added)
            empty = caption_entries(self._store, ordinal, EMPTY_CAPTION_ROW)
            name = f"{self._prefix}-{self._num_named:04d}"
            self._columns, self._taken, self._num_named = columns, {}, self._num_named + 1
            self._writer = ShardWriter(self._path, name, self._store.groups, empty, self._shard_bytes)
        return self._writer

    def _seal(self) -> None:
        if self._writer is not None:
            self._writer.seal()
            self._sealed.append(self._writer.name)
            if self._columns:
                found = read_meta(self._path, self._writer.name)
                shard = SealedShard(self._path, found.entry)
                for column in sorted(self._columns):
                    values = CopiedValues(self._store, column, self._taken)
                    write_column_shard(self._path, shard, column, values)
        self._writer = None


def caption_digests(shard: SealedShard) -> NDArray[np.uint8]:
    """Return the digests of a shard's captions in row order, `[N, 16]`."""
    num_captions = shard.entry.groups[TEXT_GROUP].rows
    rows = shard.caption_rows()
    digests = np.zeros((num_captions, 16), dtype=np.uint8)
    if len(rows) != num_captions or int(rows.max(initial=0)) >= num_captions:
        raise CorruptError(f"{shard.paths.meta}: its captions are not those of the manifest; run `store verify`")
    digests[rows] = shard.caption_digests()
    return digests


def _given(found: T | StoreError) -> T:
    if isinstance(found, StoreError):
        raise found
    return found


def tried(read: Callable[..., T], *args: object) -> T | StoreError:
    """Return the result of `read(*args)`, or the error if the file or the medium has lost the bytes."""
    try:
        return read(*args)
    except StoreError as error:
        cause = error.__cause__
        is_gone = isinstance(cause, FileNotFoundError) or (isinstance(cause, OSError) and cause.errno == errno.EIO)
        if is_gone or isinstance(error, CorruptError):
            return error
        raise


class CopiedValues:
    """A column's values of rows of a store's shards, for a new shard with exactly these rows."""

    def __init__(self, store: Store, column: str, rows: Mapping[str, array[int]]) -> None:
        """`rows`: by bucket, in the new shard's order, the ordinal of each row's shard and its number there, in turn."""
        self._store, self._column, self._rows = store, column, rows
        self._block: tuple[int, int, dict[str, NDArray[Any]]] = (-1, 0, {})  # shard, first row, columns
        self._bad = set[int]()  # rows of the block whose bytes do not match their checksum
        self._ids: NDArray[np.uint8] = np.empty((0, 16), dtype=np.uint8)  # of the shard's rows in the bucket

    def spec(self, bucket: str) -> BlockSpec:
        return self._store.added[self._column].specs[bucket]

    def rows(self, bucket: str) -> Iterator[bytes]:
        pairs = iter(self._rows[bucket])
        self._block = (-1, 0, {})
        for ordinal, row in zip(pairs, pairs, strict=True):
            yield self._value(self._store.shards[ordinal], ordinal, bucket, row)

    def _value(self, shard: SealedShard, ordinal: int, bucket: str, row: int) -> bytes:
        held, first_row, columns = self._block
        if held != ordinal:
            self._ids = ids_by_row(shard, bucket)
        if held != ordinal or not 0 <= row - first_row < len(columns[ID]):
            own = self._store.files[int(self._store.added[self._column].shard[ordinal])]
            ranges = own.block_ranges(bucket, np.array([row]))
            first_row = row - int(ranges.row_in_block[0])
            columns = read_block(own, self.spec(bucket), first_row, ranges)
            self._block, self._bad = (ordinal, first_row, columns), set(bad_rows(self.spec(bucket), columns))
        if row - first_row in self._bad or columns[ID][row - first_row].tobytes() != self._ids[row].tobytes():
            raise CorruptError(
                f"{shard.describe_row(bucket, row)}: the bytes of its {self._column} do not match their checksum, or are "
                "another sample's; run `store repair`, and add the column again"
            )
        value: bytes = columns[self._column][row - first_row].tobytes()
        return value


def read_block(shard: SealedShard, spec: BlockSpec, first_row: int, ranges: BlockRanges) -> dict[str, NDArray[Any]]:
    """Return the complete block that begins with a row, `[K, …]` per column; `ranges` has only its location."""
    item = f"shard {shard.name}, the block of {spec.bucket} at row {first_row}"
    offset, length, num_rows = int(ranges.offset[0]), int(ranges.length[0]), int(ranges.rows[0])
    if length != spec.block_bytes(num_rows):
        raise CorruptError(f"{item} has {length} bytes, expected {spec.block_bytes(num_rows)}; run `store verify`")
    found, columns = decode_block(spec, shard.read(offset, length), item)
    if found != first_row:
        raise CorruptError(f"{item} says that it begins with row {found}; run `store verify`")
    return columns
