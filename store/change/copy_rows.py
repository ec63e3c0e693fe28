"""Copy live rows of shards to new shards: in order, with their records and the captions and ragged entries that they use.

A new shard has rows of the same added columns, whose values go to new files next to it.

Rows are read a block at a time, located by the extents; every row and caption is verified against its checksum.
"""

from __future__ import annotations

import secrets
from array import array
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.errors import CorruptError
from bucketline.store.change.copied_values import CopiedValues
from bucketline.store.format.block import CAPTIONS, CHECKSUM, CROP, ID, ORIGINAL_SIZE, bad_rows
from bucketline.store.format.columns import RAGGED_PREFIX
from bucketline.store.format.layout import COPY_PREFIX, pending_path, shard_paths
from bucketline.store.format.sample_record import MAX_RECORD_BYTES, decode_record, encode_record
from bucketline.store.format.text_block import EMPTY_CAPTION_ROW, TEXT_GROUP
from bucketline.store.read.blocks import read_block
from bucketline.store.read.ragged_entries import caption_entries, row_entries
from bucketline.store.shard.reader import SealedShard, keys_of
from bucketline.store.write.column_shard import write_column_shard
from bucketline.store.write.describe import describe_shard
from bucketline.store.write.shard_writer import ShardWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path
    from types import TracebackType

    from numpy.typing import NDArray

    from bucketline.store.format.sample_record import SampleRecord
    from bucketline.store.format.text_block import Entry
    from bucketline.store.read.store import Store

_RECREATED = (CHECKSUM, CAPTIONS, ORIGINAL_SIZE, CROP, ID)  # columns that the writer creates itself


class RowCopier:
    """Fills new shards with the live rows of a store's shards, in the given order. An exception in `with` discards them."""

    def __init__(
        self, store: Store, generation: int, on_bytes: Callable[[int], None] = lambda _: None, path: Path | None = None
    ) -> None:
        """Read and write nothing yet. The shards' names are unique; `on_bytes` takes the row bytes copied.

        `path` is the folder of the new shards, laid out as a store; by default the store's.
        """
        self._store, self._on_bytes, self._path = store, on_bytes, path or store.path
        self._prefix = f"{COPY_PREFIX}{generation:06d}-{secrets.token_hex(4)}"
        self._writer: ShardWriter | None = None
        self._columns: set[str] = set()  # the added columns of its rows
        self._sources: set[int] = set()  # the shards of its rows
        self._taken: dict[str, array[int]] = {}  # by bucket, ordinal and row of each of its rows, in turn
        self._sizes: list[int] = []
        self._size = 0
        self._max_bytes = self._filled = 0  # of the shard being written
        self._counted: set[bytes] = set()  # captions counted in this run of shards
        self._num_named = 0
        self._sealed: list[str] = []

    def copy(self, ordinals: range, sizes: tuple[int, ...], last_size: int) -> list[str]:
        """Copy all live rows of some shards. Return the names of the new sealed shards.

        The new shards are full at `sizes`, in bytes, in turn; any further ones at `last_size`. One ends, too, where the next
        shard's rows have other added columns.

        Raises:
            CorruptError: if a row or caption is damaged, naming it.
            StoreError: if a file is missing, or the disk is full.
        """
        self._sealed, self._sizes, self._size = [], [*sizes], last_size
        self._counted.clear()
        for ordinal in ordinals:
            shard = self._store.shards[ordinal]
            digests = caption_digests(shard)
            for group, num_live in sorted(shard.entry.live.items()):
                if num_live:
                    self._group(ordinal, group, digests)
        self._seal()
        return self._sealed

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
            for path in (pending, pending.with_suffix(".sealing"), paths.lmdb, paths.extents, paths.index, *added):
                path.unlink(missing_ok=True)

    def _group(self, ordinal: int, group: str, digests: NDArray[np.uint8]) -> None:
        shard = self._store.shards[ordinal]
        is_live = shard.is_live(group)
        row = 0
        while row < len(is_live):
            ranges = shard.block_ranges(group, np.array([row]))
            rows = int(ranges.rows[0])
            if len(live := np.flatnonzero(is_live[row : row + rows])):
                columns = read_block(shard, self._store.manifest.specs[group], row, ranges)
                self._rows(ordinal, group, row, live, columns, digests)
            row += rows

    def _rows(
        self,
        ordinal: int,
        group: str,
        first_row: int,
        live: NDArray[np.int64],
        columns: dict[str, NDArray[Any]],
        digests: NDArray[np.uint8],
    ) -> None:
        """Copy the rows `live` of a block, numbered within it."""
        shard, spec = self._store.shards[ordinal], self._store.manifest.specs[group]
        if bad := set(bad_rows(spec, columns)) & set(live.tolist()):
            raise CorruptError(
                f"{shard.describe_row(group, first_row + min(bad))}: its bytes do not match their checksum; "
                "`store drop` it, and rerun the command"
            )
        records = _records(shard, group, first_row + live, columns[ID][live])
        for k, record in zip(live.tolist(), records, strict=True):
            values = {name: column[k] for name, column in columns.items()}
            compare_with_record(record, values, f"sample {record.id!r}, row {first_row + k} of {group} in shard {shard.name}")
            writer = self._room(ordinal)
            captions = [self._caption(writer, ordinal, caption_row, digests, record) for caption_row in record.caption_rows]
            latents = {name: v for name, v in values.items() if name not in _RECREATED and not name.startswith(RAGGED_PREFIX)}
            entries = row_entries(self._store, ordinal, values)
            writer.add(spec=spec, latents=latents, record=record, captions=captions, entries=entries)
            self._taken.setdefault(group, array("q")).extend((ordinal, first_row + k))
            self._filled += spec.row_bytes + len(encode_record(record))
            self._filled += sum(self._new_bytes(group, entry) for group, entry in entries.items())
        self._on_bytes(len(live) * spec.row_bytes)

    def _caption(self, writer: ShardWriter, ordinal: int, row: int, digests: NDArray[np.uint8], record: SampleRecord) -> bytes:
        """Return a caption's digest, after adding the caption to the current shard if needed."""
        if not 0 <= row < len(digests):
            raise CorruptError(f"sample {record.id!r} in shard {self._store.shards[ordinal].name} has no caption {row}")
        digest: bytes = digests[row].tobytes()
        if not writer.has_caption(digest):
            entries = caption_entries(self._store, ordinal, row, digest)
            writer.add_caption(entries)
            if digest not in self._counted:  # not counted again if another new shard needs it: `OVERHEAD` covers that
                self._counted.add(digest)
                self._filled += sum(entry.num_bytes for entry in entries.values())
        return digest

    def _new_bytes(self, group: str, entry: Entry | None) -> int:
        """Return the bytes of a row's entry, or 0 if they are counted already, like a caption's."""
        if entry is None:
            return 0
        key = group.encode() + entry.digest
        if self._store.groups[group].stored_once and key in self._counted:
            return 0
        self._counted.add(key)
        return entry.num_bytes

    def _room(self, ordinal: int) -> ShardWriter:
        """Return the writer of the shard for the next row.

        A shard's fill is counted as in `live_bytes`, from which the sizes were chosen.
        """
        columns = set(self._store.shards[ordinal].entry.added)
        if self._writer is not None and (self._filled >= self._max_bytes or columns != self._columns):
            self._seal()
        if self._writer is None:
            self._columns, self._taken, self._sources = columns, {}, set()
            self._max_bytes, self._filled = self._sizes.pop(0) if self._sizes else self._size, 0
            name = f"{self._prefix}-{self._num_named:04d}"
            self._num_named += 1
            empty = caption_entries(self._store, ordinal, EMPTY_CAPTION_ROW)
            self._writer = ShardWriter(self._path, name, self._store.groups, empty, self._max_bytes)
        if ordinal not in self._sources:
            self._sources.add(ordinal)
            self._writer.note_error(self._store.shards[ordinal].entry.text_error)
        return self._writer

    def _seal(self) -> None:
        if self._writer is not None:
            self._writer.seal()
            self._sealed.append(self._writer.name)
            if self._columns:
                entry, _ = describe_shard(self._path, self._writer.name, self._store.manifest)
                shard = SealedShard(self._path, entry)
                for column in sorted(self._columns):
                    values = CopiedValues(self._store, column, self._taken)
                    write_column_shard(self._path, shard, column, values)
            self._writer = None


def caption_digests(shard: SealedShard) -> NDArray[np.uint8]:
    """Return the digests of a shard's captions in row order, `[N, 16]`.

    Raises:
        CorruptError: if the index does not list each of the shard's captions.
    """
    num_captions = shard.entry.groups[TEXT_GROUP].rows
    rows = shard.index.slice("caption_row", 0, num_captions)
    digests = np.zeros((num_captions, 16), dtype=np.uint8)
    if len(rows) != num_captions or int(rows.max(initial=0)) >= num_captions:
        raise CorruptError(f"{shard.paths.index}: its captions are not those of the manifest; run `store verify`")
    digests[rows] = shard.caption_digests()
    return digests


def _records(shard: SealedShard, group: str, rows: NDArray[np.int64], ids: NDArray[np.uint64]) -> list[SampleRecord]:
    """Return the records of rows, `[B]`, by their id digests, `[B, 2]`."""
    positions = shard.positions(keys_of(ids))
    if (positions < 0).any():
        row = int(rows[np.argmax(positions < 0)])
        raise CorruptError(f"{shard.paths.index} has no sample for row {row} of {group}; run `store verify`")
    offsets = shard.index.take("record_offset", positions).astype(np.int64)
    lengths = shard.index.take("record_bytes", positions).astype(np.int64)
    if int(lengths.max()) > MAX_RECORD_BYTES:
        raise CorruptError(f"{shard.paths.index}: a record of {int(lengths.max())} bytes is too long; run `store verify`")
    data = [bytearray(length) for length in lengths.tolist()]
    shard.read_into(offsets.tolist(), [memoryview(record) for record in data])
    records = []
    for row, encoded in zip(rows.tolist(), data, strict=True):
        item = f"shard {shard.name}, row {row} of {group}"
        record = decode_record(bytes(encoded), item)
        if (record.bucket, record.row) != (group, row):
            raise CorruptError(f"{item}: its record says row {record.row} of {record.bucket!r}; run `store verify`")
        records.append(record)
    return records


def compare_with_record(record: SampleRecord, row: Mapping[str, NDArray[Any]], item: str) -> None:
    """Compare the columns derived from a record with those stored in the row.

    Raises:
        CorruptError: if one differs; the message names `item`.
    """
    num_captions = len(row[CAPTIONS])
    expected = {
        CAPTIONS: (record.caption_rows + (-1,) * num_captions)[:num_captions],
        ORIGINAL_SIZE: record.original_size,
        CROP: record.crop[:2],
    }
    for name, values in expected.items():
        if tuple(row[name].tolist()) != values:
            raise CorruptError(
                f"{item}: its {name} is {row[name].tolist()}, its record says {list(values)}; run `store verify`"
            )
