"""Validation: every held-out sample at fixed timesteps, with fixed noise per sample and the averaged weights.

A sample's noise depends only on the sample, so the curve does not jitter with batches, ranks or steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from bucketline.train.noise import sample_noise, squared_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from bucketline.loader import Batch
    from bucketline.train.step import Training
    from bucketline.typed_json import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationResult:
    """Means over the held-out samples."""

    loss: float
    zero_loss: float  # the loss of predicting zero, computed in the same way
    loss_per_timestep: dict[int, float]

    def line(self, steps_done: int) -> dict[str, Json]:
        return {
            "step": steps_done,
            "val_loss": self.loss,
            "val_zero_loss": self.zero_loss,
            "val_loss_per_timestep": {str(timestep): loss for timestep, loss in self.loss_per_timestep.items()},
        }


@torch.no_grad()
def validate(training: Training, batches: Iterable[Batch], sum_over_ranks: Callable[[Tensor], Tensor]) -> ValidationResult:
    """Evaluate this rank's held-out batches, sum over the ranks, and return the means; one host sync, at the end."""
    num, num_timesteps = training.config.val_timesteps, training.prep.schedule.num_timesteps
    timesteps = [(2 * i + 1) * num_timesteps // (2 * num) for i in range(num)]  # the midpoints of equal parts
    sums = []  # of each batch, [2 * val_timesteps + 1] float64: losses, losses of predicting zero, the weight of its samples
    with training.averaged() as model:
        for stored in batches:
            batch, noise, weights = stored.dequantised(), sample_noise(stored), stored.weight.double()
            losses, zero_losses = [], []
            for timestep in timesteps:
                noised = training.prep.for_validation(batch, noise, timestep)
                losses.append((training.errors(model, noised, batch).double() * weights).sum())
                zero_losses.append((squared_error(torch.zeros_like(noised.target), noised.target).double() * weights).sum())
            sums.append(torch.stack([*losses, *zero_losses, weights.sum()]))
    total = sum_over_ranks(torch.stack(sums).sum(0)).tolist()
    *each, weight = total
    return ValidationResult(
        loss=sum(each[: len(timesteps)]) / weight / len(timesteps),
        zero_loss=sum(each[len(timesteps) :]) / weight / len(timesteps),
        loss_per_timestep={timestep: loss / weight for timestep, loss in zip(timesteps, each, strict=False)},
    )
