"""The exponential moving average (EMA) of the weights, in a separate model used for validation and images."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch

from bucketline.train.parallel import local

if TYPE_CHECKING:
    from torch import Tensor, nn


def decay_at(step: int, decay: float) -> float:
    """Return the EMA decay at optimizer step `step` (from 0).

    It rises with the steps done, so that a short run's average does not stay at its random start.
    Source: the warm-up of TensorFlow's `ExponentialMovingAverage(num_updates)`, min(decay, (1 + n) / (10 + n)).
    """
    return min(decay, (1 + step) / (10 + step))


class AveragedModel:
    """A copy of a model whose trained parameters are moving averages; frozen parameters are shared with the original."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        """Start from the model's current weights."""
        frozen = {id(tensor): tensor for tensor in model.parameters() if not tensor.requires_grad}
        self.model = copy.deepcopy(model, memo=dict(frozen)).requires_grad_(requires_grad=False).eval()
        self._decay = decay
        self.follow(model)

    def follow(self, model: nn.Module) -> None:
        """Look up the trained parameters of the model and of the average again, after both have been sharded."""
        # Keep the parameters, not their storage: Accelerate replaces the storage when it prepares the model.
        trained = {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
        self._sources: list[Tensor] = list(trained.values())
        self._averages: list[Tensor] = [self.model.get_parameter(name) for name in trained]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the average with the weights after optimizer step `step`; a few kernels for all tensors, no sync."""
        averages, sources = (list(map(local, tensors)) for tensors in (self._averages, self._sources))
        torch._foreach_lerp_(averages, sources, 1.0 - decay_at(step, self._decay))
