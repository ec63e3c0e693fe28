"""Buffers: memory allocated once, that batches are gathered into and lent to the caller from.

A buffer goes back to the pool when the last tensor over it is gone. That is noticed on the numpy array that lends the buffer's
memory to the tensors: a tensor's own finalizer runs while other tensors still share its storage, this array's does not.
A finalizer may run inside any allocation, so it only puts the buffer on a `SimpleQueue`, and takes no lock.
"""

from __future__ import annotations

import functools
import math
import mmap
import queue
import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

ALIGN_BYTES = 64
HUGE_PAGE_BYTES = 2 << 20
_NUMPY_DTYPES = {  # those that numpy has; others are seen as integers first
    dtype: torch.empty(0, dtype=dtype).numpy().dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.complex64),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A tensor of a batch: its name, and the position of its bytes in the buffer."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int  # a multiple of ALIGN_BYTES
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FilledBuffer:
    """A filled buffer and the description of its content."""

    buffer: Tensor  # [buffer_bytes] uint8
    fields: list[Field]
    num_bytes: int  # of the fields, from the buffer's start
    step: int
    micro_step: int
    epoch: int
    bucket: str


def buffer_offsets(fields: list[tuple[str, torch.dtype, tuple[int, ...]]]) -> tuple[list[Field], int]:
    """Place tensors in a buffer, each aligned; return the fields and the total bytes that they need."""
    placed, at = [], 0
    for name, dtype, shape in fields:
        num_bytes = dtype.itemsize * math.prod(shape)
        placed.append(Field(name=name, dtype=dtype, shape=shape, begin=at, num_bytes=num_bytes))
        at += -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
    return placed, at


def carve(flat: Tensor, fields: Sequence[Field]) -> dict[str, Tensor]:
    """Return the fields of a buffer (or of its copy on a device) as tensors that share its memory.

    In the host's memory numpy makes the views: torch would release Python's lock at each of two dozen calls, and another
    Python thread might keep the lock for 5 ms each time (`bench/cases/hot.py`).
    """
    if flat.device.type == "cpu":
        memory = flat.numpy()
        return {field.name: _seen_by_numpy(memory, field) for field in fields}
    whole = len(flat) // ALIGN_BYTES * ALIGN_BYTES  # a buffer may be longer than its fields need
    if whole != len(flat):
        flat = flat[:whole]
    by_dtype: dict[torch.dtype, Tensor] = {}
    tensors = {}
    for field in fields:
        dtype = field.dtype
        items = by_dtype.get(dtype)
        if items is None:
            items = by_dtype[dtype] = flat.view(dtype)
        tensors[field.name] = items.as_strided(field.shape, _strides(field.shape), field.begin // dtype.itemsize)
    return tensors


def _seen_by_numpy(memory: NDArray[np.uint8], field: Field) -> Tensor:
    dtype = _NUMPY_DTYPES.get(field.dtype)
    if dtype is not None:
        return torch.from_numpy(np.ndarray(field.shape, dtype, memory, field.begin))
    bits = np.ndarray(field.shape, f"i{field.dtype.itemsize}", memory, field.begin)
    return torch.from_numpy(bits).view(field.dtype)


@functools.lru_cache(maxsize=1024)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor.

    >>> _strides((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(math.prod(shape[n + 1 :]) for n in range(len(shape)))


def _in_huge_pages(num_bytes: int) -> NDArray[np.uint8]:
    """Allocate memory, `[num_bytes]`, that the system may back with huge pages: 2 MiB at the first touch, not 4 KiB.

    The first touch of a page costs more than copying a page: half of the time of a first pass (measured once).
    """
    whole = -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    if whole - num_bytes > num_bytes // 4:  # what would be lost; its end comes in small pages
        whole = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    if num_bytes < HUGE_PAGE_BYTES:
        return np.empty(num_bytes, dtype=np.uint8)
    memory = mmap.mmap(-1, whole + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    bytes_ = np.frombuffer(memory, dtype=np.uint8)
    begin = -bytes_.ctypes.data % HUGE_PAGE_BYTES
    return bytes_[begin : begin + num_bytes]


class BufferPool:
    """Buffers of one size. Taking one never waits: if all are lent, another one is allocated."""

    def __init__(self, buffer_bytes: int, num_buffers: int, *, pinned: bool) -> None:
        self.buffer_bytes = buffer_bytes
        self._num_buffers = num_buffers
        self._pinned = pinned
        self._made = 0
        self._free: queue.SimpleQueue[Tensor] = queue.SimpleQueue()

    @property
    def num_made(self) -> int:
        """Buffers that this pool knows: free, being filled, ready or held."""
        return self._made

    def take(self) -> Tensor:
        """Return a free buffer, `[buffer_bytes]` uint8."""
        try:
            while self._free.qsize() > self._num_buffers:  # a caller held many and let them go
                self._free.get_nowait()
                self._made -= 1
            return self._free.get_nowait()
        except queue.Empty:
            self._made += 1
            if self._pinned:
                return torch.empty(self.buffer_bytes, dtype=torch.uint8, pin_memory=True)
            return torch.from_numpy(_in_huge_pages(self.buffer_bytes))

    def give_back(self, buffer: Tensor) -> None:
        """Return a buffer to the pool that was not lent, or whose copy is done."""
        self._free.put(buffer)

    def lend(self, buffer: Tensor) -> Tensor:
        """Return a tensor over the buffer's memory; the buffer returns to the pool when that memory is no longer used."""
        lent = np.frombuffer(buffer.numpy().data, dtype=np.uint8)
        weakref.finalize(lent, self._free.put, buffer).atexit = False
        return torch.from_numpy(lent)
