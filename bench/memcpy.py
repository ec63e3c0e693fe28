"""The limit of reads from memory: copies of the same size, by libc and by torch."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

_libc = ctypes.CDLL(None)  # its calls run without Python's lock
_memcpy = _libc.memcpy
_memcpy.restype = ctypes.c_void_p
_memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


class Copies:
    """Copies from a source as large as the store's rows; one that fits in the processor's cache would not be a fair limit.

    numpy requests huge pages for it, which a file's map does not have, so the limit is that of memory, not of the page table.
    """

    def __init__(self, source_bytes: int, outs: Sequence[Tensor]) -> None:
        """Fill the source at random. `outs`: the buffers that batches are copied into, `[buffer_bytes]` uint8, in turn."""
        self._outs = outs
        num_bytes = max(source_bytes, outs[0].numel())
        words = np.random.default_rng(0).integers(0, 1 << 63, -(-num_bytes // 8), dtype=np.int64)
        self._source = torch.from_numpy(words).view(torch.uint8)

    def _begins(self, lengths: Sequence[int]) -> list[int]:
        """Return the start of each batch: one after the other, wrapping around at the end of the source."""
        begins, at = [], 0
        for length in lengths:
            at = at if at + length <= self._source.numel() else 0
            begins.append(at)
            at += length
        return begins

    def memcpy(self, lengths: Sequence[int], num_threads: int) -> Callable[[], int]:
        """Prepare `memcpy` of batches of these lengths in bytes; each thread copies its share of every batch."""
        shares: list[list[tuple[Tensor, int, int, int]]] = [[] for _ in range(num_threads)]
        for begin, length, out in zip(self._begins(lengths), lengths, cycle(self._outs), strict=False):
            cuts = [length * n // num_threads for n in range(num_threads + 1)]
            for share, (first, end) in zip(shares, pairwise(cuts), strict=True):
                share.append((out, first, begin + first, end - first))

        def work(thread: int) -> None:
            source = self._source.data_ptr()  # `self` keeps it alive
            for out, to, where, num_bytes in shares[thread]:
                _memcpy(out.data_ptr() + to, source + where, num_bytes)

        def run() -> int:
            in_threads(num_threads, work)
            return sum(lengths)

        return run

    def torch_copy(self, lengths: Sequence[int], num_threads: int) -> Callable[[], int]:
        """Prepare `Tensor.copy_` of batches of these lengths in bytes, with `num_threads` torch threads."""
        begins = self._begins(lengths)
        pairs = [
            (out[:n], self._source[begin : begin + n])
            for begin, n, out in zip(begins, lengths, cycle(self._outs), strict=False)
        ]

        def run() -> int:
            torch.set_num_threads(num_threads)
            for out, source in pairs:
                out.copy_(source)
            return sum(lengths)

        return run


class RingCopies:
    """Copies into buffers in turn, as a loader fills them, from a source as large as the store."""

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
                _memcpy(buffer.data_ptr() + first, self._source.data_ptr() + begin + first, end - first)

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
