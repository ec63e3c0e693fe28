"""The learning rate of each step, held against the schedules of a plain library."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from diffusers import optimization
from torch import nn
from transformers import get_wsd_schedule

from bucketline.errors import UsageError
from bucketline.train.optim import learning_rate_at
from tests.unit.train.tiny_run import config

if TYPE_CHECKING:
    from pathlib import Path

    from bucketline.train.config import TrainConfig

STEPS, WARM = 20, 4
FALLING = ("cosine", "cosine-restarts:2", "linear", "wsd:3", "polynomial:2")


def asked(folder: Path, **changes: Any) -> TrainConfig:
    return config(folder, **{"max_steps": STEPS, "warmup_steps": WARM, "learning_rate": 1.0, **changes})


def library(schedule: Any, **named: Any) -> list[float]:
    """Return the rates of a library's schedule, without the first of its warm-up, which is 0."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    made = schedule(optimizer=optimizer, **named)
    rates = []
    for _ in range(STEPS + 1):
        rates.append(made.get_last_lr()[0])
        optimizer.step()
        made.step()
    return [*rates[1 : WARM + 1], *rates[WARM:STEPS]]


def test_the_learning_rate_warms_up_and_never_asks_how_long_the_run_is(tmp_path: Path) -> None:
    short, long = (config(tmp_path, max_steps=steps, warmup_steps=4, learning_rate=1.0) for steps in (5, 500))
    rates = [learning_rate_at(step, short) for step in range(6)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert rates == [learning_rate_at(step, long) for step in range(6)]


@pytest.mark.parametrize(
    ("schedule", "theirs"),
    [
        ("cosine", partial(optimization.get_scheduler, "cosine")),
        ("cosine-restarts:3", partial(optimization.get_cosine_with_hard_restarts_schedule_with_warmup, num_cycles=3)),
        ("linear", partial(optimization.get_scheduler, "linear")),
        # it ends at 1e-7 whatever the learning rate
        *((f"polynomial:{power}:1e-07", partial(optimization.get_scheduler, "polynomial", power=power)) for power in (1, 2.5)),
    ],
)
def test_a_schedule_is_the_librarys(tmp_path: Path, schedule: str, theirs: Any) -> None:
    own = [learning_rate_at(step, asked(tmp_path, lr_schedule=schedule)) for step in range(STEPS)]
    assert own == pytest.approx(library(theirs, num_warmup_steps=WARM, num_training_steps=STEPS), abs=1e-12)


def test_a_piecewise_constant_rate_is_the_librarys_whose_steps_are_ends(tmp_path: Path) -> None:
    rules = "1:6,0.5:7,2e-2:15,0.25"
    run = asked(tmp_path, lr_schedule=f"piecewise-constant:{rules}", warmup_steps=0)
    made = optimization.get_scheduler("piecewise_constant", torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), rules)
    assert isinstance(made, torch.optim.lr_scheduler.LambdaLR)
    theirs = [made.lr_lambdas[0](step) for step in range(STEPS)]
    assert [learning_rate_at(step, run) for step in range(STEPS)] == theirs == [1] * 6 + [0.5] + [0.02] * 8 + [0.25] * 5
    warmed = [learning_rate_at(step, replace(run, warmup_steps=WARM)) for step in range(STEPS)]
    assert warmed == [0.25, 0.5, 0.75, *theirs[WARM - 1 :]]


def test_wsd_is_the_librarys(tmp_path: Path) -> None:
    own = [learning_rate_at(step, asked(tmp_path, lr_schedule="wsd:6")) for step in range(STEPS)]
    theirs = library(
        get_wsd_schedule, num_warmup_steps=WARM, num_decay_steps=6, num_stable_steps=STEPS - WARM - 6, decay_type="linear"
    )
    assert own == pytest.approx(theirs, abs=1e-12)
    fifth = [learning_rate_at(step, asked(tmp_path, lr_schedule="wsd")) for step in range(STEPS)]
    assert fifth[WARM - 1 : STEPS - 4] == [1.0] * (STEPS - WARM - 3)
    assert fifth[STEPS - 4 :] == pytest.approx([1.0, 0.75, 0.5, 0.25])


@pytest.mark.parametrize("warm", [0, 1, WARM, STEPS - 1, STEPS, 2 * STEPS])
@pytest.mark.parametrize(
    "schedule", ["constant", "cosine", "cosine-restarts:3", "linear", "wsd", "polynomial:3", "piecewise-constant:1:2,0.1"]
)
def test_every_step_of_a_run_has_a_rate_above_0(tmp_path: Path, schedule: str, warm: int) -> None:
    """A step at rate 0 costs as much as any other and changes nothing: not the first of a warm-up, nor a schedule's last."""
    for steps in (1, 2, STEPS):
        run = asked(tmp_path, lr_schedule=schedule, max_steps=steps, warmup_steps=warm)
        assert min(learning_rate_at(step, run) for step in range(steps)) > 0


@pytest.mark.parametrize("schedule", FALLING)
def test_steps_after_a_schedule_that_ends_at_0_are_refused(tmp_path: Path, schedule: str) -> None:
    message = f"the learning rate is 0 from step 20 on: these steps would change nothing; give --lr-schedule {schedule}@21, or"
    with pytest.raises(UsageError, match=message):
        asked(tmp_path, lr_schedule=f"{schedule}@{STEPS}", max_steps=STEPS + 1)
    asked(tmp_path, lr_schedule=f"{schedule}:0.1@{STEPS}", max_steps=STEPS + 1)


@pytest.mark.parametrize("schedule", FALLING)
def test_the_horizon_decides_and_not_how_long_the_run_is(tmp_path: Path, schedule: str) -> None:
    short = asked(tmp_path, lr_schedule=f"{schedule}:0.1@{STEPS}", max_steps=5)
    long = replace(short, max_steps=500)
    rates = [learning_rate_at(step, long) for step in range(2 * STEPS)]
    assert rates == [learning_rate_at(step, short) for step in range(2 * STEPS)]
    assert rates[STEPS:] == pytest.approx([0.1] * STEPS)
    assert min(rates[:STEPS]) > 0.1
    assert min(rates[WARM:]) == pytest.approx(0.1)
