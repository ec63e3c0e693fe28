"""Check a shard's extents: every block range is compared with the file and with the other ranges.

Faults are reported; the remaining blocks can be read from the beginning of the file to its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bucketline.store.format.text_block import is_bucket

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from bucketline.store.format.block import BlockSpec
    from bucketline.store.read.store import Store
    from bucketline.store.shard.reader import SealedShard
    from bucketline.store.verify.faults import Faults

MAX_BLOCK_BYTES = 64 << 20  # maximum that verify holds in memory; a block is about 1 MiB, or one row
_U64 = 1 << 64  # the extents are unsigned; they are read as signed here, so that values from 2⁶³ are negative
_NUMBERS = ("group", "block", "offset", "length", "first_row", "rows")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlace:
    """One block's entry in the extents."""

    group: str
    block: int
    offset: int
    length: int
    first_row: int
    rows: int


class BlockPlaces:
    """Blocks of a shard, in file order."""

    def __init__(self, groups: list[str], table: NDArray[np.int64]) -> None:
        """Wrap a table `[blocks, 6]` whose first column is an index into `groups`."""
        self._groups = groups
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    def __iter__(self) -> Iterator[BlockPlace]:
        for numbers in self._table:
            group, block, offset, length, first_row, rows = numbers.tolist()
            yield BlockPlace(
                group=self._groups[group], block=block, offset=offset, length=length, first_row=first_row, rows=rows
            )


def find_places(
    store: Store, specs: Mapping[str, BlockSpec], shard: SealedShard, file_bytes: int, faults: Faults
) -> BlockPlaces:
    """Return the valid block ranges, in file order; `specs` are the columns of the blocks of rows.

    `file_bytes` is the length of the shard's file.
    """
    groups = sorted(shard.entry.groups)
    tables = [np.empty((0, len(_NUMBERS)), dtype=np.int64)]
    for number, group in enumerate(groups):
        with faults.guard(group):
            table = _table_of(shard, group, number)
            _check_rows(shard, group, table, faults)
            tables.append(table[_is_possible(store, specs, shard, group, table, file_bytes, faults)])
    joined = np.concatenate(tables)
    joined = joined[np.argsort(joined[:, 2], kind="stable")]
    return BlockPlaces(groups, joined[_is_apart(groups, joined, faults)])


def _table_of(shard: SealedShard, group: str, number: int) -> NDArray[np.int64]:
    entry = shard.entry.groups[group]
    begin, end = entry.first_block, entry.first_block + entry.blocks
    columns = [shard.extents.slice(name, begin, end).astype(np.int64) for name in _NUMBERS[2:]]
    return np.stack([np.full(entry.blocks, number), np.arange(entry.blocks), *columns], axis=1)


def _check_rows(shard: SealedShard, group: str, table: NDArray[np.int64], faults: Faults) -> None:
    """Check that block rows are consecutive and sum to the manifest's number."""
    entry = shard.entry.groups[group]
    first_row, rows = table[:, 4], table[:, 5]
    impossible = (rows < 1) | (rows > entry.rows)
    for block in np.flatnonzero(impossible).tolist():
        faults.add(f"the extents give the block {int(rows[block]) % _U64} rows", group, block)
    if impossible.any():
        return
    expected = np.cumsum([0, *rows[:-1]]) if len(rows) else rows
    for block in np.flatnonzero(first_row != expected)[:1].tolist():
        faults.add(
            f"block {block} begins with row {int(first_row[block]) % _U64}, expected {int(expected[block])}", group, block
        )
    if int(rows.sum()) != entry.rows:
        faults.add(f"the blocks hold {int(rows.sum())} rows, the manifest says {entry.rows}", group)


def _is_possible(
    store: Store,
    specs: Mapping[str, BlockSpec],
    shard: SealedShard,
    group: str,
    table: NDArray[np.int64],
    file_bytes: int,
    faults: Faults,
) -> NDArray[np.bool_]:
    """Return which blocks are inside the file and have the right length for their rows."""
    offset, length, rows = table[:, 2], table[:, 3], table[:, 5]
    good = (rows >= 1) & (rows <= shard.entry.groups[group].rows)
    outside = (offset < 0) | (length < 1) | (offset > file_bytes - length)
    for block in np.flatnonzero(outside & good).tolist():
        begin, size = int(offset[block]) % _U64, int(length[block]) % _U64
        faults.add(f"the extents place the block at bytes {begin} to {begin + size}, beyond the file", group, block)
    good &= ~outside
    wrong = good & _has_wrong_length(store, specs, group, length, rows)
    for block in np.flatnonzero(wrong).tolist():
        faults.add(
            f"the extents give {int(rows[block])} rows the impossible length of {int(length[block])} bytes", group, block
        )
    return good & ~wrong


def _has_wrong_length(
    store: Store, specs: Mapping[str, BlockSpec], group: str, length: NDArray[np.int64], rows: NDArray[np.int64]
) -> NDArray[np.bool_]:
    if not is_bucket(group):
        own = store.spec_of(group)
        rest = length - own.header_bytes - 8 - rows * own.entry_bytes
        wrong = (rest < 0) | (rest % own.token_bytes != 0)
    else:
        spec = specs[group]
        wrong = length != spec.header_bytes + rows * spec.row_bytes
    result: NDArray[np.bool_] = wrong | ((length > MAX_BLOCK_BYTES) & (rows > 1))
    return result


def _is_apart(groups: list[str], table: NDArray[np.int64], faults: Faults) -> NDArray[np.bool_]:
    """Return which blocks, sorted by offset, do not begin inside an earlier one."""
    ends = np.maximum.accumulate(table[:, 2] + table[:, 3])
    apart = np.ones(len(table), dtype=bool)
    apart[1:] = table[1:, 2] >= ends[:-1]
    for at in np.flatnonzero(~apart).tolist():
        group, block, offset = table[at, :3].tolist()
        faults.add(f"the extents place the block at byte {offset}, inside another block", groups[group], block)
    return apart
