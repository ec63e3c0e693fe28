"""One gradient that is not finite is passed over and counted; several in a row end the run."""

from __future__ import annotations

import contextlib
import itertools
import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from bucketline.errors import TrainError
from bucketline.loader import Loader
from bucketline.train import run as run_module
from bucketline.train import step as step_module
from bucketline.train.log import read_metrics
from bucketline.train.run import train
from tests.unit.train.tiny_run import ALONE, built, config

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from bucketline.train.config import TrainConfig


def spoil(monkeypatch: pytest.MonkeyPatch, steps: Collection[int]) -> None:
    """Make the loss of some steps infinite."""
    real, at = step_module.loss_of, [-1]
    real_step = step_module.train_step

    def step(training: object, batches: object, number: int) -> object:
        at[0] = number
        return real_step(training, batches, number)  # type: ignore[arg-type]

    def loss(*args: object) -> object:
        found = real(*args)  # type: ignore[arg-type]
        return found * float("inf") if at[0] in steps else found

    monkeypatch.setattr(run_module, "train_step", step)
    monkeypatch.setattr(step_module, "loss_of", loss)


def seen_at(step: int, asked: TrainConfig) -> list[tuple[str, str]]:
    """Return the bucket and the id of each row of a step, as a loader delivers them."""
    with Loader(asked.store, asked.for_loader()) as loader:
        batches = itertools.takewhile(lambda one: one.step <= step, loader.forever())
        return [(one.bucket, name) for one in batches if one.step == step for name in loader.names(one)]


def test_samples_are_named_of_the_rank_whose_loss_is_not_finite(folder: Path) -> None:
    asked = config(folder, batch="1")
    run = built(asked)
    with contextlib.closing(run):
        run.ranks = replace(ALONE, world_size=2)
        run.loader.plan = replace(
            run.loader.plan, buckets=tuple(replace(one, global_batch=4) for one in run.loader.plan.buckets)
        )
        both, each = run._samples_of(3, [0, 1]), [run._samples_of(3, [rank]) for rank in (0, 1)]
    assert both == ", ".join(each)
    assert [len(one.split(", ")) for one in each] == [2, 2]


def windows(run: Path) -> list[tuple[object, object, bool]]:
    lines = [line for line in read_metrics(run) if "loss" in line]
    return [(line["step"], line["skipped_steps"], isinstance(line["loss"], float)) for line in lines]


@pytest.mark.parametrize("log_every", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_one_infinite_gradient_is_skipped_counted_and_told(
    log_every: int, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(monkeypatch, {4})
    asked = config(folder, log_every=log_every, num_images=1)
    train(replace(asked, max_steps=5), ALONE)  # in the middle of a window
    assert train(replace(asked, resume=True), ALONE).steps_done == asked.max_steps
    per_step = [(step, int(step == 4), step != 4) for step in range(7)]
    assert windows(asked.output_dir) == (per_step if log_every == 1 else [(2, 0, True), (5, 1, True), (6, 0, True)])
    err = capsys.readouterr().err
    assert "1 step skipped" in err
    (said,) = re.findall(
        r"warning: step 4 \(bucket (.+?)\): the loss is inf .* nan, of (.+), expected finite numbers; the", err
    )
    named = seen_at(4, asked)
    assert {bucket for bucket, _ in named} == {said[0]}
    assert sorted(said[1].split(", ")) == sorted(name for _, name in named)


def test_five_in_a_row_end_the_run_and_none_of_them_is_followed_by_a_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, range(4, 99))
    asked = config(folder, max_steps=40, save_every="2", keep=9)
    with pytest.raises(
        TrainError, match=r"step 4 \(bucket train/\d+x128\).*5 in a row.*continue with --resume.*lower --learning-rate"
    ):
        train(asked, ALONE)
    assert sorted(path.name for path in (asked.output_dir / "checkpoints").iterdir()) == ["step-00000002", "step-00000004"]


def test_a_checkpoint_that_is_due_after_a_skipped_step_is_made_after_the_next_good_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, {3, 4})
    asked = config(folder, save_every="4", keep=9)
    train(asked, ALONE)
    assert sorted(path.name[-1] for path in (asked.output_dir / "checkpoints").iterdir()) == ["6", "7"]
