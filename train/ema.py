"""The exponential moving average (EMA) of the trained weights, for validation, images and checkpoints."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING

import torch

from bucketline.train.host_copy import CHUNK_BYTES, copy_through, in_memory_order
from bucketline.train.parallel import local, sharded_like
from bucketline.train.rounding import Rounding
from bucketline.train.values import EmaPlace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor, nn


def decay_at(step: int, decay: float) -> float:
    """Return the EMA decay at optimizer step `step` (from 0).

    It rises with the steps done, so that a short run's average does not stay at its random start.
    Source: the warm-up of TensorFlow's `ExponentialMovingAverage(num_updates)`, min(decay, (1 + n) / (10 + n)).
    """
    return min(decay, (1 + step) / (10 + step))


class Average:
    """Moving averages of a model's trained weights, or of its shards: next to them, in host memory, or none."""

    def __init__(
        self,
        model: nn.Module,
        decay: float | None,
        *,
        place: EmaPlace = EmaPlace.DEVICE,
        every: int = 1,
        seed: int = 0,
    ) -> None:
        """Start from the model's current weights; update at every `every`-th step.

        `decay`: None: keep no averages; `seed`: of the rounding of bf16 weights.
        """
        self.is_kept = decay is not None
        self._decay, self._every, self._place = decay or 0.0, every, place
        self._rounding = Rounding(seed, purpose=1)
        # Keep the parameters, not their storage: Accelerate replaces the storage when it prepares the model.
        self._sources: list[Tensor] = [tensor for tensor in model.parameters() if tensor.requires_grad and self.is_kept]
        self._averages: list[Tensor] = [self._copied(local(tensor.detach())) for tensor in self._sources]
        self._pinned: list[Tensor] = []
        self._by_id = {id(source): average for source, average in zip(self._sources, self._averages, strict=True)}

    def _copied(self, weight: Tensor) -> Tensor:
        if self._place is EmaPlace.DEVICE:
            return weight.clone()
        return torch.empty_like(weight, device="cpu", pin_memory=weight.is_cuda).copy_(weight)

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the averages with the weights after optimizer step `step`: on the device a few kernels, without a sync."""
        if not self.is_kept or (step + 1) % self._every:
            return
        share = 1.0 - math.prod(decay_at(passed, self._decay) for passed in range(step + 1 - self._every, step + 1))
        sources = [local(tensor) for tensor in self._sources]
        is_bf16 = any(average.dtype is torch.bfloat16 for average in self._averages)
        if self._place is EmaPlace.DEVICE and not is_bf16:
            torch._foreach_lerp_(self._averages, sources, share)
            return
        self._rounding.begin(step)

        def move(average: Tensor, source: Tensor) -> None:
            moved = average.float().lerp_(source.float(), share)  # in place if it has 32 bits
            if moved is not average:
                self._rounding.round_(average, moved)

        if any(source.is_cuda for source in sources) and self._place is EmaPlace.CPU:
            copy_through(self._chunks(), self._pairs(), lambda _, average, chunk: move(average, chunk))
            return
        for average, source in zip(self._averages, sources, strict=True):
            move(average, source)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each weight and its average as values in the order of memory, which is the same for both."""
        for source, average in zip(self._sources, self._averages, strict=True):
            weight = local(source.detach())
            assert weight.stride() == average.stride(), "an average has its weight's layout"
            yield in_memory_order(weight), in_memory_order(average)

    def _chunks(self) -> list[Tensor]:
        """Return memory that weights pass through: next to an average on the device, else two pinned parts on the host."""
        if not self._averages or not self._averages[0].is_pinned():
            size = max((average.nbytes for average in self._averages), default=0)
            return [torch.empty(size, dtype=torch.uint8, device=average.device) for average in self._averages[:1]]
        if not self._pinned:
            self._pinned = [torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        return self._pinned

    def of(self, tensor: Tensor) -> Tensor:
        """Return the average of a trained parameter, sharded as that is; any other tensor unchanged."""
        average = self._by_id.get(id(tensor))
        return tensor if average is None else sharded_like(average, tensor)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Exchange the weights with their averages, in place and to the bit, while the body runs."""
        # Memory may end in the body, and half of the weights must not stay exchanged: the way back allocates nothing.
        chunks = self._chunks()
        self._exchange(chunks)
        try:
            yield
        finally:
            self._exchange(chunks)

    @torch.no_grad()
    def _exchange(self, chunks: Sequence[Tensor]) -> None:
        def turn(weight: Tensor, average: Tensor, chunk: Tensor) -> None:
            weight.copy_(average)
            average.copy_(chunk)

        copy_through(chunks, self._pairs(), turn)
