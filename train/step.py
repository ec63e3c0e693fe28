"""One optimizer step, whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from bucketline.train.objectives import squared_error, weighted
from bucketline.train.sharding import without_sync

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from bucketline.loader import Batch
    from bucketline.train.config import TrainConfig
    from bucketline.train.ema import AveragedModel
    from bucketline.train.families import Family
    from bucketline.train.prep import Prep


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What a step works with; the step changes the weights, the optimizer's state and the average, nothing else."""

    config: TrainConfig
    family: Family
    model: nn.Module  # as the processes share it: DistributedDataParallel or FSDP2 where there are several
    optimizer: Optimizer
    average: AveragedModel
    prep: Prep
    autocast: torch.autocast


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What a step measured; the tensors are still on the device, so that nothing waits for it."""

    bucket: str
    learning_rate: float
    loss: Tensor  # [] float32: the mean over this rank's part of the global batch
    grad_norm: Tensor  # [] float32: of the whole gradient, before clipping


def learning_rate_at(step: int, config: TrainConfig) -> float:
    """Give the learning rate of optimizer step `step` (from 0): a linear warm-up, then constant."""
    return config.learning_rate * min(1.0, (step + 1) / max(1, config.warmup_steps))


def train_step(training: Training, batches: Iterator[Batch], step: int) -> StepOutcome:
    """Take `accum` batches of one bucket, and step once on the mean gradient over the global batch."""
    config, model = training.config, training.model
    losses: list[Tensor] = []
    bucket = ""
    for micro_step in range(config.accum):
        batch = next(batches)
        assert (batch.step, batch.micro_step) == (step, micro_step), "the loader and the trainer count steps alike"
        # Ranks exchange gradients once a step, at its last backward pass.
        with without_sync(model, is_last=micro_step == config.accum - 1):
            # Every batch has the same size, and processes average: so this is the mean over the global batch.
            loss = loss_of(training, batch) / config.accum
            loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
        bucket = batch.bucket
    parameters = list(model.parameters())
    if config.clip_norm is None:
        grad_norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    else:
        grad_norm = torch.nn.utils.clip_grad_norm_(parameters, config.clip_norm)
    learning_rate = learning_rate_at(step, config)
    for group in training.optimizer.param_groups:
        group["lr"] = learning_rate
    training.optimizer.step()
    training.optimizer.zero_grad(set_to_none=True)
    training.average.update(step)
    return StepOutcome(bucket=bucket, learning_rate=learning_rate, loss=torch.stack(losses).sum(), grad_norm=grad_norm)


def loss_of(training: Training, batch: Batch) -> Tensor:
    """Noise a batch, let the model predict, and give the mean loss, [] float32."""
    noised = training.prep.for_training(batch)
    with training.autocast:
        prediction = training.family.predict(training.model, noised.noisy, noised.timesteps, batch)
    return weighted(squared_error(prediction, noised.target), noised.weight).mean()
