"""The checks before a run's folder is made, and which folder of an earlier try is taken again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bucketline.errors import BucketlineError, DeliveryError, TrainError, UsageError
from bucketline.train import run as run_module
from bucketline.train import step as step_module
from bucketline.train.run import train
from tests.serving import serving
from tests.unit.train.tiny_run import ALONE, config, losses, make_training_store

if TYPE_CHECKING:
    from pathlib import Path


def test_a_service_that_is_not_there_is_found_before_anything_is_made(folder: Path) -> None:
    asked = config(folder, service=str(folder / "none.sock"))
    with pytest.raises(DeliveryError, match=r"no service can be reached at .*none\.sock"):
        train(asked, ALONE)
    assert not asked.output_dir.exists()


def test_a_service_of_another_store_is_found_before_anything_is_made(folder: Path) -> None:
    other = make_training_store(folder / "other.store").path
    asked = config(folder, service=str(folder / "s"))
    with serving(folder / "s", other), pytest.raises(BucketlineError, match="not among the stores that the service reads"):
        train(asked, ALONE)
    assert not asked.output_dir.exists()


@pytest.mark.parametrize("validates", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_folder_of_a_run_that_made_no_step_is_taken_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, validates: bool
) -> None:
    plain = config(folder, output_dir=folder / "plain", max_steps=2)
    train(plain, ALONE)
    asked = config(folder, max_steps=2)

    def fail(*_: object) -> None:
        raise TrainError("no step is made")

    with monkeypatch.context() as patched:
        patched.setattr(run_module.Run, "_validate", fail) if not validates else patched.setattr(run_module, "train_step", fail)
        with pytest.raises(TrainError, match="no step is made"):
            train(config(folder, max_steps=2, seed=3), ALONE)
    assert bool((asked.output_dir / "metrics.jsonl").read_bytes()) is validates
    with pytest.raises(TrainError, match=r"no complete checkpoint to resume; leave out --resume to start over$"):
        train(config(folder, max_steps=2, resume=True), ALONE)
    train(asked, ALONE)
    assert losses(asked.output_dir) == losses(plain.output_dir)


def test_the_folder_of_a_run_that_made_steps_is_not(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = config(folder, max_steps=9, log_every=1)
    real, made = step_module.train_step, []

    def fail_later(*args: object) -> object:
        made.append(args)
        if len(made) == 4:
            raise TrainError("enough")
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(run_module, "train_step", fail_later)
    with pytest.raises(TrainError, match="enough"):
        train(asked, ALONE)
    with pytest.raises(UsageError, match="it ended before its first checkpoint: remove the folder"):
        train(asked, ALONE)
    with pytest.raises(
        TrainError, match=r"no complete checkpoint .*; leave out --resume to start over, in another --output-dir"
    ):
        train(config(folder, max_steps=9, resume=True), ALONE)
