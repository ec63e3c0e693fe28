"""The exponential moving average (EMA) of the trained weights."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from bucketline.train.parallel import local
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
    ) -> None:
        """Start from the model's current weights; update at every `every`-th step. `decay`: None: keep no averages."""
        self.is_kept = decay is not None
        self._decay, self._every, self._place = decay or 0.0, every, place
        # Keep the parameters, not their storage: Accelerate replaces the storage when it prepares the model.
        self._sources: list[Tensor] = [tensor for tensor in model.parameters() if tensor.requires_grad and self.is_kept]
        self._averages: list[Tensor] = []
        for weight in (local(tensor.detach()) for tensor in self._sources):
            on_host = torch.empty_like(weight, device="cpu", pin_memory=weight.is_cuda) if place is EmaPlace.CPU else None
            self._averages.append(weight.clone() if on_host is None else on_host.copy_(weight))
        self._by_id = {id(source): average for source, average in zip(self._sources, self._averages, strict=True)}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the averages with the weights after optimizer step `step`; on the device a few kernels, no sync.

        One in host memory passes through the device, so that it has the same bits as one there. One in bf16 is rounded by
        torch's own random numbers, so that updates smaller than its last bit are right on average instead of lost.
        """
        if not self.is_kept or (step + 1) % self._every:
            return
        share = 1.0 - math.prod(decay_at(passed, self._decay) for passed in range(step + 1 - self._every, step + 1))
        weights = [local(tensor.detach()) for tensor in self._sources]
        if self._place is EmaPlace.DEVICE and all(average.dtype is torch.float32 for average in self._averages):
            torch._foreach_lerp_(self._averages, weights, share)
            return
        for average, weight in zip(self._averages, weights, strict=True):
            moved = average.to(weight.device).float().lerp_(weight.float(), share)  # in place on the device and in 32 bits
            average.copy_(moved if average.dtype is torch.float32 else rounded(moved))

    def of(self, tensor: Tensor) -> Tensor:
        """Return the average of a trained parameter, sharded as that is; any other tensor unchanged."""
        average = self._by_id.get(id(tensor), tensor)
        if average is tensor or not isinstance(tensor, DTensor):
            return average
        own, mesh, placements = average.to(tensor.device), tensor.device_mesh, tensor.placements
        return DTensor.from_local(own, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Exchange the weights with their averages, in place and to the bit, while the body runs."""
        # Memory may end in the body, and half of the weights must not stay exchanged: the way back allocates nothing.
        weights = [local(tensor.detach()) for tensor in self._sources]
        largest = max((weight.nbytes for weight in weights), default=0)
        memory = torch.empty(largest, dtype=torch.uint8, device=weights[0].device if weights else None)
        self._exchange(weights, memory)
        try:
            yield
        finally:
            self._exchange(weights, memory)

    def _exchange(self, weights: Sequence[Tensor], memory: Tensor) -> None:
        for weight, average in zip(weights, self._averages, strict=True):
            kept = memory[: weight.nbytes].view(weight.dtype).as_strided(weight.shape, weight.stride())
            kept.copy_(weight)
            weight.copy_(average)
            average.copy_(kept)


def rounded(values: Tensor) -> Tensor:
    """Round float32 values up or down at random to values that a bf16 can hold; those that it holds stay as they are."""
    bits = values.view(torch.int32)
    # Adding to the bits of a float moves it away from 0, by one bf16 if the low 16 bits carry; then they are cut off.
    return torch.randint_like(bits, 1 << 16).add_(bits).bitwise_and_(-1 << 16).view(torch.float32)
