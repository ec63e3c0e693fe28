"""Located rows and captions: their byte offsets in the shards' files."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from bucketline.store.format.block import BlockSpec
    from bucketline.store.format.text_block import TextSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """Locations of rows of one bucket: one entry per requested row, in that order."""

    bucket: str
    shard: NDArray[np.int64]  # [B] ordinal of the shard in the store
    row: NDArray[np.int64]  # [B] row number in the shard's bucket
    data: NDArray[np.int64]  # [B] byte in the shard's file at which the block's columns begin
    rows: NDArray[np.int64]  # [B] K of the block
    row_in_block: NDArray[np.int64]  # [B]

    def offsets(self, spec: BlockSpec, column: str) -> NDArray[np.int64]:
        """Return the byte offset of each row's value of a column in the shard's file, `[B]`."""
        return self.data + self.rows * spec.prefix_bytes[column] + self.row_in_block * spec.column(column).row_bytes

    def part(self, begin: int, end: int) -> Located:
        """Return the entries from `begin` to `end`: many batches are located at once and then used one by one."""
        return Located(
            bucket=self.bucket,
            shard=self.shard[begin:end],
            row=self.row[begin:end],
            data=self.data[begin:end],
            rows=self.rows[begin:end],
            row_in_block=self.row_in_block[begin:end],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedCaptions:
    """Locations of captions: one entry per requested caption, in that order."""

    shard: NDArray[np.int64]  # [B] ordinal of the shard in the store
    row: NDArray[np.int64]  # [B] caption row in the shard
    data: NDArray[np.int64]  # [B] byte in the shard's file at which the block's tensors begin
    captions: NDArray[np.int64]  # [B] N of the block
    tokens: NDArray[np.int64]  # [B] T of the block
    row_in_block: NDArray[np.int64]  # [B]

    def part(self, begin: int, end: int) -> LocatedCaptions:
        """Return the entries from `begin` to `end`."""
        return LocatedCaptions(**{field.name: getattr(self, field.name)[begin:end] for field in fields(self)})

    def starts_offsets(self) -> NDArray[np.int64]:
        """Return the byte offset of each caption's two `starts`, `[B]`."""
        return self.data + 8 * self.row_in_block

    def fixed_offsets(self, spec: TextSpec, column: str) -> NDArray[np.int64]:
        """Return the byte offset of each caption's value of a fixed column, `[B]`."""
        names = [fixed.name for fixed in spec.fixed]
        before = sum(fixed.row_bytes for fixed in spec.fixed[: names.index(column)])
        row_bytes = spec.fixed[names.index(column)].row_bytes
        return self.data + 8 + self.captions * (8 + 8 + before) + self.row_in_block * row_bytes
