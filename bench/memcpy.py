"""The limit of reads from memory: copies of the same size by libc."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_libc = ctypes.CDLL(None)  # its calls run without Python's lock
memcpy = _libc.memcpy
memcpy.restype = ctypes.c_void_p
memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


class Copies:
    """Copies into buffers in turn, as a loader fills them, from a source as large as the store: no cache holds it.

    numpy requests huge pages for it, which a file's map does not have, so the limit is that of memory, not of the page table.
    """

    def __init__(self, buffer_bytes: int, num_buffers: int, source_bytes: int) -> None:
        """Allocate source and buffers, and touch their pages."""
        self._buffer_bytes = buffer_bytes
        self._buffers = [torch.zeros(buffer_bytes, dtype=torch.uint8) for _ in range(num_buffers)]
        num_bytes = max(source_bytes, buffer_bytes)
        words = np.random.default_rng(0).integers(0, 1 << 63, -(-num_bytes // 8), dtype=np.int64)
        self._source = torch.from_numpy(words).view(torch.uint8)
        self._at = 0

    def memcpy(self, batches: int, num_threads: int) -> Callable[[], int]:
        """Prepare `memcpy` of `batches` batches; each thread copies its share of every batch."""
        size, room = self._buffer_bytes, self._source.numel() // self._buffer_bytes

        def work(thread: int) -> None:
            first, end = size * thread // num_threads, size * (thread + 1) // num_threads
            for number in range(self._at, self._at + batches):
                buffer, begin = self._buffers[number % len(self._buffers)], number % room * size
                memcpy(buffer.data_ptr() + first, self._source.data_ptr() + begin + first, end - first)

        def run() -> int:
            in_threads(num_threads, work)
            self._at += batches
            return batches * size

        return run


def in_threads(num_threads: int, work: Callable[[int], None]) -> None:
    """Call `work` with 0 to `num_threads` - 1, each in a separate thread, and raise the first failure."""
    if num_threads == 1:
        work(0)
        return
    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(work, range(num_threads)))
