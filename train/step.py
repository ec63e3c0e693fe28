"""One complete optimizer step."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from bucketline.train.noise import squared_error, weighted
from bucketline.train.optim import learning_rate_at
from bucketline.train.parallel import free_gathered, whole, without_sync
from bucketline.train.rounding import Rounding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from bucketline.families.family import Family
    from bucketline.loader import Batch
    from bucketline.train.config import TrainConfig
    from bucketline.train.ema import Average
    from bucketline.train.noise import Prep


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
    mean_weight: float = 1.0  # of the stores' rows in the loss, by --store-weight
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
        # Ranks exchange gradients once per step, in its last backward pass.
        with without_sync(model, is_last=micro_step == config.accumulation - 1):
            # All batches of a step have the same size and processes average, so this is the mean over the global batch.
            loss = loss_of(training, batch) / config.accumulation
            loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
        bucket = batch.bucket
    # Of shards, it is reduced over the ranks here, once, whatever uses it.
    grad_norm = whole(torch.nn.utils.get_total_norm([p.grad for p in training.trained if p.grad is not None]))
    if config.clip_norm is not None and not clips_in_step(training.optimizer, grad_norm, config.clip_norm):
        torch.nn.utils.clip_grads_with_norm_(training.trained, config.clip_norm, grad_norm)
    update_weights(training.optimizer, grad_norm)
    training.optimizer.zero_grad(set_to_none=True)
    training.average.update(step)
    learning_rate *= training.optimizer.param_groups[0].get("d", 1.0)  # the rate that Prodigy has found
    return StepOutcome(bucket=bucket, learning_rate=learning_rate, loss=torch.stack(losses).sum(), grad_norm=grad_norm)


def loss_of(training: Training, batch: Batch) -> Tensor:
    """Noise a batch, run the model, and return the mean loss, [] float32.

    With --store-weight, errors are weighted relative to the mean weight of a pass's rows, a constant that all ranks and
    micro-steps share: divided by the weights of its own batch, a row in a batch of one would always count in full.
    """
    noised = training.prep.for_training(batch)
    prediction = training.predict(training.model, noised.noisy, noised.timesteps, noised.conditions(batch))
    errors = weighted(squared_error(prediction, noised.target), noised.weight)
    if not training.config.store_weight:
        return errors.mean()
    return weighted(errors, batch.weight).mean() / training.mean_weight


def begin_step(optimizer: Optimizer, step: int, learning_rate: float) -> None:
    """Set the learning rate and the random numbers of optimizer step `step` (from 0)."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(learning_rate)
        else:
            group["lr"] = learning_rate
    if isinstance(rounding := getattr(optimizer, "rounding", None), Rounding):
        rounding.begin(step)


def update_weights(optimizer: Optimizer, norm: Tensor) -> None:
    """Update the weights unless the gradient's norm, [], is not finite, which changes neither weights nor state.

    torch's fused steps look that up on the device. The libraries' other steps cannot, so that the host waits for the norm.
    """
    if takes_found_inf(optimizer):
        optimizer.found_inf = norm.isfinite().logical_not().float()  # type: ignore[attr-defined]
        optimizer.step()
    elif bool(norm.isfinite()):
        optimizer.step()


def takes_found_inf(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's step is skipped on the device where its `found_inf` is 1; torch's scaler asks the same."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def clips_in_step(optimizer: Optimizer, norm: Tensor, clip_norm: float) -> bool:
    """Have a fused step on a GPU clip gradients of a norm, [], as it reads them, which saves a pass; return whether it does.

    It divides by `grad_scale`, the inverse of what `clip_grads_with_norm_` multiplies by: the last bit can differ.
    """
    if not (takes_found_inf(optimizer) and is_whole_on_gpu(optimizer.param_groups[0]["params"][0])):
        return False
    optimizer.grad_scale = ((norm.float() + 1e-6) / clip_norm).clamp(min=1.0)  # type: ignore[attr-defined]
    return True


def is_whole_on_gpu(tensor: Tensor) -> bool:
    """Return whether a tensor is on a GPU and not one of FSDP's."""
    return tensor.is_cuda and not isinstance(tensor, DTensor)
