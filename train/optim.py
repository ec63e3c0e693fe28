"""The optimizer that a run has chosen by name, what it cannot be combined with, and the learning rate of each step."""

from __future__ import annotations

import ast
import inspect
import math
import re
from typing import TYPE_CHECKING, Any

from bucketline.errors import UsageError
from bucketline.extensions import imported
from bucketline.train.config import Precision, WeightDtype
from bucketline.train.values import ADAMS_BETAS, Course

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from bucketline.train.config import TrainConfig

NAMED = {
    "adamw": f"{__name__}:make_adamw",
    "adamw-8bit": "bucketline.train.optimizers.adamw_8bit:make_8bit",
    "muon": "bucketline.train.optimizers.muon:make_muon",
    "prodigy": "bucketline.train.optimizers.prodigy:make_prodigy",
}
"""What makes each optimizer that has a name, as MODULE:FUNCTION: a module imports its library, which may be missing."""
ADAMWS = ("adamw", "adamw-8bit")  # --betas and --weights bf16 are for these
OF_SHARDS = ("adamw", "muon")  # step on the shards of FSDP
_CLASS = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_CONSTANTS = {"true": True, "false": False, "none": None}


def usual_learning_rate(config: TrainConfig) -> float:
    """Return the learning rate of a run that is given none; Prodigy's is a factor of the one that it finds."""
    return 1.0 if config.optimizer == "prodigy" else 1e-4


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
    name, own = config.optimizer or "adamw", f"--optimizer is {config.optimizer}"
    arguments_of(config)
    is_bf16, adamws = config.weights is WeightDtype.BF16, " or ".join(ADAMWS)
    of_auto = " (also by auto, without a GPU that has bf16)" if config.precision is Precision.FP32 else ""
    for is_refused, message in (
        (
            name not in NAMED and not _CLASS.fullmatch(name),
            f"--optimizer is {name!r:.80}, expected {', '.join(NAMED)}, or any other as module:Class, as torch.optim:NAdam",
        ),
        (
            bool(config.optimizer_arg) and name in NAMED,
            f"--optimizer-arg is {' '.join(config.optimizer_arg)}, and --optimizer is {name}: leave it out, or name a class",
        ),
        (
            config.betas != ADAMS_BETAS and name not in ADAMWS,
            f"{own}, which has its own betas, and --betas is {config.betas}: leave it out, or choose {adamws}",
        ),
        (
            is_bf16 and name not in ADAMWS,
            f"{own}, which cannot round weights stochastically: leave out --weights bf16, or choose {adamws}",
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
            config.is_sharded(world_size) and name not in OF_SHARDS,
            f"{own}, which may not work on sharded weights: give --sharding ddp, or choose {' or '.join(OF_SHARDS)}",
        ),
    ):
        if is_refused:
            raise UsageError(message)


def find_optimizer(config: TrainConfig) -> Any:  # noqa: ANN401 - a function of ours, or any class of an optimizer
    """Return what makes the chosen optimizer, whose library this imports."""
    if (name := config.optimizer or "adamw") in NAMED:
        return imported(NAMED[name])
    from torch.optim import Optimizer

    try:
        kind = imported(name)
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"--optimizer {name} cannot be imported: {error!s:.200}. Install its package, or put its module on PYTHONPATH"
        ) from error
    reason = ""
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        reason = "it is not a torch.optim.Optimizer"
    elif hasattr(kind, "eval"):
        reason = "it has other weights for evaluation than for training"
    elif (closure := inspect.signature(kind.step).parameters.get("closure")) and closure.default is closure.empty:
        reason = "its step computes the loss again"
    if reason:
        raise UsageError(f"--optimizer {name} cannot be used: {reason}; choose another one")
    return kind


def make_optimizer(config: TrainConfig, model: nn.Module, *, compiled: bool) -> Optimizer:
    """Return the chosen optimizer of a model's trained weights, which are on their devices."""
    assert config.learning_rate is not None
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [{"params": trained, "weight_decay": config.weight_decay}]
    make = find_optimizer(config)
    if (config.optimizer or "adamw") in NAMED:
        named: Optimizer = make(model, groups, config, compiled=compiled)
        return named
    try:
        optimizer: Optimizer = make(groups, lr=config.learning_rate, **arguments_of(config))
    except (TypeError, ValueError) as error:
        given = " ".join(["lr", *config.optimizer_arg])
        raise UsageError(
            f"--optimizer {config.optimizer} does not take {given}: {error!s:.300}. Fix --optimizer-arg"
        ) from error
    return optimizer


def make_adamw(_model: nn.Module, groups: list[dict[str, Any]], config: TrainConfig, *, compiled: bool) -> Optimizer:
    """Return AdamW with 32-bit moments, of torch unless it rounds weights in bf16; `compiled` changes nothing."""
    del compiled
    if config.weights is WeightDtype.BF16:
        from bucketline.train.optimizers.rounded_adamw import RoundedAdamW

        return RoundedAdamW(groups, config)
    from torch.optim import AdamW

    assert config.learning_rate is not None
    return AdamW(groups, lr=config.learning_rate, betas=config.betas.pair, eps=config.betas.eps, fused=True)


def learning_rate_at(step: int, config: TrainConfig) -> float:
    """Return the learning rate of optimizer step `step` (from 0): a linear warm-up, then the schedule.

    The horizon is the schedule's end, not the run's length, so that a longer run continues a shorter one. The rate is at its
    floor from that step on, so that every step before that changes the weights, as does the first of the warm-up.
    """
    assert config.learning_rate is not None  # resolved: each optimizer has its own
    asked, warm = config.lr_schedule, min(1.0, (step + 1) / max(1, config.warmup_steps))
    if not asked.ends:
        return config.learning_rate * warm
    if warm < 1.0:
        return config.learning_rate * warm
    horizon = asked.end or config.num_steps
    falls = min(asked.steps or -(-horizon // 5), horizon)  # the steps in which wsd does
    begin = horizon - falls if asked.name is Course.WSD else config.warmup_steps
    passed = 1.0 if step >= horizon else max(0.0, (step - begin) / max(1, horizon - begin))
    if asked.cycles is not None and passed < 1.0:
        passed = asked.cycles * passed % 1.0
    is_cosine = asked.name in (Course.COSINE, Course.RESTARTS)
    share = (1 + math.cos(math.pi * passed)) / 2 if is_cosine else 1 - passed
    return config.learning_rate * (asked.floor + (1 - asked.floor) * share)
