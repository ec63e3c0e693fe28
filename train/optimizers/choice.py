"""Make the optimizer that a run has chosen, after refusing what it cannot be combined with."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from bucketline.errors import UsageError
from bucketline.train.config import Ema, LrSchedule, OptimizerName, Precision, Sharding, WeightDtype
from bucketline.train.optimizers.learning_rate import decay_groups

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from bucketline.train.config import TrainConfig
    from bucketline.train.ema import Average


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerKind:
    """The properties of an optimizer on which a run depends."""

    module: str  # in this folder; its function `make` takes the model, its groups of weights and the options
    make: str = "make"
    learning_rate: float = 1e-4  # unless --learning-rate is given
    state: tuple[str, ...] = ()  # entries of its groups that a checkpoint restores, besides each weight's own state
    takes_bf16: bool = False  # weights, which it rounds stochastically
    shards: bool = False  # steps on the shards of FSDP
    is_per_weight: bool = True  # a weight's update depends on its own gradients only, so that the backward pass can do it
    averages: bool = False  # keeps an average of its own, in place of a schedule and of the EMA


KINDS = {
    OptimizerName.ADAMW: OptimizerKind(module="adamw", takes_bf16=True, shards=True),
    OptimizerName.ADAMW_BF16: OptimizerKind(module="adamw", make="make_bf16", takes_bf16=True, shards=True),
    OptimizerName.ADAMW_8BIT: OptimizerKind(module="adamw_8bit", takes_bf16=True),
    OptimizerName.ADAFACTOR: OptimizerKind(module="adafactor", learning_rate=1e-2),
    OptimizerName.MUON: OptimizerKind(module="muon", shards=True),
    OptimizerName.PRODIGY: OptimizerKind(
        module="prodigy", learning_rate=1.0, state=("d", "d_max", "d_numerator", "k"), is_per_weight=False
    ),
    OptimizerName.SCHEDULE_FREE: OptimizerKind(
        module="schedule_free", state=("k", "weight_sum", "lr_max"), shards=True, is_per_weight=False, averages=True
    ),
}


def expect_possible(config: TrainConfig, world_size: int) -> None:
    """Check that the chosen optimizer suits the run, and that its library is installed.

    Raises:
        UsageError: as `refuse_combinations`.
        ImportError: if its library is missing.
    """
    refuse_combinations(config, world_size)
    import_module(_module(KINDS[config.optimizer]))  # a missing library is told before the model is loaded


def refuse_combinations(config: TrainConfig, world_size: int) -> None:
    """Check that the chosen optimizer, the dtype of the weights and the step in the backward pass suit each other and the run.

    Raises:
        UsageError: if two options exclude each other; the message names both and what to do.
    """
    name, kind = config.optimizer, KINDS[config.optimizer]
    is_bf16, in_backward = config.weights is WeightDtype.BF16, config.optimizer_in_backward
    rounding = ", ".join(name for name, other in KINDS.items() if other.takes_bf16)
    sharding = ", ".join(name for name, other in KINDS.items() if other.shards)
    own = f"--optimizer is {name}"
    of_auto = " (also by auto, without a GPU that has bf16)" if config.precision is Precision.FP32 else ""
    of_backward = "--optimizer-in-backward updates a weight as soon as its gradient of one micro-batch is there"
    for is_refused, message in (
        (
            kind.averages and config.lr_schedule is not LrSchedule.CONSTANT,
            f"{own}, which needs no schedule, and --lr-schedule is {config.lr_schedule}: leave it out",
        ),
        (
            kind.averages and (config.ema is Ema.OFF or config.ema_every != 1),
            f"{own}, whose own average takes the place of the EMA at each step: leave out --ema off and --ema-every",
        ),
        (
            is_bf16 and not kind.takes_bf16,
            f"{own}, which cannot round weights stochastically: leave out --weights bf16, or choose {rounding}",
        ),
        (
            is_bf16 and config.lora_rank is not None,
            f"--weights is bf16 with --lora-rank {config.lora_rank}; adapters are small and stay 32-bit: leave out --weights",
        ),
        (
            is_bf16 and config.precision not in (Precision.AUTO, Precision.BF16),  # auto: not yet resolved
            f"--weights is bf16, and --precision is {config.precision}{of_auto}: give --precision bf16 as well",
        ),
        (
            config.sharding is not Sharding.DDP and world_size > 1 and not kind.shards,
            f"{own}, which does not work on sharded weights: give --sharding ddp, or choose {sharding}",
        ),
        (
            in_backward and not kind.is_per_weight,
            f"{own}, whose step needs all gradients at once: leave out --optimizer-in-backward",
        ),
        (in_backward and config.accumulation > 1, f"{of_backward}, and --accumulation is {config.accumulation}: give 1"),
        (
            in_backward and config.clip_norm is not None,
            f"{of_backward}, before the norm of all is known, and --clip-norm is {config.clip_norm}: give --clip-norm None",
        ),
        (in_backward and world_size > 1, f"{of_backward}, before {world_size} processes have averaged it: leave it out"),
    ):
        if is_refused:
            raise UsageError(message)


def average_of(config: TrainConfig, model: nn.Module, optimizer: Optimizer) -> Average | None:
    """Return the average that an optimizer keeps itself; None if it keeps none."""
    if not KINDS[config.optimizer].averages:
        return None
    from bucketline.train.optimizers.schedule_free import OwnAverage

    return OwnAverage(model, optimizer, config.ema)


def _module(kind: OptimizerKind) -> str:
    return f"{__package__}.{kind.module}"


def make_optimizer(config: TrainConfig, model: nn.Module, *, compiled: bool) -> Optimizer:
    """Return the chosen optimizer of a model's trained weights, which are on their devices."""
    from bucketline.train.optimizers.stepping import Options
    from bucketline.train.rounding import Rounding

    kind = KINDS[config.optimizer]
    assert config.learning_rate is not None
    options = Options(
        learning_rate=config.learning_rate,
        rounding=Rounding(config.seed),
        rounds_weights=config.weights is WeightDtype.BF16,
        compiled=compiled,
    )
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    groups = decay_groups(trained, config.decaying, config.weight_decay)
    optimizer: Optimizer = getattr(import_module(_module(kind)), kind.make)(model, groups, options)
    return optimizer
