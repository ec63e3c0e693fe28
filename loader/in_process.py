"""Delivery by threads of this process: slabs are lent to the caller, or copied to its device."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from bucketline.loader.delivery import Supply
from bucketline.loader.filling import Filling
from bucketline.loader.handover import Handover

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bucketline.loader.delivery import Beginning
    from bucketline.loader.device import CudaCopier
    from bucketline.loader.filler import Filled, Filler
    from bucketline.loader.ring import Ring


@dataclass(frozen=True, slots=True)
class _Ready:
    """A filled micro-batch on its way to the caller; on a CUDA device, its bytes there and the event that ends their copy."""

    filled: Filled
    copy: tuple[Tensor, torch.cuda.Event] | None = None


class _ToCaller:
    """The sink: filled slabs wait for the caller, to be lent out, or their copies are begun."""

    def __init__(self, ring: Ring, copier: CudaCopier | None, depth: int) -> None:
        self._ring, self._copier = ring, copier
        self._copying = threading.Lock()
        self.ready: Handover[_Ready] = Handover(depth)

    def slab(self) -> Tensor:
        return self._ring.take()

    def put(self, turn: int, filled: Filled) -> bool:
        if self._copier is not None:
            with self._copying:
                copy = self._copier.copy(filled.slab, filled.num_bytes, partial(self._ring.give_back, filled.slab))
            return self.ready.put(turn, _Ready(filled, copy))
        is_wanted = self.ready.put(turn, _Ready(filled))
        if not is_wanted:
            self._ring.give_back(filled.slab)
        return is_wanted

    def end(self, turn: int, failure: BaseException | None) -> None:
        self.ready.end(turn, failure)

    def close(self) -> None:
        for left in self.ready.close():
            if left.copy is None:
                self._ring.give_back(left.filled.slab)


class InProcess:
    """An iteration whose batches are filled by threads of this process."""

    def __init__(
        self, filler: Filler, ring: Ring, copier: CudaCopier | None, *, beginning: Beginning, depth: int, threads: int
    ) -> None:
        """Start the threads."""
        self._ring, self._copier = ring, copier
        self._sink = _ToCaller(ring, copier, depth)
        self._filling = Filling(filler, self._sink, beginning, threads)
        self._filling.start()

    def next(self) -> tuple[Filled, Tensor] | None:
        """Give the next micro-batch; see `Delivery.next`."""
        ready = self._sink.ready.take(self._filling.is_alive)
        if ready is None:
            return None
        if ready.copy is None or self._copier is None:
            return ready.filled, self._ring.lend(ready.filled.slab)
        return ready.filled, self._copier.receive(*ready.copy)

    def supply(self) -> Supply:
        return Supply(ready=len(self._sink.ready), depth=self._sink.ready.depth, slabs=self._ring.num_made)

    def close(self) -> None:
        """End the threads."""
        self._filling.close()
