"""`shards/NAME.lines`: checksums of the lines of a shard's file, for shards whose extents have none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bucketline.errors import CorruptError
from bucketline.store.format.hashing import LINE_BYTES
from bucketline.store.shard.row_locator import LINE_CHECKSUM
from bucketline.store.shard.sidecar import PagedFile, encode_paged

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from bucketline.store.format.manifest_entries import ShardEntry

_MAX_HEADER_BYTES = 1 << 13
LINES_FORMAT = "bucketline.lines/1"


def lines_name(shard: str) -> str:
    """Return the object's name."""
    return f"shards/{shard}.lines"


def encode_lines(entry: ShardEntry, checksums: Sequence[int]) -> bytes:
    """Return the object's bytes, for a shard's file whose digest has been compared with the manifest's."""
    about = {"format": LINES_FORMAT, "digest": entry.lmdb.digest, "line_bytes": LINE_BYTES, "shard_id": entry.shard_id}
    return encode_paged([(LINE_CHECKSUM, "U64", np.array(checksums, dtype="<u8"))], about)


def lines_bytes(entry: ShardEntry) -> int:
    """Return the most bytes that a shard's object may have."""
    num_lines = -(-entry.lmdb.num_bytes // LINE_BYTES)
    return 8 * num_lines + 8 * (2 + num_lines // 500) + _MAX_HEADER_BYTES


def decode_lines(data: bytes, entry: ShardEntry, item: Path | str) -> NDArray[np.uint64]:
    """Return the checksums of a shard's lines, `[lines]`; errors name `item`."""
    if not data:
        raise CorruptError(f"{item} is empty; push the store again")
    file = PagedFile.over(item, memoryview(data), LINES_FORMAT)
    num_lines = -(-entry.lmdb.num_bytes // LINE_BYTES)
    found = tuple(file.metadata.get(name) for name in ("digest", "line_bytes", "shard_id"))
    values = file.slice(LINE_CHECKSUM, 0, num_lines)
    if found != (entry.lmdb.digest, LINE_BYTES, entry.shard_id) or values.dtype != "<u8" or values.shape != (num_lines,):
        raise CorruptError(f"{item} is of another shard's file; remove it and push the store again")
    return values
