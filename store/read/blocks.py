"""Read a complete block of rows, located by the extents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bucketline.errors import CorruptError
from bucketline.store.format.block import decode_block

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from bucketline.store.format.block import BlockSpec
    from bucketline.store.shard.reader import SealedShard
    from bucketline.store.shard.row_locator import BlockRanges


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
