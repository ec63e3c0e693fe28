"""Slabs: memory made once, that batches are gathered into and handed out from.

A slab goes back to the ring when the last tensor over it is gone. That is noticed on the numpy array that lends the slab's
memory to the tensors: a tensor's own finalizer runs while other tensors still share its storage, this array's does not.
A finalizer may run inside any allocation, so it only puts the slab on a `SimpleQueue`, and takes no lock.
"""

from __future__ import annotations

import functools
import math
import queue
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

ALIGN_BYTES = 64
NUMPY_DTYPES = {
    torch.float64: np.dtype("f8"),
    torch.float32: np.dtype("f4"),
    torch.float16: np.dtype("f2"),
    torch.int64: np.dtype("i8"),
    torch.int32: np.dtype("i4"),
    torch.int16: np.dtype("i2"),
    torch.int8: np.dtype("i1"),
    torch.uint8: np.dtype("u1"),
    torch.bool: np.dtype("?"),
}  # those that numpy has; others are seen as integers first


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A tensor of a batch: its name, and where its bytes lie in the slab."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int  # a multiple of ALIGN_BYTES
    num_bytes: int


def lay_out(fields: list[tuple[str, torch.dtype, tuple[int, ...]]]) -> tuple[list[Field], int]:
    """Place tensors in a slab, each aligned; give the fields and the bytes that they need together."""
    placed, at = [], 0
    for name, dtype, shape in fields:
        num_bytes = dtype.itemsize * math.prod(shape)
        placed.append(Field(name=name, dtype=dtype, shape=shape, begin=at, num_bytes=num_bytes))
        at += -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
    return placed, at


def carve(flat: Tensor, fields: Sequence[Field]) -> dict[str, Tensor]:
    """Give the fields of a slab (or of its copy on a device) as tensors that share its memory.

    In the host's memory numpy makes the views: torch would let Python's lock go at each of two dozen calls, and a thread of
    Python beside it might keep the lock for 5 ms each time (`bench/busy_trainer.py`).
    """
    if flat.device.type == "cpu":
        memory = flat.numpy()
        return {field.name: _seen_by_numpy(memory, field) for field in fields}
    whole = len(flat) // ALIGN_BYTES * ALIGN_BYTES  # a slab may be longer than its fields need
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
    dtype = NUMPY_DTYPES.get(field.dtype)
    if dtype is not None:
        return torch.from_numpy(np.ndarray(field.shape, dtype, memory, field.begin))  # type: ignore[arg-type]
    bits = np.ndarray(field.shape, f"i{field.dtype.itemsize}", memory, field.begin)
    return torch.from_numpy(bits).view(field.dtype)


@functools.lru_cache(maxsize=1024)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Give the strides of a contiguous tensor.

    >>> _strides((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(math.prod(shape[n + 1 :]) for n in range(len(shape)))


class Ring:
    """Slabs of one size. Taking never waits: where all are lent out, another one is made."""

    def __init__(self, slab_bytes: int, num_slabs: int, *, pinned: bool) -> None:
        self.slab_bytes = slab_bytes
        self._num_slabs = num_slabs
        self._pinned = pinned
        self._made = 0
        self._free: queue.SimpleQueue[Tensor] = queue.SimpleQueue()

    @property
    def num_made(self) -> int:
        """Slabs that this ring knows: free, being filled, ready or held."""
        return self._made

    def take(self) -> Tensor:
        """Give a slab that nobody uses, `[slab_bytes]` uint8."""
        try:
            while self._free.qsize() > self._num_slabs:  # a caller held many and let them go
                self._free.get_nowait()
                self._made -= 1
            return self._free.get_nowait()
        except queue.Empty:
            self._made += 1
            return torch.empty(self.slab_bytes, dtype=torch.uint8, pin_memory=self._pinned)

    def give_back(self, slab: Tensor) -> None:
        """Take back a slab that was not lent, or whose copy is done."""
        self._free.put(slab)

    def lend(self, slab: Tensor) -> Tensor:
        """Give a tensor over the slab's memory; the slab comes back by itself when that memory is no longer used."""
        lent = np.frombuffer(slab.numpy().data, dtype=np.uint8)
        weakref.finalize(lent, self._free.put, slab).atexit = False
        return torch.from_numpy(lent)
