"""One complete optimizer step, and validation."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from bucketline.errors import UsageError
from bucketline.loader.mixture import parse_stores
from bucketline.loader.plan.order import key_of
from bucketline.train.config import WeightDtype
from bucketline.train.noise import areas_of, divided, mask_of, sample_noise, squared_error
from bucketline.train.optim import learning_rate_at
from bucketline.train.parallel import free_gathered, local, mean_over_ranks, whole, without_sync

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from bucketline.families.family import Family
    from bucketline.loader import Batch, WeightedStore
    from bucketline.train.config import TrainConfig
    from bucketline.train.noise import Noised, Prep
    from bucketline.train.optim import Average
    from bucketline.typed_json import Json


_ROUNDING = 8  # purpose of keys of the seed; `loader/plan/` has 1 to 7


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

    def errors(self, model: nn.Module, noised: Noised, batch: Batch) -> Tensor:
        """Return the error of the model's prediction for each sample, [B] float32: in training as in validation."""
        prediction = self.predict(model, noised.noisy, noised.timesteps, noised.conditions(batch))
        return self.masked_errors(prediction, noised, batch)

    def masked_errors(self, prediction: Tensor, noised: Noised, batch: Batch) -> Tensor:
        """Return the error of a prediction for each sample, [B] float32, before `--mask-loss batch` divides all of a step."""
        asked = self.config.mask_loss
        mask = mask_of(batch, asked)
        errors = squared_error(prediction, noised.target, mask)
        return errors if mask is None or asked.name != "sample" else divided(errors, areas_of(mask))

    def areas(self, batch: Batch) -> Tensor | None:
        """Return what each sample adds to the divisor of a step, [B] float32; None if there is none."""
        asked = self.config.mask_loss
        mask = mask_of(batch, asked) if asked.name == "batch" else None
        return None if mask is None else areas_of(mask)


def store_weights(config: TrainConfig) -> tuple[float, ...]:
    """Return the weights of the stores in the loss, 1 where only others have one; () if none has."""
    weights = [one.weight for one in parse_stores(config.store, "--store")]
    return () if set(weights) == {None} else tuple(1.0 if weight is None else weight for weight in weights)


def mean_weight(config: TrainConfig, stores: Sequence[WeightedStore]) -> float | None:
    """Return the mean of the stores' weights over the rows of a pass; None if they have none."""
    if not (weights := store_weights(config)):
        return None
    rows = [weighted.repeats * sum(bucket.num_rows for bucket in weighted.store.buckets("train")) for weighted in stores]
    mean = sum(weight * count for weight, count in zip(weights, rows, strict=True)) / sum(rows)
    if mean == 0:
        raise UsageError("the weight of every --store that has rows is 0, expected one above 0")
    return mean


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """The measurements of a step; its tensors stay on the device, so that nothing waits for it."""

    bucket: str
    learning_rate: float
    loss: Tensor  # [] float32: the mean over this rank's part of the global batch
    grad_norm: Tensor  # [] float32: of the full gradient, before clipping


def train_step(training: Training, batches: Iterator[Batch], step: int) -> StepOutcome:
    """Run `accumulation` batches of one bucket, then one optimizer step on the mean gradient, if it is finite."""
    config, model = training.config, training.model
    learning_rate = learning_rate_at(step, config)
    for group in training.optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(learning_rate)
        else:
            group["lr"] = learning_rate
    losses: list[Tensor] = []
    areas: list[Tensor] = []
    bucket = ""
    for micro_step in range(config.accumulation):
        batch = next(batches)
        assert batch.micro_step == micro_step, "a step begins with its first micro-batch"
        # Ranks exchange gradients once per step, in its last backward pass.
        with without_sync(model, is_last=micro_step == config.accumulation - 1):
            # All batches of a step have the same size and processes average, so this is the mean over the global batch.
            loss = loss_of(training, batch) / config.accumulation
            loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
        if (own := training.areas(batch)) is not None:
            areas.append(own.mean())
        bucket = batch.bucket
    loss = torch.stack(losses).sum()
    if areas:  # known only now: those of all micro-batches and ranks
        area = mean_over_ranks(torch.stack(areas).mean())
        loss = divided(loss, area)
        scale_gradients(training.trained, divided(torch.ones_like(area), area))
    if config.weights is WeightDtype.BF16:  # torch's own draws of stochastic rounding: all ranks' and a resumed run's the same
        torch.manual_seed(key_of(config.seed, _ROUNDING, step) >> 1)
    learning_rate *= training.optimizer.param_groups[0].get("d", 1.0)  # the rate that Prodigy has found, by which it steps
    grad_norm = update(training.optimizer, training.trained, config.clip_norm)
    training.average.update(step)
    return StepOutcome(bucket=bucket, learning_rate=learning_rate, loss=loss, grad_norm=grad_norm)


def loss_of(training: Training, batch: Batch) -> Tensor:
    """Noise a batch, run the model, and return the mean loss, [] float32; `--mask-loss batch` divides it later.

    Stores' weights count relative to the mean of a pass's rows, not of the batch: in a batch of one, a row would count in full.
    """
    noised = training.prep.for_training(batch)
    errors = training.errors(training.model, noised, batch)
    if noised.weight is not None:
        errors = errors * noised.weight
    return errors.mean() if training.mean_weight is None else (errors * batch.weight).mean() / training.mean_weight


def scale_gradients(trained: Sequence[nn.Parameter], factor: Tensor) -> None:
    """Multiply the gradients by a number, [] float32, which stays on the device."""
    if gradients := [local(one.grad) for one in trained if one.grad is not None]:
        torch._foreach_mul_(gradients, factor)


def update(optimizer: Optimizer, trained: Sequence[nn.Parameter], clip_norm: float | None) -> Tensor:
    """Clip the gradients, update the weights by them, and free them; return their norm before clipping, [] float32.

    A norm that is not finite changes nothing: torch's fused steps look that up on the device; for others the host waits. On a
    GPU a fused step also clips, by `grad_scale`, saves a pass, and may differ from `clip_grads_with_norm_` in the last bit.
    """
    # Of shards, it is reduced over the ranks here, once, whatever uses it.
    norm = whole(torch.nn.utils.get_total_norm([one.grad for one in trained if one.grad is not None]))
    is_fused = takes_found_inf(optimizer)
    if clip_norm is not None and is_fused and is_whole_on_gpu(trained[0]):
        optimizer.grad_scale = ((norm.float() + 1e-6) / clip_norm).clamp(min=1.0)  # type: ignore[attr-defined]
    elif clip_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(trained, clip_norm, norm)
    if is_fused:
        optimizer.found_inf = norm.isfinite().logical_not().float()  # type: ignore[attr-defined]
    if is_fused or bool(norm.isfinite()):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def takes_found_inf(optimizer: Optimizer) -> bool:
    """Return whether a step is skipped on the device where `found_inf` is 1; not SGD's, whose momentum would be unset."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False)) and not isinstance(optimizer, torch.optim.SGD)


def is_whole_on_gpu(tensor: Tensor) -> bool:
    """Return whether a tensor is on a GPU and not one of FSDP's."""
    return tensor.is_cuda and not isinstance(tensor, DTensor)


# ------------------------------------------------------------------------------------------------------------------ validation
# Validation: every held-out sample at fixed timesteps, with fixed noise per sample and the averaged weights.
#
# A sample's noise depends only on the sample, so the curve does not jitter with batches, ranks or steps.


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
    # Of each batch, [2 * val_timesteps + 1] float64: losses, losses of predicting zero, the weight of its samples, of which
    # `--mask-loss batch` counts only the area under their masks.
    sums = []
    with training.averaged() as model:
        for stored in batches:
            batch, noise, weights = stored.dequantised(), sample_noise(stored), stored.weight.double()
            losses, zero_losses = [], []
            for timestep in timesteps:
                noised = training.prep.for_validation(batch, noise, timestep)
                losses.append((training.errors(model, noised, batch).double() * weights).sum())
                zero = torch.zeros_like(noised.target)
                zero_losses.append((training.masked_errors(zero, noised, batch).double() * weights).sum())
            areas = training.areas(batch)
            sums.append(torch.stack([*losses, *zero_losses, (weights if areas is None else weights * areas).sum()]))
    total = sum_over_ranks(torch.stack(sums).sum(0)).tolist()
    *each, weight = total
    weight = weight or 1.0  # all masks are 0, and so are the losses
    return ValidationResult(
        loss=sum(each[: len(timesteps)]) / weight / len(timesteps),
        zero_loss=sum(each[len(timesteps) :]) / weight / len(timesteps),
        loss_per_timestep={timestep: loss / weight for timestep, loss in zip(timesteps, each, strict=False)},
    )
