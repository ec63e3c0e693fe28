"""Large pieces of shards' files read past the page cache (`O_DIRECT`), many at a time; no torch.

Through the page cache a cold byte costs four times the processor's time (`bench/delivery.py --cold`), and pushes another one
out. Past it nothing is kept: for stores that are larger than the memory that is left for them.
"""

from __future__ import annotations

import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from bucketline.store.sealed_shard import SealedShard

THREADS = 16  # each waits for one read; the disk's best depth here (`bench/delivery.py --cold`)
_SECTOR_BYTES = 4096  # what offsets, lengths and addresses are multiples of; media ask for 512 or 4096
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0)

Piece = tuple[int, int, memoryview]  # ordinal of the shard, byte in its file, where it goes


class DirectReads:
    """Reads pieces of some shards in threads of its own."""

    def __init__(self, shards: Sequence[SealedShard]) -> None:
        self._shards = shards
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="bucketline-direct")
        self._own = threading.local()

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def read(self, pieces: Iterable[Piece]) -> None:
        """Read pieces of shards' files, in any order.

        Raises:
            StoreError: where a shard's file is missing or its medium fails.
            CorruptError: where a shard's file ends too early, or is another shard's.
        """
        by_shard: dict[int, list[tuple[int, memoryview]]] = {}
        for ordinal, offset, out in pieces:
            by_shard.setdefault(ordinal, []).append((offset, out))
        jobs = [self._pool.submit(self._read, ordinal, sorted(own, key=_offset)) for ordinal, own in by_shard.items()]
        try:
            for job in jobs:
                job.result()
        finally:
            for job in jobs:  # nobody writes into a buffer that is given back
                if not job.cancel():
                    job.exception()

    def _read(self, ordinal: int, wanted: list[tuple[int, memoryview]]) -> None:
        shard = self._shards[ordinal]
        if shard.is_read_by_key:
            shard.read_into([offset for offset, _ in wanted], [out for _, out in wanted])
            return
        with shard.opened() as fd:
            direct = _open_past_cache(fd)
            try:
                left = [piece for piece in wanted if direct is None or not self._read_sectors(direct, *piece)]
            finally:
                if direct is not None:
                    os.close(direct)
        if left:  # refused, or short: plain reads do without, or say what is wrong
            shard.read_into([offset for offset, _ in left], [out for _, out in left])

    def _read_sectors(self, fd: int, offset: int, out: memoryview) -> bool:
        """Read the sectors around a piece and copy it out of them; False where that cannot be done."""
        skipped = offset % _SECTOR_BYTES
        num_bytes = -(-(skipped + len(out)) // _SECTOR_BYTES) * _SECTOR_BYTES
        buffer, sectors = self._buffer(num_bytes)
        try:
            count = os.preadv(fd, [buffer[:num_bytes]], offset - skipped)
        except OSError:
            return False
        if count < skipped + len(out):
            return False
        np.frombuffer(out, dtype=np.uint8)[:] = sectors[skipped : skipped + len(out)]
        return True

    def _buffer(self, num_bytes: int) -> tuple[memoryview, NDArray[np.uint8]]:
        """Give this thread's own buffer, which begins with a page."""
        known: tuple[memoryview, NDArray[np.uint8]] | None = getattr(self._own, "buffer", None)
        if known is None or len(known[0]) < num_bytes:
            memory = mmap.mmap(-1, num_bytes)
            known = self._own.buffer = memoryview(memory), np.frombuffer(memory, dtype=np.uint8)
        return known


def _offset(piece: tuple[int, memoryview]) -> int:
    return piece[0]


def _open_past_cache(fd: int) -> int | None:
    """Open a file that is open once more, past the cache; None where its file system has no such thing."""
    try:
        return os.open(f"/proc/self/fd/{fd}", _FLAGS)
    except OSError:
        return None
