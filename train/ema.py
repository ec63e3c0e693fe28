"""The exponential moving average of the weights, in a model of its own that validation and pictures run."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch

from bucketline.train.sharding import local

if TYPE_CHECKING:
    from torch import Tensor, nn


def decay_at(step: int, decay: float) -> float:
    """Give the share of the old average kept at optimizer step `step` (from 0).

    It rises with the steps done, so that a short run's average is not its random start.
    Source: the warm-up of TensorFlow's `ExponentialMovingAverage(num_updates)`, min(decay, (1 + n) / (10 + n)).
    """
    return min(decay, (1 + step) / (10 + step))


class AveragedModel:
    """A copy of a model whose parameters follow the original's slowly."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        """Start at the model's present weights."""
        self.model = copy.deepcopy(model).requires_grad_(requires_grad=False).eval()
        self._decay = decay
        self.follow(model)

    def follow(self, model: nn.Module) -> None:
        """Take parameters anew, of the model and of the average, once both have been sharded."""
        # The parameters, not their memory: Accelerate gives them new memory when it prepares the model.
        self._averages: list[Tensor] = list(self.model.parameters())
        self._sources: list[Tensor] = list(model.parameters())

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take the weights after optimizer step `step` into the average; a few kernels for all tensors, no sync."""
        averages, sources = (list(map(local, tensors)) for tensors in (self._averages, self._sources))
        torch._foreach_lerp_(averages, sources, 1.0 - decay_at(step, self._decay))
