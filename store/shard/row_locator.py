"""Locate rows of many shards at once: the n-th live row's number, and its block's range in the shard's file.

Both are vectorised binary searches, so that a batch's cost does not depend on how many shards it spans.
Letters: B requested rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from bucketline.errors import CorruptError
from bucketline.store.shard import mapped
from bucketline.store.shard.meta import META_FORMAT
from bucketline.store.shard.sidecar import Sidecars

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from numpy.typing import NDArray

    from bucketline.store.format.block import BlockSpec
    from bucketline.store.format.manifest import FileEntry, ShardEntry, ShardPaths
    from bucketline.store.format.text import RaggedSpec
    from bucketline.store.shard.sidecar import DroppedRows, Sidecar

_FIELDS = ("offset", "length", "first_row", "rows")
_I8 = np.dtype("<i8")


class ShardSource(Protocol):
    """The source of the files of a store's shards. Each method raises a StoreError if it cannot do it."""

    def paths(self, entry: ShardEntry) -> ShardPaths:
        """Return the places of a shard's files on this machine."""

    def fetch(self, files: Sequence[tuple[Path, FileEntry]]) -> None:
        """Make sidecars, or a list of dropped rows, available at their paths, with the contents that the manifest lists."""

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
class _Dropped:
    """The dropped rows of one bucket, shard after shard."""

    rows: NDArray[np.uint32]
    first: NDArray[np.int64]  # by shard: position of its first one in `rows`
    count: NDArray[np.int64]  # by shard


class BlockTable:
    """The sidecars and dropped rows of several shards."""

    def __init__(
        self,
        entries: Sequence[ShardEntry],
        paths: Sequence[ShardPaths],
        *,
        plain_reads: bool = False,
        sources: Sequence[ShardSource | None] = (),
        dropped: Sequence[DroppedRows | None] = (),
    ) -> None:
        """Reserve addresses for the sidecars; nothing is opened yet.

        They are mapped, except with `plain_reads` or if maps are scarce: the shards' own files need as many. `sources` has
        each shard's, if any has one; `dropped` those of their stores: None for a shard without dropped rows.
        """
        self._sources = sources if any(source is not None for source in sources) else ()
        plain_reads = plain_reads or not mapped.fits(2 * len(entries))
        self._entries, self._paths, self._dropped_of = entries, paths, dropped
        metas = [(path, entry.meta) for entry, path in zip(entries, paths, strict=True)]
        fetch = self._fetch if self._sources else None
        self.meta = Sidecars(META_FORMAT, _FIELDS, metas, self._check_meta, plain_reads=plain_reads, fetch=fetch)
        self._groups: dict[str, NDArray[np.int64]] = {}
        self._dropped: dict[str, _Dropped] = {}
        self._num_bytes = np.array([entry.lmdb.num_bytes for entry in entries], dtype=np.int64)

    def _fetch(self, ordinals: Sequence[int]) -> None:
        """Let sources make the sidecars of some shards available, each source's together."""
        wanted: dict[int, list[tuple[Path, FileEntry]]] = {}
        for ordinal in ordinals:
            if self._sources[ordinal] is not None:
                entry, path = self._entries[ordinal], self._paths[ordinal]
                own = wanted.setdefault(id(self._sources[ordinal]), [])
                own.append((path.meta, entry.meta))
        for source in {id(source): source for source in self._sources if source is not None}.values():
            if id(source) in wanted:
                source.fetch(wanted[id(source)])

    def _check_meta(self, ordinal: int, file: Sidecar) -> None:
        entry = self._entries[ordinal]
        check_shard_id(entry, file)
        blocks = max((group.first_block + group.blocks for group in entry.groups.values()), default=0)
        if blocks == 0 or any(file.tensor(name)[1:3] != ("U64", (blocks,)) for name in _FIELDS):
            raise CorruptError(f"{file.path}: does not list the {blocks} blocks that the manifest has; run `store verify`")

    def _group(self, name: str) -> NDArray[np.int64]:
        """Return the manifest's rows, first block and blocks of a bucket (or of the captions) in each shard, `[shards, 3]`."""
        if name not in self._groups:
            groups = [entry.groups.get(name) for entry in self._entries]
            own = [(group.rows, group.first_block, group.blocks) if group else (0, 0, 0) for group in groups]
            self._groups[name] = np.array(own, dtype=np.int64).reshape(-1, 3)
        return self._groups[name]

    def _dropped_in(self, group: str) -> _Dropped:
        if group not in self._dropped:
            rows = [np.empty(0, dtype="<u4")] * len(self._entries)
            for ordinal, entry in enumerate(self._entries):
                if group in entry.groups and entry.groups[group].dropped:
                    gone = self._dropped_of[ordinal]
                    assert gone is not None, f"shard {entry.name} was opened without its dropped rows"
                    rows[ordinal] = gone.of(entry.name, group)
            count = np.array([len(own) for own in rows], dtype=np.int64)
            joined = np.concatenate([np.empty(0, dtype="<u4"), *rows])
            self._dropped[group] = _Dropped(rows=joined, first=np.cumsum(count) - count, count=count)
        return self._dropped[group]

    def live_rows(self, group: str, shard: NDArray[np.int64], ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the row number of each shard's n-th live row of a bucket (rank-select over the dropped rows).

        The n-th live row is n + j if j dropped rows come before it: those with `dropped[j] - j <= n`.
        """
        gone = self._dropped_in(group)
        if not len(gone.rows):
            return ranks
        with_dropped = np.flatnonzero(gone.count[shard])
        if len(with_dropped) == 0:
            return ranks
        own, wanted = shard[with_dropped], ranks[with_dropped]
        first = gone.first[own]

        def before(j: NDArray[np.int64]) -> NDArray[np.bool_]:
            is_before: NDArray[np.bool_] = gone.rows[first + j].astype(np.int64) - j <= wanted
            return is_before

        j = _first_false(before, gone.count[own])
        rows = ranks.copy()
        rows[with_dropped] += j
        return rows

    def find(self, groups: Sequence[tuple[str, int]], shard: NDArray[np.int64], rows: NDArray[np.int64]) -> BlockRanges:
        """Return the blocks that contain rows of groups, given with the number of rows of each: buckets, or `text`."""
        self.meta.open(shard)
        ends = np.cumsum([count for _, count in groups]).tolist()
        own = [self._group(name)[shard[end - count : end]] for (name, count), end in zip(groups, ends, strict=True)]
        most, first, blocks = own[0].T if len(own) == 1 else np.concatenate(own).T

        def not_after(block: NDArray[np.int64]) -> NDArray[np.bool_]:
            return self.meta.values("first_row", shard, first + block, _I8) <= rows

        at = first + np.maximum(_first_false(not_after, blocks) - 1, 0)
        offset, length, first_row, num_rows = (self.meta.values(name, shard, at, _I8) for name in _FIELDS)
        row_in_block = rows - first_row
        bad = (blocks == 0) | (row_in_block < 0) | (row_in_block >= num_rows)
        # at most the manifest's row count, which fits the file, so that no product of rows and bytes below can overflow
        bad |= (first_row < 0) | (num_rows > most - first_row)
        bad |= (offset < 0) | (length < 0) | (length > self._num_bytes[shard] - offset)
        if bad.any():
            worst = int(np.argmax(bad))
            path = self._paths[int(shard[worst])].meta
            group = next(name for (name, _), end in zip(groups, ends, strict=True) if worst < end)
            raise CorruptError(f"{path}: no block of {group} holds row {int(rows[worst])}; run `store verify`")
        return BlockRanges(offset=offset, length=length, rows=num_rows, row_in_block=row_in_block)


def check_shard_id(entry: ShardEntry, file: Sidecar) -> None:
    found = file.about("shard_id")
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

    def where(self, chosen: slice | NDArray[np.bool_], bucket: str = "") -> Located:
        """Return some of the entries: many batches are located at once and then used one by one."""
        return Located(
            bucket=bucket or self.bucket,
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

    def ends(self) -> NDArray[np.int64]:
        """Return the end of each entry's block in the shard's file, `[B]`."""
        return self.data + 8 + self.entries * self.spec.entry_bytes + self.tokens * self.spec.token_bytes

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


def joined(parts: Sequence[LocatedEntries]) -> LocatedEntries:
    """Return the entries of several located ones of one group, one after another."""
    if len(parts) == 1:
        return parts[0]
    names = ("shard", "row", "data", "entries", "tokens", "row_in_block")
    own = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    return LocatedEntries(spec=parts[0].spec, **own)
