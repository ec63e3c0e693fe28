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

    from torch import Tensor, nn

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
        """Return the line for metrics.jsonl."""
        return {
            "step": steps_done,
            "val_loss": self.loss,
            "val_zero_loss": self.zero_loss,
            "val_loss_per_timestep": {str(timestep): loss for timestep, loss in self.loss_per_timestep.items()},
        }


def spaced_timesteps(num: int, num_timesteps: int) -> list[int]:
    """Return `num` timesteps: the midpoints of equal parts of [0, num_timesteps).

    >>> spaced_timesteps(4, 1000)
    [125, 375, 625, 875]
    """
    return [(2 * i + 1) * num_timesteps // (2 * num) for i in range(num)]


@torch.no_grad()
def validate(training: Training, batches: Iterable[Batch], sum_over_ranks: Callable[[Tensor], Tensor]) -> ValidationResult:
    """Evaluate this rank's held-out batches, sum over the ranks, and return the means; one host sync, at the end."""
    timesteps = spaced_timesteps(training.config.val_timesteps, training.prep.schedule.num_timesteps)
    with training.averaged() as model:
        sums = [_batch_sums(training, model, batch, timesteps) for batch in batches]
    # [2 * val_timesteps + 1] float64: losses, losses of predicting zero, and the weight of the samples
    total = sum_over_ranks(torch.stack(sums).sum(0)).tolist()
    weight = total.pop()
    losses, zero_losses = total[: len(timesteps)], total[len(timesteps) :]
    return ValidationResult(
        loss=sum(losses) / weight / len(timesteps),
        zero_loss=sum(zero_losses) / weight / len(timesteps),
        loss_per_timestep={timestep: loss / weight for timestep, loss in zip(timesteps, losses, strict=True)},
    )


def _batch_sums(training: Training, model: nn.Module, batch: Batch, timesteps: list[int]) -> Tensor:
    """Return weighted sums over a batch's samples, [2 * len(timesteps) + 1] float64 on the batch's device."""
    batch, noise = batch.dequantised(), sample_noise(batch)
    weight = batch.weight.double()
    losses, zero_losses = [], []
    for timestep in timesteps:
        noised = training.prep.for_validation(batch, noise, timestep)
        prediction = training.predict(model, noised.noisy, noised.timesteps, batch)
        losses.append((squared_error(prediction, noised.target).double() * weight).sum())
        zero_losses.append((squared_error(torch.zeros_like(noised.target), noised.target).double() * weight).sum())
    return torch.stack([*losses, *zero_losses, weight.sum()])
