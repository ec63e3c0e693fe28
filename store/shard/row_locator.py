"""Locate rows of many shards at once: the n-th live row's number, and its block's range in the shard's file.

Both are vectorised binary searches over memory maps, so that a batch's cost does not depend on how many shards it spans.
Letters: B requested rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from bucketline.errors import CorruptError
from bucketline.store.format.manifest import IN_FILE
from bucketline.store.shard import mapped
from bucketline.store.shard.sidecar import Sidecars

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from numpy.typing import NDArray

    from bucketline.store.format.block import BlockSpec
    from bucketline.store.format.manifest import DroppedEntry, FileEntry, ShardEntry, ShardPaths
    from bucketline.store.format.text import RaggedSpec
    from bucketline.store.shard.sidecar import PagedFile

EXTENTS_FORMAT = "bucketline.extents/1"
DROPPED_FORMAT = "bucketline.dropped/1"
LINE_CHECKSUM = "line_checksum"  # the tensor of the extents with a checksum for each 8 MiB of the shard's file
_FIELDS = ("offset", "length", "first_row", "rows")
_I8, _U4 = np.dtype("<i8"), np.dtype("<u4")


class ShardSource(Protocol):
    """The source of the files of a store's shards. Each method raises a StoreError if it cannot do it."""

    def paths(self, entry: ShardEntry) -> ShardPaths:
        """Return the places of a shard's files on this machine."""

    def fetch(self, files: Sequence[tuple[Path, FileEntry | DroppedEntry]]) -> None:
        """Make sidecars available at their paths, with the contents that the manifest lists."""

    def open_shard(self, entry: ShardEntry) -> None:
        """Make a shard's file available at its path, of its full length; its bytes only while they are `reading`."""

    def reading(self, entry: ShardEntry, ranges: Sequence[tuple[int, int]]) -> AbstractContextManager[None]:
        """Make byte ranges (offset, length) of a shard's file readable, until the context ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRanges:
    """The block of each row, `[B]`."""

    offset: NDArray[np.int64]  # of the block in the shard's file, in bytes
    length: NDArray[np.int64]  # of the block, in bytes
    rows: NDArray[np.int64]  # K, or N for captions
    row_in_block: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """The manifest's entries of one bucket (or of the captions), by shard."""

    rows: NDArray[np.int64]
    first_block: NDArray[np.int64]
    blocks: NDArray[np.int64]
    first_dropped: NDArray[np.int64]  # position in the shard's list
    dropped: NDArray[np.int64]


class BlockTable:
    """The extents and dropped-row lists of several shards."""

    def __init__(
        self,
        entries: Sequence[ShardEntry],
        paths: Sequence[ShardPaths],
        *,
        plain_reads: bool = False,
        sources: Sequence[ShardSource | None] = (),
    ) -> None:
        """Reserve addresses for the sidecars; nothing is opened yet.

        They are mapped, except with `plain_reads` or if maps are scarce: the shards' own files need as many. `sources` has
        each shard's, if any has one.
        """
        self._sources = sources if any(source is not None for source in sources) else ()
        plain_reads = plain_reads or not mapped.fits(2 * len(entries) + sum(entry.dropped is not None for entry in entries))
        self._entries, self._paths = entries, paths
        extents = [(path.extents, entry.extents.num_bytes) for entry, path in zip(entries, paths, strict=True)]
        fetch = self._fetch if self._sources else None
        self.extents = Sidecars(EXTENTS_FORMAT, _FIELDS, extents, self._check_extents, plain_reads=plain_reads, fetch=fetch)
        lists = [
            (path.dropped(entry.dropped.generation), entry.dropped.num_bytes) if entry.dropped else (path.extents, 0)
            for entry, path in zip(entries, paths, strict=True)
        ]
        self.dropped = Sidecars(DROPPED_FORMAT, ("rows",), lists, self._check_dropped, plain_reads=plain_reads, fetch=fetch)
        self._groups: dict[str, _Group] = {}
        self._num_bytes = np.array([entry.lmdb.num_bytes for entry in entries], dtype=np.int64)

    def _fetch(self, ordinals: Sequence[int]) -> None:
        """Let sources make the extents and lists of some shards available, each source's together."""
        wanted: dict[int, list[tuple[Path, FileEntry | DroppedEntry]]] = {}
        for ordinal in ordinals:
            if self._sources[ordinal] is not None:
                entry, path = self._entries[ordinal], self._paths[ordinal]
                own = wanted.setdefault(id(self._sources[ordinal]), [])
                own.append((path.extents, entry.extents))
                if entry.dropped is not None:
                    own.append((path.dropped(entry.dropped.generation), entry.dropped))
        for source in {id(source): source for source in self._sources if source is not None}.values():
            if id(source) in wanted:
                source.fetch(wanted[id(source)])

    def _check_extents(self, ordinal: int, file: PagedFile) -> None:
        entry = self._entries[ordinal]
        check_shard_id(entry, file)
        blocks = max((group.first_block + group.blocks for group in entry.groups.values()), default=0)
        if blocks == 0 or any(file.column(name).dtype != "<u8" or file.column(name).shape != (blocks,) for name in _FIELDS):
            raise CorruptError(f"{file.path}: does not list the {blocks} blocks that the manifest has; run `store verify`")
        if file.metadata.get("places") != IN_FILE:
            raise CorruptError(
                f"{file.path}: its offsets are not bytes of the shard's file (places is {file.metadata.get('places')!r:.40}, "
                f"expected {IN_FILE!r}); `store repair` rebuilds it from the shard's file"
            )

    def _check_dropped(self, ordinal: int, file: PagedFile) -> None:
        """Compare the complete list with the manifest: a list of another copy may have the same length and valid pages."""
        entry = self._entries[ordinal]
        if entry.dropped is None or file.digest() != entry.dropped.digest:
            raise CorruptError(
                f"{file.path} is not the file that the manifest lists: its digest is {file.digest()}; "
                "restore the file that belongs there, or run `store verify`"
            )
        check_shard_id(entry, file)
        places = dropped_places(entry)
        listed = {name: {"first": first, "count": count} for name, (first, count) in places.items()}
        rows = file.column("rows")
        if file.metadata.get("groups") != listed or rows.dtype != _U4 or rows.shape != (sum(n for _, n in places.values()),):
            raise CorruptError(f"{file.path}: its groups are not those of the manifest; run `store verify`")

    def _group(self, name: str) -> _Group:
        if name not in self._groups:
            groups = [entry.groups.get(name) for entry in self._entries]
            places = [dropped_places(entry).get(name, (0, 0)) for entry in self._entries]
            self._groups[name] = _Group(
                rows=np.array([group.rows if group else 0 for group in groups], dtype=np.int64),
                first_block=np.array([group.first_block if group else 0 for group in groups], dtype=np.int64),
                blocks=np.array([group.blocks if group else 0 for group in groups], dtype=np.int64),
                first_dropped=np.array([first for first, _ in places], dtype=np.int64),
                dropped=np.array([count for _, count in places], dtype=np.int64),
            )
        return self._groups[name]

    def live_rows(self, group: str, shard: NDArray[np.int64], ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the row number of each shard's n-th live row of a bucket (rank-select over the dropped rows).

        The n-th live row is n + j if j dropped rows come before it: those with `dropped[j] - j <= n`.
        """
        entry = self._group(group)
        with_dropped = np.flatnonzero(entry.dropped[shard])
        if len(with_dropped) == 0:
            return ranks
        own, wanted = shard[with_dropped], ranks[with_dropped]
        self.dropped.open(own)
        first, count = entry.first_dropped[own], entry.dropped[own]

        def before(j: NDArray[np.int64]) -> NDArray[np.bool_]:
            return self.dropped.unchecked("rows", own, first + j, _U4).astype(np.int64) - j <= wanted

        j = _first_false(before, count)
        # The search read unchecked pages; its result is proved by its two neighbours, checked.
        below, above = np.maximum(j - 1, 0), np.minimum(j, count - 1)
        wrong = (j > 0) & (self.dropped.checked("rows", own, first + below, _U4).astype(np.int64) - below > wanted)
        wrong |= (j < count) & (self.dropped.checked("rows", own, first + above, _U4).astype(np.int64) - above <= wanted)
        if wrong.any():
            path = self.dropped.file(int(own[np.argmax(wrong)])).path
            raise CorruptError(f"{path}: its rows are not in order; run `store verify`")
        rows = ranks.copy()
        rows[with_dropped] += j
        return rows

    def find(self, group: str, shard: NDArray[np.int64], rows: NDArray[np.int64]) -> BlockRanges:
        """Return the blocks that contain rows of a group (a bucket, or `text`)."""
        self.extents.open(shard)
        entry = self._group(group)
        first = entry.first_block[shard]

        def not_after(block: NDArray[np.int64]) -> NDArray[np.bool_]:
            return self.extents.unchecked("first_row", shard, first + block, _I8) <= rows

        at = first + np.maximum(_first_false(not_after, entry.blocks[shard]) - 1, 0)
        offset, length, first_row, num_rows = (self.extents.checked(name, shard, at, _I8) for name in _FIELDS)
        row_in_block = rows - first_row
        bad = (entry.blocks[shard] == 0) | (row_in_block < 0) | (row_in_block >= num_rows)
        # at most the manifest's row count, which fits the file, so that no product of rows and bytes below can overflow
        bad |= (first_row < 0) | (num_rows > entry.rows[shard] - first_row)
        bad |= (offset < 0) | (length < 0) | (length > self._num_bytes[shard] - offset)
        if bad.any():
            worst = int(np.argmax(bad))
            path = self._paths[int(shard[worst])].extents
            raise CorruptError(f"{path}: no block of {group} holds row {int(rows[worst])}; run `store verify`")
        return BlockRanges(offset=offset, length=length, rows=num_rows, row_in_block=row_in_block)


def dropped_places(entry: ShardEntry) -> dict[str, tuple[int, int]]:
    """Return the first position and the count of each bucket's dropped rows in the shard's list."""
    places, at = {}, 0
    for name, group in sorted(entry.groups.items()):
        if group.dropped:
            places[name] = (at, group.dropped)
            at += group.dropped
    return places


def check_shard_id(entry: ShardEntry, file: PagedFile) -> None:
    found = file.metadata.get("shard_id")
    if found != entry.shard_id:
        raise CorruptError(
            f"{file.path} belongs to another shard: it has the id {found!s:.40}, the manifest lists {entry.name} with the id "
            f"{entry.shard_id}; restore the file that belongs there"
        )


def _first_false(holds: Callable[[NDArray[np.int64]], NDArray[np.bool_]], count: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return, for each of B sorted sequences, the first index at which `holds` is false; its length `count` if there is none.

    `holds` is true up to some index and false from there. It is called with indices `[B]` from 0 to `count` - 1 (0 if `count`
    is 0).
    """
    last, found = np.maximum(count - 1, 0), np.zeros_like(count)
    step = 1 << int(count.max(initial=0)).bit_length() >> 1
    while step:  # all indices below `found` hold; a step is taken if the last index that it covers holds
        probe = found + (step - 1)
        found += step * (holds(np.minimum(probe, last)) & (probe < count))
        step >>= 1
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """Locations of rows of one bucket: one entry per requested row, in that order."""

    bucket: str
    shard: NDArray[np.int64]  # [B] ordinal of the file in the store: of a shard, or of an added column of its rows
    row: NDArray[np.int64]  # [B] row number in the shard's bucket
    data: NDArray[np.int64]  # [B] byte in the shard's file at which the block's columns begin
    rows: NDArray[np.int64]  # [B] K of the block
    row_in_block: NDArray[np.int64]  # [B]
    spec: BlockSpec | None = None  # of the blocks of an added column; None: the bucket's
    added: Mapping[str, Located] = field(default_factory=dict)  # the values of added columns, by name

    def offsets(self, spec: BlockSpec, column: str) -> NDArray[np.int64]:
        """Return the byte offset of each row's value of a column in the shard's file, `[B]`."""
        return self.data + self.rows * spec.prefix_bytes[column] + self.row_in_block * spec.column(column).row_bytes

    def part(self, begin: int, end: int) -> Located:
        """Return the entries from `begin` to `end`: many batches are located at once and then used one by one."""
        return self.where(slice(begin, end))

    def where(self, chosen: slice | NDArray[np.bool_]) -> Located:
        return Located(
            bucket=self.bucket,
            shard=self.shard[chosen],
            row=self.row[chosen],
            data=self.data[chosen],
            rows=self.rows[chosen],
            row_in_block=self.row_in_block[chosen],
            spec=self.spec,
            added={name: own.where(chosen) for name, own in self.added.items()},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedEntries:
    """Locations of captions, or of another group's entries: one per requested entry, in that order."""

    spec: RaggedSpec
    shard: NDArray[np.int64]  # [B] ordinal of the shard in the store
    row: NDArray[np.int64]  # [B] number of the entry in the shard
    data: NDArray[np.int64]  # [B] byte in the shard's file at which the block's tensors begin
    entries: NDArray[np.int64]  # [B] N of the block
    tokens: NDArray[np.int64]  # [B] T of the block
    row_in_block: NDArray[np.int64]  # [B]

    def part(self, begin: int, end: int) -> LocatedEntries:
        return self.where(slice(begin, end))

    def where(self, chosen: slice | NDArray[np.bool_]) -> LocatedEntries:
        return LocatedEntries(spec=self.spec, **{name: getattr(self, name)[chosen] for name in ARRAYS})

    def ends(self) -> NDArray[np.int64]:
        """Return the end of each entry's block in the shard's file, `[B]`."""
        ends: NDArray[np.int64] = self.data + 8 + self.entries * self.spec.entry_bytes + self.tokens * self.spec.token_bytes
        return ends

    def starts_offsets(self) -> NDArray[np.int64]:
        """Return the byte offset of each entry's two `starts`, `[B]`."""
        return self.data + 8 * self.row_in_block

    def fixed_offsets(self, column: str) -> NDArray[np.int64]:
        """Return the byte offset of each entry's value of a fixed column, `[B]`."""
        names = [fixed.name for fixed in self.spec.fixed]
        before = sum(fixed.row_bytes for fixed in self.spec.fixed[: names.index(column)])
        row_bytes = self.spec.fixed[names.index(column)].row_bytes
        return self.data + 8 + self.entries * (8 + 8 + before) + self.row_in_block * row_bytes

    def token_offsets(self, column: str, first_token: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the byte offset of each entry's tokens of a token column, `[B]`.

        `first_token` is each one's first entry of `starts`. A block's tensors: starts, checksums, fixed, tokens, digests.
        """
        at = self.data + 8 + self.entries * (8 + 8 + self.spec.fixed_bytes)
        for token_column in self.spec.tokens:
            if token_column.name == column:
                return at + first_token * token_column.row_bytes
            at = at + self.tokens * token_column.row_bytes
        raise KeyError(column)


ARRAYS = ("shard", "row", "data", "entries", "tokens", "row_in_block")  # of `LocatedEntries`


def joined(parts: Sequence[LocatedEntries]) -> LocatedEntries:
    """Return the entries of several located ones of one group, one after another."""
    if len(parts) == 1:
        return parts[0]
    own = {name: np.concatenate([getattr(part, name) for part in parts]) for name in ARRAYS}
    return LocatedEntries(spec=parts[0].spec, **own)
