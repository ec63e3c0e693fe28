"""Accelerate's trackers: those that are not there are named, those that are get the metrics' lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, on_main_process

from bucketline.errors import UsageError
from bucketline.train.log import ProgressLine, RunLog, expect_trackers
from bucketline.train.run import train
from tests.unit.train.tiny_run import ALONE, config

if TYPE_CHECKING:
    from pathlib import Path


class Remembering(GeneralTracker):  # type: ignore[misc]
    """Keeps what it is given."""

    name = "remembering"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int, dict[str, Any]]] = []
        self.config: dict[str, Any] = {}

    @property
    def tracker(self) -> object:
        return self.lines

    @on_main_process  # type: ignore[untyped-decorator]
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.config = values

    @on_main_process  # type: ignore[untyped-decorator]
    def log(self, values: dict[str, Any], step: int, **_: object) -> None:
        self.lines.append((step, values))


def test_a_tracker_whose_package_is_missing_is_refused_before_anything_is_made(folder: Path) -> None:
    asked = config(folder, track_with=("aim",))
    with pytest.raises(UsageError, match="--track-with is aim, whose package is not installed; pip install aim"):
        train(asked, ALONE)
    assert not asked.output_dir.exists()


def test_what_is_no_tracker_is_refused_with_those_that_are() -> None:
    with pytest.raises(UsageError, match=r"--track-with is tensorbord, expected one of .*tensorboard.*wandb"):
        expect_trackers(("tensorbord",))


def test_a_tracker_gets_windows_and_validations_at_the_steps_done_with_nested_numbers_by_name(tmp_path: Path) -> None:
    tracker = Remembering()
    accelerator = Accelerator(cpu=True, log_with=[tracker])
    asked = config(tmp_path, output_dir=tmp_path, seed=3, clip_norm=None)
    log = RunLog(asked, accelerator, ProgressLine(talks=False))
    log.write({"step": 9, "loss": 0.5, "buckets": {"train/64x64": 10}, "samples_per_s": 2.0, "data_wait_fraction": 0.0}, 10)
    log.write({"step": 10, "val_loss": 0.4, "val_zero_loss": 1.0, "val_loss_per_timestep": {"250": 0.3}}, 10)
    log.close()
    assert (tracker.config["seed"], tracker.config["clip_norm"]) == (3, "None")
    assert tracker.config["store"] == str([str(path) for path in asked.store])
    (first, window), (second, validation) = tracker.lines
    assert (first, second) == (10, 10)
    assert {"loss": 0.5, "buckets/train/64x64": 10}.items() <= window.items()
    assert "step" not in window
    assert validation == {"val_loss": 0.4, "val_zero_loss": 1.0, "val_loss_per_timestep/250": 0.3}
