"""The trainer follows stores that grow: losses are those of any run with the same schedule."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from bucketline.loader.seen import read_run
from bucketline.store.change.commit import drop
from bucketline.train import run as run_module
from bucketline.train.log import read_metrics
from bucketline.train.run import train
from bucketline.train.step import train_step
from tests.unit.train.tiny_run import ALONE, add_to_store, config, losses, samples

if TYPE_CHECKING:
    from pathlib import Path

    from bucketline.train.config import TrainConfig

MORE = {3: {"train/128x128": 6, "val/128x128": 1}, 8: {"train/128x192": 5, "train/192x128": 2}}  # by the step it is added at


def grows_while_it_is_trained_on(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Publish a generation at each step of `MORE`."""

    def step(*args: object) -> object:
        done = args[2]
        assert isinstance(done, int)
        if done in MORE:
            add_to_store(store, samples(MORE[done], f"{done}/"))
        return train_step(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(run_module, "train_step", step)


def schedule(asked: TrainConfig) -> list[tuple[int, tuple[int, ...]]]:
    """Return the steps at which the run's plan changed, and the generations that it has from there on."""
    return [(one.step, one.state.generations) for one in read_run(asked.output_dir).lines]


@pytest.mark.slow
def test_a_followed_run_that_is_stopped_and_resumed_has_the_losses_of_one_that_is_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = shutil.copytree(folder, folder.with_name("copied"))
    found = []
    for place, stops in ((folder, [16]), (copied, [7, 13, 16])):
        asked = replace(config(place, max_steps=16, log_every=1, validate_every=5, save_every="100"), follow=True)
        with monkeypatch.context() as patch:
            grows_while_it_is_trained_on(place / "tiny.store", patch)
            for n, steps in enumerate(stops):
                train(replace(asked, max_steps=steps, resume=n > 0), ALONE)
        found.append((schedule(asked), [line for line in losses(asked.output_dir) if line[1] != "null"]))
    assert found[0] == found[1]
    (start, first), (second_at, second), (third_at, third) = found[0][0]
    assert (start, first, second, third) == (0, (1,), (2,), (3,))
    assert 3 < second_at < third_at < 16
    assert f"from step {second_at} on generation 2: 26 rows per pass" in capsys.readouterr().err


def test_a_window_of_steps_goes_on_without_a_bucket_that_was_dropped_meanwhile(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(*args: object) -> object:
        if args[2] == 2:
            drop(folder / "tiny.store", (), match="train/192x128/*")
        return train_step(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(run_module, "train_step", step)
    asked = config(folder, max_steps=5, log_every=100, follow=True)
    train(asked, ALONE)
    assert schedule(asked) == [(0, (1,)), (4, (2,))]
    train(replace(asked, max_steps=6, resume=True), ALONE)
    (window,) = (line for line in read_metrics(asked.output_dir) if "loss" in line)
    assert window["buckets"] == {"train/128x128": 5, "train/192x128": 1}
    assert window["samples"] == 6 * 4
