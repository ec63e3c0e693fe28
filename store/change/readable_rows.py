"""Find a damaged shard's readable rows, and the ids of the unreadable ones.

A row is readable if its block, its sample's record and all its captions are, each verified against its checksum. The shard's
sidecars must be intact, because they locate the rows.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from bucketline.errors import CorruptError, StoreError
from bucketline.store.change.copy_rows import caption_digests, compare_with_record
from bucketline.store.format.block import ID, bad_rows
from bucketline.store.format.columns import EntriesOf
from bucketline.store.format.hashing import caption_digest
from bucketline.store.format.text_block import EMPTY_CAPTION_ROW
from bucketline.store.read.blocks import read_block
from bucketline.store.read.iter_samples import live_positions
from bucketline.store.read.ragged_entries import caption_entries, row_entries
from bucketline.store.read.store import Store
from bucketline.store.shard.reader import SealedShard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from bucketline.store.format.manifest import Manifest
    from bucketline.store.format.manifest_entries import ShardEntry
    from bucketline.store.format.sample_record import SampleRecord
    from bucketline.store.format.text_block import Entry, RaggedSpec
    from bucketline.store.shard.reader import IndexEntry
    from bucketline.store.shard.row_locator import BlockRanges

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class Survey:
    """The readable part of a shard's live rows."""

    readable: int = 0
    lost: dict[str, list[int]] = field(default_factory=dict)  # row numbers by bucket, ascending
    ids: list[str] = field(default_factory=list)  # of lost rows with readable records
    unnamed: int = 0  # lost rows without readable records

    def add_lost(self, group: str, row: int, sample_id: str | None) -> None:
        self.lost.setdefault(group, []).append(row)
        if sample_id is None:
            self.unnamed += 1
        else:
            self.ids.append(sample_id)


class DamagedShard(SealedShard):
    """A shard whose file may have the wrong length, with some rows counted as dropped."""

    def __init__(self, store: Path, entry: ShardEntry) -> None:
        super().__init__(store, entry)
        self.takes_any_length = True
        self.lost: dict[str, list[int]] = {}  # rows by bucket

    def dropped_rows(self, group: str) -> NDArray[np.uint32]:
        return np.union1d(super().dropped_rows(group), np.array(self.lost.get(group, []), dtype="<u4"))


class DamagedStore(Store):
    """A store whose damaged shards are read as far as possible."""

    def __init__(self, path: Path, manifest: Manifest, damaged: Iterable[str]) -> None:
        super().__init__(path, manifest)
        names = set(damaged)
        self.damaged = {n: DamagedShard(path, shard.entry) for n, shard in enumerate(self.shards) if shard.name in names}
        self.shards = tuple(self.damaged.get(n, shard) for n, shard in enumerate(self.shards))

    def entry(self, spec: RaggedSpec, shard: int, row: int) -> Entry:
        """Return an entry. The empty caption's, which every shard has, come from any shard where they are readable."""
        if row != EMPTY_CAPTION_ROW or spec.of is EntriesOf.ROWS:
            return super().entry(spec, shard, row)
        for ordinal in (shard, *(n for n in range(len(self.shards)) if n != shard)):
            found = if_readable(super().entry, spec, ordinal, row)
            if found is not None and found.digest == caption_digest(""):
                return found
        raise CorruptError(f"{self.path}: no shard has a readable empty caption")


def if_readable(read: Callable[..., T], *args: object) -> T | None:
    """Return the result of `read(*args)`, or None if the file or the medium has lost the bytes.

    Raises:
        StoreError: if reading failed for a reason unrelated to the bytes, such as missing permission.
    """
    try:
        return read(*args)
    except StoreError as error:
        cause = error.__cause__
        is_gone = isinstance(cause, FileNotFoundError) or (isinstance(cause, OSError) and cause.errno == errno.EIO)
        if isinstance(error, CorruptError) or is_gone:
            return None
        raise


class RowSurvey:
    """Surveys one damaged shard of a store."""

    def __init__(self, store: DamagedStore, ordinal: int) -> None:
        """Read nothing yet."""
        self._store, self._ordinal = store, ordinal
        self._shard = store.shards[ordinal]
        self._captions: dict[int, bool] = {}  # readable or not, by caption row
        self._found = Survey()

    def run(self) -> Survey:
        """Read every live row of the shard.

        Raises:
            CorruptError: if the sidecars contradict each other, so that the rows are unknown.
            StoreError: if reading failed for a reason unrelated to the bytes.
        """
        self._digests = caption_digests(self._shard)
        for group, num_live in sorted(self._shard.entry.live.items()):
            if num_live:
                self._group(group)
        return self._found

    def _group(self, group: str) -> None:
        shard = self._shard
        rows = np.flatnonzero(shard.is_live(group))
        positions = live_positions(shard, group).astype(np.int64)
        first_row = 0
        while first_row < shard.entry.groups[group].rows:
            ranges = shard.block_ranges(group, np.array([first_row]))
            begin, end = np.searchsorted(rows, [first_row, first_row + int(ranges.rows[0])])
            if end > begin:
                self._block(group, first_row, ranges, shard.index_entries(positions[begin:end]))
            first_row += int(ranges.rows[0])

    def _block(self, group: str, first_row: int, ranges: BlockRanges, entries: list[IndexEntry]) -> None:
        """Classify a block's live rows, given by their index entries in order."""
        spec = self._store.manifest.specs[group]
        columns = if_readable(read_block, self._shard, spec, first_row, ranges)
        bad = set() if columns is None else set(bad_rows(spec, columns))
        for entry in entries:
            record, k = if_readable(self._shard.record, entry), entry.row - first_row
            is_whole = False
            if columns is not None and record is not None and k not in bad:
                values = {name: column[k] for name, column in columns.items()}
                own = values[ID].tobytes() == entry.digest
                is_whole = own and _agree(record, values) and all(map(self._is_caption_readable, record.caption_rows))
                is_whole = is_whole and if_readable(row_entries, self._store, self._ordinal, values) is not None
            if is_whole:
                self._found.readable += 1
            else:
                self._found.add_lost(group, entry.row, None if record is None else record.id)

    def _is_caption_readable(self, row: int) -> bool:
        if row not in self._captions:
            self._captions[row] = 0 <= row < len(self._digests) and (
                if_readable(caption_entries, self._store, self._ordinal, row, self._digests[row].tobytes()) is not None
            )
        return self._captions[row]


def _agree(record: SampleRecord, values: Mapping[str, NDArray[Any]]) -> bool:
    try:
        compare_with_record(record, values, "")
    except CorruptError:
        return False
    return True


def _live_entries(shard: SealedShard, group: str) -> list[IndexEntry]:
    return shard.index_entries(live_positions(shard, group).astype(np.int64))


def surveyed(store: DamagedStore, ordinal: int) -> Survey:
    """Return what is readable of a shard: nothing, if the empty caption, with which a new shard begins, is not readable."""
    found = RowSurvey(store, ordinal).run()
    has_empty = if_readable(caption_entries, store, ordinal, EMPTY_CAPTION_ROW, caption_digest("")) is not None
    return found if has_empty or not found.readable else all_lost(store, ordinal)


def all_lost(store: DamagedStore, ordinal: int) -> Survey:
    """Return a survey in which every row of a shard is lost, with the ids that are readable."""
    shard, found = store.shards[ordinal], Survey()
    for group, num_live in sorted(shard.entry.live.items()):
        entries = if_readable(_live_entries, shard, group) if num_live else []
        if entries is None:
            found.unnamed += num_live
            continue
        for one in entries:
            record = if_readable(shard.record, one)
            found.add_lost(group, one.row, None if record is None else record.id)
    return found
