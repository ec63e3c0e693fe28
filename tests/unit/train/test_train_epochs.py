"""The length of a run in epochs: as many steps as the plan has in them, recorded for a resume."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from bucketline.errors import UsageError
from bucketline.loader.plan.plan import make_plan
from bucketline.store import Store
from bucketline.train.config import LrSchedule
from bucketline.train.run import train
from tests.unit.train.tiny_run import ALONE, add_to_store, config, losses, samples

if TYPE_CHECKING:
    from pathlib import Path

    from bucketline.train.config import TrainConfig


def in_epochs(folder: Path, epochs: float, **changes: Any) -> TrainConfig:
    return config(folder, max_steps=None, epochs=epochs, accumulation=1, lr_schedule="cosine", **changes)


def steps_of(asked: TrainConfig, epochs: int) -> int:
    return make_plan(Store.open(asked.store[0]), asked.for_loader(epochs=None)).steps_before(epochs)


def test_a_run_in_epochs_is_that_of_its_steps_and_a_resume_needs_no_length_of_its_own(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = in_epochs(folder, 1, output_dir=folder / "epoch")
    steps = steps_of(asked, 1)
    assert train(asked, ALONE).steps_done == steps == 9  # 6 batches of 13 rows, 3 of 7
    assert f"{steps} steps: --epochs is 1\n" in capsys.readouterr().err
    recorded = json.loads((asked.output_dir / "config.json").read_text(encoding="utf-8"))["config"]
    assert (recorded["max_steps"], recorded["epochs"], recorded["lr_schedule"]) == (steps, None, f"cosine@{steps}")
    plain = replace(asked, epochs=None, max_steps=steps, output_dir=folder / "steps")
    train(plain, ALONE)
    assert losses(plain.output_dir) == losses(asked.output_dir)
    longer = replace(asked, epochs=1.5, resume=True, lr_schedule=LrSchedule.parse("cosine@99", "it"))
    assert train(longer, ALONE).steps_done == steps + round((steps_of(asked, 2) - steps) / 2)
    with pytest.raises(UsageError, match=r"--epochs is 1, 9 steps, and .*step-000000\d\d is already at step 15; give more"):
        train(replace(longer, epochs=1), ALONE)


def test_epochs_of_several_plans_are_refused(folder: Path) -> None:
    asked = in_epochs(folder, 0.2)
    train(asked, ALONE)
    add_to_store(folder / "tiny.store", samples({"train/128x128": 2}, "more/"))
    with pytest.raises(UsageError, match="--epochs is 2, and the run has had several plans; give --max-steps"):
        train(replace(asked, epochs=2, resume=True, new_plan=True), ALONE)
