"""The optimizer that a run has chosen by name, what it cannot be combined with, and the learning rate of each step."""

from __future__ import annotations

import ast
import importlib
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

NAMED = {"adamw": "torch", "adamw-8bit": "torchao.optim", "muon": "torch", "prodigy": "prodigyopt"}
"""The library of each optimizer that has a name; `train/optimizers.py` makes it."""
ADAMWS = ("adamw", "adamw-8bit")  # --betas is for these
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
    name, own = config.optimizer or "adamw", f"--optimizer is {config.optimizer or 'adamw'}"
    arguments_of(config)
    if name not in NAMED and not _CLASS.fullmatch(name):
        raise UsageError(f"{own!s:.80}, expected {', '.join(NAMED)}, or any other as module:Class, as torch.optim:NAdam")
    if config.optimizer_arg and name in NAMED:
        raise UsageError(f"{own}, and --optimizer-arg is {' '.join(config.optimizer_arg)}: leave it out, or name a class")
    if config.betas != ADAMS_BETAS and name not in ADAMWS:
        raise UsageError(f"{own}, which has its own betas, and --betas is {config.betas}: choose {' or '.join(ADAMWS)}")
    if config.is_sharded(world_size) and name not in OF_SHARDS:
        raise UsageError(
            f"{own}, which may not work on sharded weights: give --sharding ddp, or choose {' or '.join(OF_SHARDS)}"
        )
    if config.weights is not WeightDtype.BF16:
        return
    if name != "adamw-8bit":
        raise UsageError(f"{own}, which cannot round weights stochastically: leave out --weights bf16, or choose adamw-8bit")
    if config.lora_rank is not None:
        raise UsageError(
            f"--weights is bf16 with --lora-rank {config.lora_rank}; adapters are small and stay 32-bit: leave out --weights"
        )
    if config.precision not in (Precision.AUTO, Precision.BF16):  # auto: not yet resolved
        of_auto = " (also by auto, without a GPU that has bf16)" if config.precision is Precision.FP32 else ""
        raise UsageError(f"--weights is bf16, and --precision is {config.precision}{of_auto}: give --precision bf16 as well")


def find_optimizer(config: TrainConfig) -> Any:  # noqa: ANN401 - a function of ours, or any class of an optimizer
    """Return what makes the chosen optimizer, and import its library, which may be missing."""
    if (name := config.optimizer or "adamw") in NAMED:
        importlib.import_module(NAMED[name])
        return imported(f"bucketline.train.optimizers:make_{name.removeprefix('adamw-')}")
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
