"""The optimizer, its learning rate, and the average of the weights (EMA)."""

from __future__ import annotations

import ast
import contextlib
import importlib
import math
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from bucketline.errors import UsageError
from bucketline.extensions import imported
from bucketline.train.config import ADAMS_BETAS, EmaPlace, Precision, WeightDtype
from bucketline.train.parallel import local

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from bucketline.train.config import TrainConfig


class Named(NamedTuple):
    """An optimizer that has a name, and what it can do."""

    library: str
    learning_rate: float = 1e-4  # of a run that is given none
    takes_betas: bool = False
    steps_on_shards: bool = False  # of FSDP
    rounds_stochastically: bool = False  # weights in bf16
    state_bytes: int = 0  # of its state for a trained weight, at least


NAMED = {
    "adamw": Named("torch", takes_betas=True, steps_on_shards=True, state_bytes=8),
    "adamw-8bit": Named("torchao.optim", takes_betas=True, rounds_stochastically=True, state_bytes=2),
    "muon": Named("torch", steps_on_shards=True, state_bytes=4),
    "prodigy": Named("prodigyopt", learning_rate=1.0, state_bytes=8),  # a factor of the rate that it finds
}
_CLASS = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_CONSTANTS = {"true": True, "false": False, "none": None}
_OTHER = Named("")  # any class


def traits_of(config: TrainConfig) -> Named:
    return NAMED.get(config.optimizer or "adamw", _OTHER)


def arguments_of(config: TrainConfig) -> dict[str, Any]:
    """Return the arguments of --optimizer-arg; a value is a Python literal, else a text."""
    found: dict[str, Any] = {}
    for given in config.optimizer_arg:
        name, _, value = given.partition("=")
        if not name.isidentifier() or not value:
            raise UsageError(f"--optimizer-arg is {given!r:.80}, expected NAME=VALUE, such as eps=1e-6")
        if option := {"lr": "--learning-rate", "weight_decay": "--weight-decay"}.get(name):
            raise UsageError(f"--optimizer-arg is {given!r:.80}; use {option} instead")
        try:
            found[name] = _CONSTANTS[value.lower()] if value.lower() in _CONSTANTS else ast.literal_eval(value)
        except (SyntaxError, ValueError):
            found[name] = value
    return found


def refuse_combinations(config: TrainConfig, world_size: int) -> None:
    """Check that the chosen optimizer and the dtype of the weights suit each other and the run."""
    name, traits = config.optimizer or "adamw", traits_of(config)
    own = f"--optimizer is {name}"
    arguments_of(config)
    if name not in NAMED and not _CLASS.fullmatch(name):
        raise UsageError(f"{own!s:.80}, expected {', '.join(NAMED)}, or any other as module:Class, as torch.optim:NAdam")
    if config.optimizer_arg and name in NAMED:
        raise UsageError(f"{own}, and --optimizer-arg is {' '.join(config.optimizer_arg)}: leave it out, or name a class")

    def those(trait: str) -> str:
        return " or ".join(one for one, having in NAMED.items() if getattr(having, trait))

    if config.betas != ADAMS_BETAS and not traits.takes_betas:
        raise UsageError(f"{own}, which has its own betas, and --betas is {config.betas}: choose {those('takes_betas')}")
    if config.is_sharded(world_size) and not traits.steps_on_shards:
        raise UsageError(
            f"{own}, which may not work on sharded weights: give --sharding ddp, or choose {those('steps_on_shards')}"
        )
    if config.weights is not WeightDtype.BF16:
        return
    if not traits.rounds_stochastically:
        raise UsageError(f"{own}, which cannot round weights stochastically: leave out --weights bf16, or choose adamw-8bit")
    if config.lora_rank is not None:
        raise UsageError(
            f"--weights is bf16 with --lora-rank {config.lora_rank}; adapters are small and stay 32-bit: leave out --weights"
        )
    if config.precision not in (Precision.AUTO, Precision.BF16):  # auto: not yet resolved
        of_auto = " (also by auto, without a GPU that has bf16)" if config.precision is Precision.FP32 else ""
        raise UsageError(f"--weights is bf16, and --precision is {config.precision}{of_auto}: give --precision bf16 as well")


def find_optimizer(config: TrainConfig) -> Any:  # noqa: ANN401 - any class of an optimizer
    """Return the class of an optimizer given as module:Class; of a named one None, once its library is imported."""
    if (name := config.optimizer or "adamw") in NAMED:
        importlib.import_module(NAMED[name].library)
        return None
    from torch.optim import Optimizer

    try:
        kind = imported(name)
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"--optimizer {name} cannot be imported: {error!s:.200}. Install its package, or put its module on PYTHONPATH"
        ) from error
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise UsageError(f"--optimizer {name} is not a torch.optim.Optimizer; choose another one")
    if hasattr(kind, "eval"):
        raise UsageError(f"--optimizer {name} has other weights for evaluation than for training; choose another one")
    return kind


def make_optimizer(config: TrainConfig, model: nn.Module, *, compiled: bool) -> Optimizer:
    """Return the chosen optimizer of a model's trained weights, which are on their devices."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [{"params": trained, "weight_decay": config.weight_decay}]
    if (kind := find_optimizer(config)) is None:
        from bucketline.train.optimizers import make_named

        return make_named(config.optimizer or "adamw", model, groups, config, compiled=compiled)
    try:
        optimizer: Optimizer = kind(groups, lr=config.learning_rate, **arguments_of(config))
    except (TypeError, ValueError) as error:
        given = " ".join(["lr", *config.optimizer_arg])
        raise UsageError(
            f"--optimizer {config.optimizer} does not take {given}: {error!s:.300}. Fix --optimizer-arg"
        ) from error
    return optimizer


def learning_rate_at(step: int, config: TrainConfig) -> float:
    """Return the learning rate of optimizer step `step` (from 0): a linear warm-up, then the schedule.

    The horizon is the schedule's end, not the run's length, so that a longer run continues a shorter one. The rate is at its
    floor from that step on, so that every step before that changes the weights, as does the first of the warm-up.
    """
    assert config.learning_rate is not None  # resolved: each optimizer has its own
    asked, warm = config.lr_schedule, min(1.0, (step + 1) / max(1, config.warmup_steps))
    if warm < 1.0 or asked.name == "constant":
        return config.learning_rate * warm
    horizon = asked.end or config.num_steps
    falls = min(asked.steps or -(-horizon // 5), horizon)  # the steps in which wsd does
    begin = horizon - falls if asked.name == "wsd" else config.warmup_steps
    passed = 1.0 if step >= horizon else max(0.0, (step - begin) / max(1, horizon - begin))
    share = (1 + math.cos(math.pi * passed)) / 2 if asked.name == "cosine" else 1 - passed
    return config.learning_rate * (asked.floor + (1 - asked.floor) * share)


# ------------------------------------------------------------------------------------------------------------------------- ema
# The exponential moving average (EMA) of the trained weights.


def decay_at(step: int, decay: float) -> float:
    """Return the EMA decay at a step: TensorFlow's by `num_updates`, so that a short run's average leaves its random start."""
    return min(decay, (1 + step) / (10 + step))


class Average:
    """Moving averages of a model's trained weights, or of its shards: next to them, in host memory, or none."""

    def __init__(self, model: nn.Module, decay: float | None, *, place: EmaPlace = EmaPlace.DEVICE, every: int = 1) -> None:
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
