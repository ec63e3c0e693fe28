"""The blocks of a shard's file, as its extents place them, to be read from the beginning of the file to its end.

Only what must hold for that is checked: `store.verify.description` compares the extents with those of a file described again.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from bucketline.errors import CorruptError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from bucketline.store.shard.reader import SealedShard
    from bucketline.store.verify.faults import Faults

MAX_BLOCK_BYTES = 64 << 20  # maximum that verify holds in memory; a block is about 1 MiB, or one row
SEGMENT_BYTES = 1 << 20  # read size outside of blocks


class BlockPlace(NamedTuple):
    """One block's entry in the extents."""

    group: str
    block: int
    offset: int
    length: int
    first_row: int
    rows: int


def block_places(shard: SealedShard, file_bytes: int, faults: Faults) -> Iterator[BlockPlace]:
    """Yield the blocks that can be read, in file order; `file_bytes` is the length of the shard's file."""
    groups, tables = sorted(shard.entry.groups), []
    for number, group in enumerate(groups):
        with faults.guard(group):
            own = shard.entry.groups[group]
            places = [
                shard.extents.slice(name, own.first_block, own.first_block + own.blocks)
                for name in ("offset", "length", "first_row", "rows")
            ]
            tables.append(np.stack([np.full_like(places[0], number), np.arange(own.blocks, dtype="<u8"), *places], axis=1))
    end = 0
    table = np.concatenate(tables) if tables else np.empty((0, 6), dtype=np.uint64)
    for numbers in table[np.argsort(table[:, 2], kind="stable")]:
        at, block, offset, length, first_row, rows = numbers.tolist()
        if end <= offset < offset + length <= file_bytes and (length <= MAX_BLOCK_BYTES or rows == 1):
            yield BlockPlace(groups[at], block, offset, length, first_row, rows)
            end = offset + length
        else:
            error = (
                f"the extents place the block at bytes {offset} to {offset + length}, which is beyond the file, inside another "
                f"block, or an impossible length for {rows} rows"
            )
            faults.add(error, groups[at], block)


def segments(fd: int, num_bytes: int, places: Iterable[BlockPlace]) -> Iterator[tuple[BlockPlace | None, memoryview]]:
    """Read a file in order and yield its segments: complete blocks, and the bytes between them in pieces.

    A segment's bytes are valid only until the next one.
    """
    buffer = memoryview(bytearray(SEGMENT_BYTES))
    at = 0
    if num_bytes:  # a pipe has length 0 and does not support fadvise
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def between(end: int) -> Iterator[tuple[BlockPlace | None, memoryview]]:
        nonlocal at
        while at < end:
            yield None, _fill(fd, at, buffer[: min(SEGMENT_BYTES, end - at)])
            at += min(SEGMENT_BYTES, end - at)

    for place in places:
        yield from between(place.offset)
        if place.length > len(buffer):
            buffer = memoryview(bytearray(place.length))
        yield place, _fill(fd, at, buffer[: place.length])
        at += place.length
    yield from between(num_bytes)


def _fill(fd: int, offset: int, out: memoryview) -> memoryview:
    done = 0
    while done < len(out):
        count = os.preadv(fd, [out[done:]], offset + done)
        if count == 0:
            raise CorruptError(f"the file ended at byte {offset + done} while it was read")
        done += count
    return out
