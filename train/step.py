"""One complete optimizer step."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bucketline.loader.plan.permutation import key_of
from bucketline.train.noise import squared_error, weighted
from bucketline.train.optim import learning_rate_at
from bucketline.train.parallel import free_gathered, without_sync
from bucketline.train.update import begin_step, update

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from bucketline.families.family import Family
    from bucketline.loader import Batch
    from bucketline.train.config import TrainConfig
    from bucketline.train.ema import Average
    from bucketline.train.noise import Prep

_DROPOUT = 4  # purpose of a seed; the plan uses 1 and 2, the rows' keys 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The model in training: the inputs of a step, which changes only weights, optimizer state and average."""

    config: TrainConfig
    family: Family
    model: nn.Module  # wrapped in DistributedDataParallel or FSDP2 if there are several processes
    optimizer: Optimizer
    average: Average
    prep: Prep
    autocast: torch.autocast
    mean_weight: float | None = None  # of the stores' rows in the loss; None: each counts alike
    trained: tuple[nn.Parameter, ...] = field(init=False)  # of the model, which takes milliseconds to look through

    def __post_init__(self) -> None:
        object.__setattr__(self, "trained", tuple(one for one in self.model.parameters() if one.requires_grad))

    @property
    def bare_model(self) -> nn.Module:
        """The model without DistributedDataParallel; FSDP2 shards it in place."""
        return self.model.module if isinstance(self.model, DistributedDataParallel) else self.model

    @contextlib.contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """Return the model for evaluation, with the averaged weights (the last ones without an average) while the body runs."""
        with self.average.applied(), self.evaluating() as model:
            yield model

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """Return the model for evaluation, with its weights as they are, while the body runs."""
        try:
            yield self.bare_model.eval()
        finally:
            free_gathered(self.bare_model.train())

    def predict(self, model: nn.Module, noisy: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        """Return the model's prediction, [B, C, h, w], in the precision of training."""
        with self.autocast:
            return self.family.predict(model, noisy, timesteps, batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """The measurements of a step; its tensors stay on the device, so that nothing waits for it."""

    bucket: str
    learning_rate: float
    loss: Tensor  # [] float32: the mean over this rank's part of the global batch
    grad_norm: Tensor  # [] float32: of the full gradient, before clipping


def train_step(training: Training, batches: Iterator[Batch], step: int) -> StepOutcome:
    """Run `accumulation` batches of one bucket, then one optimizer step on the mean gradient of the global batch.

    A non-finite gradient changes neither the weights nor the optimizer's state. Every rank has the same norm, so all of them
    skip the step.
    """
    config, model = training.config, training.model
    learning_rate = learning_rate_at(step, config)
    begin_step(training.optimizer, step, learning_rate)
    losses: list[Tensor] = []
    bucket = ""
    for micro_step in range(config.accumulation):
        batch = next(batches)
        assert (batch.step, batch.micro_step) == (step, micro_step), "the loader and the trainer count steps alike"
        if config.lora_dropout:  # the one draw of torch's own: from here, so that a resumed run draws the same
            rank = dist.get_rank() if dist.is_initialized() else 0
            torch.manual_seed(key_of(config.seed, _DROPOUT, step, micro_step, rank) >> 1)
        # Ranks exchange gradients once per step, in its last backward pass.
        with without_sync(model, is_last=micro_step == config.accumulation - 1):
            # All batches of a step have the same size and processes average, so this is the mean over the global batch.
            loss = loss_of(training, batch) / config.accumulation
            loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
        bucket = batch.bucket
    grad_norm = update(training.optimizer, training.trained, config.clip_norm)
    training.average.update(step)
    learning_rate *= training.optimizer.param_groups[0].get("d", 1.0)  # the rate that Prodigy has found
    return StepOutcome(bucket=bucket, learning_rate=learning_rate, loss=torch.stack(losses).sum(), grad_norm=grad_norm)


def loss_of(training: Training, batch: Batch) -> Tensor:
    """Noise a batch, run the model, and return the mean loss, [] float32.

    If stores have weights, errors are weighted relative to the mean weight of a pass's rows, a constant that all ranks and
    micro-steps share: divided by the weights of its own batch, a row in a batch of one would always count in full.
    """
    noised = training.prep.for_training(batch)
    prediction = training.predict(training.model, noised.noisy, noised.timesteps, noised.conditions(batch))
    errors = weighted(squared_error(prediction, noised.target), noised.weight)
    if training.mean_weight is None:
        return errors.mean()
    return weighted(errors, batch.weight).mean() / training.mean_weight
