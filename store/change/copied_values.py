"""The values of an added column for copied rows: read a block at a time, each compared with its checksum and its row's id."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.errors import CorruptError
from bucketline.store.format.block import ID, bad_rows
from bucketline.store.read.blocks import read_block
from bucketline.store.write.column_shard import ids_by_row

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from bucketline.store.format.block import BlockSpec
    from bucketline.store.read.store import Store
    from bucketline.store.shard.reader import SealedShard


class CopiedValues:
    """A column's values of rows of a store's shards, for a new shard with exactly these rows."""

    num_missing = 0

    def __init__(self, store: Store, column: str, rows: Mapping[str, array[int]]) -> None:
        """`rows`: by bucket, in the new shard's order, the ordinal of each row's shard and its number there, in turn."""
        self._store, self._column, self._rows = store, column, rows
        self._block: tuple[int, int, dict[str, NDArray[Any]]] = (-1, 0, {})  # shard, first row, columns
        self._bad = set[int]()  # rows of the block whose bytes do not match their checksum
        self._ids: NDArray[np.uint8] = np.empty((0, 16), dtype=np.uint8)  # of the shard's rows in the bucket

    def spec(self, bucket: str) -> BlockSpec:
        return self._store.added[self._column].specs[bucket]

    def blank(self, bucket: str) -> bytes:
        return bytes(self.spec(bucket).column(self._column).row_bytes)

    def rows(self, bucket: str) -> Iterator[bytes]:
        """Yield each row's value."""
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
