"""The learning rate of each step, and which weights decay: pure functions of the step and the options."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from bucketline.train.config import Decaying, LrSchedule

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.nn import Parameter

    from bucketline.train.config import TrainConfig


def learning_rate_at(step: int, config: TrainConfig) -> float:
    """Return the learning rate of optimizer step `step` (from 0): a linear warm-up, then the schedule.

    The horizon is `schedule_steps`, not the run's length, so that a longer run continues a shorter one. The rate is at its
    floor from step `schedule_steps` on, so that every step before that changes the weights, as does the first of the warm-up.
    """
    assert config.learning_rate is not None  # resolved: each optimizer has its own
    warm = min(1.0, (step + 1) / max(1, config.warmup_steps))
    if config.lr_schedule is LrSchedule.CONSTANT or warm < 1.0:
        return config.learning_rate * warm
    horizon = config.schedule_steps or config.max_steps
    falls = min(config.decay_steps or -(-horizon // 5), horizon)  # the steps in which wsd does
    begin = horizon - falls if config.lr_schedule is LrSchedule.WSD else config.warmup_steps
    passed = 1.0 if step >= horizon else max(0.0, (step - begin) / max(1, horizon - begin))
    share = (1 + math.cos(math.pi * passed)) / 2 if config.lr_schedule is LrSchedule.COSINE else 1 - passed
    return config.learning_rate * (config.lr_floor + (1 - config.lr_floor) * share)


def decay_groups(parameters: Iterable[Parameter], decaying: Decaying, weight_decay: float) -> list[dict[str, object]]:
    """Return the optimizer's groups: with `matrices`, biases, norms and other weights of one dimension do not decay."""
    every = list(parameters)
    if decaying is Decaying.ALL:
        return [{"params": every, "weight_decay": weight_decay}]
    return [
        {"params": [one for one in every if one.ndim > 1], "weight_decay": weight_decay},
        {"params": [one for one in every if one.ndim <= 1], "weight_decay": 0.0},
    ]
