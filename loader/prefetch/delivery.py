"""Filled buffers of this process, and their copies on a CUDA device: each waits for its turn and the caller."""

from __future__ import annotations

import os
import threading
from functools import partial
from typing import TYPE_CHECKING

from bucketline.loader.collate.buffer_pool import BufferPool
from bucketline.loader.prefetch.cuda_copy import CudaCopier
from bucketline.loader.prefetch.reorder_buffer import ReorderBuffer

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor

    from bucketline.loader.collate.buffer_pool import FilledBuffer
    from bucketline.loader.stats import Stats

FIRST_DEPTH = 2  # micro-batches filled ahead as long as the caller never has to wait


class Buffers:
    """A loader's buffers, made by its first iteration in each process: a parent's stay the parent's."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._made_for = device, (-1, -1)

    def get(self, buffer_bytes: int, num_buffers: int) -> tuple[BufferPool, CudaCopier | None]:
        """Return buffers of `buffer_bytes`, and what copies them to the device."""
        if self._made_for != (os.getpid(), buffer_bytes):
            on_cuda = self._device.type == "cuda"
            self._pool = BufferPool(buffer_bytes, num_buffers, pinned=on_cuda)
            self._copier = CudaCopier(self._device) if on_cuda else None
            self._made_for = os.getpid(), buffer_bytes  # last: after a failure or Ctrl-C above, the next iteration makes them
        return self._pool, self._copier


class Delivery:
    """An iteration's filled buffers, of which at most `depth` are filled ahead; a copy to the device begins at once."""

    def __init__(self, buffers: Buffers, buffer_bytes: int, num_buffers: int, depth: int) -> None:
        self.pool, self._copier = buffers.get(buffer_bytes, num_buffers)
        self._copying = threading.Lock()
        self._ready: ReorderBuffer[tuple[FilledBuffer, tuple[Tensor, torch.cuda.Event] | None]] = ReorderBuffer(
            depth, FIRST_DEPTH
        )  # with the copy on a CUDA device

    def acquire(self) -> Tensor:
        """Return a buffer to fill, `[buffer_bytes]` uint8."""
        return self.pool.take()

    def put(self, turn: int, filled: FilledBuffer) -> bool:
        """Let a filled buffer, or its copy on the device, wait for its turn and the caller; return False if nobody needs it."""
        if self._copier is not None:
            with self._copying:
                copy = self._copier.copy(filled.buffer, filled.num_bytes, partial(self.pool.give_back, filled.buffer))
            return self._ready.put(turn, (filled, copy))
        is_wanted = self._ready.put(turn, (filled, None))
        if not is_wanted:
            self.pool.give_back(filled.buffer)
        return is_wanted

    def take(self, is_alive: Callable[[], bool]) -> tuple[FilledBuffer, Tensor] | None:
        """Return the next micro-batch and its bytes on the caller's device; see `ThreadStream.next`."""
        ready = self._ready.take(is_alive)
        if ready is None:
            return None
        filled, copy = ready
        if copy is None or self._copier is None:
            return filled, self.pool.lend(filled.buffer)
        return filled, self._copier.receive(*copy)

    def end(self, turn: int, failure: BaseException | None) -> None:
        """End the iteration before this turn."""
        self._ready.end(turn, failure)

    def note_queue(self, stats: Stats) -> None:
        """Set what is ready at this moment, and how often the caller had to wait."""
        self._ready.note_queue(stats)
        stats.buffers = self.pool.num_made

    def close(self) -> None:
        """Return the buffers that the caller has not popped to the pool."""
        for filled, copy in self._ready.close():
            if copy is None:
                self.pool.give_back(filled.buffer)
