"""The optimizer that a run has chosen by name, what it cannot be combined with, and the learning rate of each step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bucketline.errors import UsageError
from bucketline.extensions import Extensions, imported
from bucketline.train.config import Precision, WeightDtype
from bucketline.train.values import ADAMS_BETAS, Betas, Course

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from bucketline.train.config import TrainConfig
    from bucketline.train.ema import Average, Rounding

Groups = list[dict[str, Any]]
"""Groups of weights, each with its weight decay, as torch's optimizers take them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments with which every optimizer is made."""

    learning_rate: float
    rounding: Rounding
    rounds_weights: bool  # they are bf16
    compiled: bool
    betas: Betas = ADAMS_BETAS  # for the kinds that take some


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerKind:
    """The properties of an optimizer on which a run depends. Its code and library are imported once a run is possible."""

    make: str  # `MODULE:FUNCTION`; takes the model, its groups of weights and the options, and returns the optimizer
    learning_rate: float = 1e-4  # unless --learning-rate is given
    state: tuple[str, ...] = ()  # entries of its groups that a checkpoint restores, besides each weight's own state
    takes_bf16: bool = False  # weights, which it rounds stochastically
    takes_betas: bool = False  # `Options.betas`
    shards: bool = False  # steps on the shards of FSDP
    average: str | None = None  # `MODULE:CLASS` of the average that it keeps itself, in place of a schedule and of the EMA


ADAMW = OptimizerKind(make="bucketline.train.step:make_adamw", takes_bf16=True, takes_betas=True, shards=True)
_ROOM = ("adamw-bf16", "adamw-8bit", "adafactor", "muon", "prodigy", "schedule-free")

OPTIMIZERS: Extensions[OptimizerKind] = Extensions(
    "an optimizer called",
    "bucketline.optimizers",
    {
        "adamw": f"{__name__}:ADAMW",
        **{name: f"bucketline.train.optimizers.kinds:{name.replace('-', '_').upper()}" for name in _ROOM},
    },
    lambda found: isinstance(found, OptimizerKind),
)


def kind_of(config: TrainConfig) -> OptimizerKind:
    """Return the kind of a run's optimizer.

    Raises:
        UsageError: if there is none of its name, or its package cannot be imported.
    """
    try:
        return OPTIMIZERS[config.optimizer or "adamw"]
    except KeyError:
        raise UsageError(
            f"--optimizer is {config.optimizer!r:.80}, expected {', '.join(OPTIMIZERS)}; another package's is known once that "
            "is installed"
        ) from None


def refuse_combinations(config: TrainConfig, world_size: int) -> None:
    """Check that the chosen optimizer and the dtype of the weights suit each other and the run.

    Raises:
        UsageError: if there is no such optimizer, or two options exclude each other; the message says what to do.
    """
    kind, own = kind_of(config), f"--optimizer is {config.optimizer}"
    is_bf16 = config.weights is WeightDtype.BF16
    of_auto = " (also by auto, without a GPU that has bf16)" if config.precision is Precision.FP32 else ""
    for is_refused, message in (
        (
            kind.average is not None and config.lr_schedule.name is not Course.CONSTANT,
            f"{own}, which needs no schedule, and --lr-schedule is {config.lr_schedule}: leave it out",
        ),
        (
            kind.average is not None and (config.ema.decay is None or config.ema.every != 1),
            f"{own}, whose own average takes the place of the EMA at each step, and --ema is {config.ema}: leave it out",
        ),
        (
            config.betas != ADAMS_BETAS and not kind.takes_betas,
            f"{own}, which has its own betas, and --betas is {config.betas}: leave it out, or choose {{betas}}",
        ),
        (
            is_bf16 and not kind.takes_bf16,
            f"{own}, which cannot round weights stochastically: leave out --weights bf16, or choose {{rounding}}",
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
            config.is_sharded(world_size) and not kind.shards,
            f"{own}, which does not work on sharded weights: give --sharding ddp, or choose {{sharding}}",
        ),
    ):
        if is_refused:
            rounding, sharding, betas = (
                ", ".join(name for name, other in OPTIMIZERS.items() if getattr(other, can))
                for can in ("takes_bf16", "shards", "takes_betas")
            )
            raise UsageError(message.format(rounding=rounding, sharding=sharding, betas=betas))


def make_optimizer(config: TrainConfig, model: nn.Module, *, compiled: bool) -> Optimizer:
    """Return the chosen optimizer of a model's trained weights, which are on their devices."""
    from bucketline.train.ema import Rounding

    assert config.learning_rate is not None
    options = Options(
        learning_rate=config.learning_rate,
        rounding=Rounding(config.seed),
        rounds_weights=config.weights is WeightDtype.BF16,
        compiled=compiled,
        betas=config.betas,
    )
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    groups: Groups = [{"params": [*trained], "weight_decay": config.weight_decay}]
    optimizer: Optimizer = imported(kind_of(config).make)(model, groups, options)
    return optimizer


def average_of(config: TrainConfig, model: nn.Module, optimizer: Optimizer) -> Average | None:
    """Return the average that an optimizer keeps itself; None if it keeps none."""
    if (place := kind_of(config).average) is None:
        return None
    average: Average = imported(place)(model, optimizer, config.ema.place)
    return average


def learning_rate_at(step: int, config: TrainConfig) -> float:
    """Return the learning rate of optimizer step `step` (from 0): a linear warm-up, then the schedule.

    The horizon is the schedule's end, not the run's length, so that a longer run continues a shorter one. The rate is at its
    floor from that step on, so that every step before that changes the weights, as does the first of the warm-up.
    """
    assert config.learning_rate is not None  # resolved: each optimizer has its own
    asked, warm = config.lr_schedule, min(1.0, (step + 1) / max(1, config.warmup_steps))
    if not asked.ends:
        return config.learning_rate * warm * next(share for share, end in asked.pieces if step < end)
    if warm < 1.0:
        return config.learning_rate * warm
    horizon = asked.end or config.num_steps
    falls = min(asked.steps or -(-horizon // 5), horizon)  # the steps in which wsd does
    begin = horizon - falls if asked.name is Course.WSD else config.warmup_steps
    passed = 1.0 if step >= horizon else max(0.0, (step - begin) / max(1, horizon - begin))
    if asked.cycles is not None and passed < 1.0:
        passed = asked.cycles * passed % 1.0
    is_cosine = asked.name in (Course.COSINE, Course.RESTARTS)
    share = (1 + math.cos(math.pi * passed)) / 2 if is_cosine else (1 - passed) ** (asked.power or 1)
    return config.learning_rate * (asked.floor + (1 - asked.floor) * share)
