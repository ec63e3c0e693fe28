"""Located rows, captions and ragged entries: their byte offsets in the shards' files."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from bucketline.store.format.block import BlockSpec
    from bucketline.store.format.text_block import RaggedSpec


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
        """Return some of the entries, in the same order."""
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
        """Return some of the entries, in the same order."""
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
