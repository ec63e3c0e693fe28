"""The trainer follows stores that grow: losses are those of any run with the same schedule."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bucketline.errors import StateError, UsageError
from bucketline.loader.follow import GenerationWatch
from bucketline.loader.recorded_run import read_loader_state
from bucketline.loader.state import schedule_of
from bucketline.train import data as data_module
from bucketline.train import run as run_module
from bucketline.train.config import parse
from bucketline.train.run import train
from bucketline.train.step import train_step
from bucketline.train.values import Followed
from tests.commands import call
from tests.unit.train.tiny_run import (
    ALONE,
    add_to_store,
    as_arguments,
    config,
    losses,
    make_training_store,
    samples,
    write_unet,
    write_vae,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bucketline.loader.mixture import WeightedStore
    from bucketline.train.config import TrainConfig
    from bucketline.train.data import FollowSchedule

MORE = {3: {"train/128x128": 6, "val/128x128": 1}, 8: {"train/128x192": 5, "train/192x128": 2}}  # by the step it is added at


def grows_while_it_is_trained_on(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Publish a generation at each step of `MORE`; the trainer finds it at the next one, however long a look takes."""
    monkeypatch.setattr("bucketline.loader.follow.LOOK_EVERY_S", 0.0)
    newer = GenerationWatch.newer

    def waiting(watch: GenerationWatch, shares: Sequence[WeightedStore]) -> tuple[int, ...] | None:
        newer(watch, shares)  # begins a look
        if watch._thread is not None:
            watch._thread.join()
        return newer(watch, shares)

    monkeypatch.setattr(GenerationWatch, "newer", waiting)

    def step(*args: object) -> object:
        done = args[2]
        assert isinstance(done, int)
        if done in MORE:
            add_to_store(store, samples(MORE[done], f"{done}/"))
        return train_step(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(run_module, "train_step", step)


def schedule(asked: TrainConfig) -> FollowSchedule:
    return schedule_of(read_loader_state(asked.output_dir))


@pytest.mark.slow
def test_a_followed_run_is_repeated_by_its_schedule_in_one_go_or_stopped_and_resumed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = config(folder, max_steps=16, log_every=1, validate_every=5, save_every="100")
    followed = replace(asked, follow=Followed(rows=1), output_dir=folder / "followed")
    with monkeypatch.context() as patch:
        grows_while_it_is_trained_on(folder / "tiny.store", patch)
        train(followed, ALONE)
    (start, first), (second_at, second), (third_at, third) = schedule(followed)
    assert (start, first, second, third) == (0, (1,), (2,), (3,))
    assert 3 < second_at < third_at < 16
    assert f"from step {second_at} on generation 2: 26 rows per pass" in capsys.readouterr().err
    again = replace(asked, follow=Followed(run=followed.output_dir), output_dir=folder / "again")
    train(again, ALONE)
    assert losses(again.output_dir) == losses(followed.output_dir)
    assert schedule(again) == schedule(followed)
    parts = replace(again, output_dir=folder / "parts", max_steps=second_at + 1)
    train(parts, ALONE)
    for steps in (third_at, third_at + 1, 16):  # a stop at the step that a generation begins at, and one after it
        train(replace(parts, max_steps=steps, resume=True), ALONE)
    assert schedule(parts) == schedule(followed)
    assert losses(parts.output_dir) == losses(followed.output_dir)


def test_training_waits_for_the_first_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_vae(write_unet(tmp_path / "model"))
    monkeypatch.setattr(data_module, "FOLLOW_EVERY_S", 0.02)
    writer = threading.Timer(0.5, lambda: make_training_store(tmp_path / "tiny.store"))
    writer.start()
    asked = config(tmp_path, max_steps=2, follow=20)
    train(asked, ALONE)
    writer.join()
    assert schedule(asked) == ((0, (1,)),)


def test_a_schedule_of_other_stores_is_refused(folder: Path) -> None:
    asked = config(folder, max_steps=2)
    train(asked, ALONE)
    add_to_store(folder / "two.store", samples({"train/128x128": 4}, "two/"))
    both = replace(asked, store=(*asked.store, folder / "two.store"), output_dir=folder / "b")
    with pytest.raises(StateError, match="is the schedule of 1 stores, 2 are given"):
        train(replace(both, follow=Followed(run=asked.output_dir)), ALONE)


def test_a_schedule_of_a_generation_that_is_gone_names_the_run_whose_it_is(folder: Path) -> None:
    asked = config(folder, max_steps=1)
    train(asked, ALONE)
    add_to_store(folder / "tiny.store", samples({"train/128x128": 2}, "more/"))
    assert call("store", "compact", folder / "tiny.store", "--gc", "--older-than", "0s").code == 0
    again = replace(asked, follow=Followed(run=asked.output_dir), output_dir=folder / "again")
    run = asked.output_dir
    message = rf"^{run} was planned on generation 1 of .*garbage-collected; its steps .*leave out --follow={run}$"
    with pytest.raises(StateError, match=message):
        train(again, ALONE)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (["--follow"], Followed(rows=1)),
        (["--follow", "--verify"], Followed(rows=1)),
        (["--no-verify", "--follow"], Followed(rows=1)),
        (["--follow=20", "--verify"], Followed(rows=20)),
        (["--follow=runs/a"], Followed(run=Path("runs/a"))),
        ([], None),
    ],
)
def test_rows_to_wait_for_or_a_run_to_repeat_may_be_given(given: list[str], found: object, folder: Path) -> None:
    assert parse([*as_arguments(config(folder)), *given], "train").follow == found


def test_what_cannot_be_followed_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="--follow is '0', expected 1 or more rows"):
        config(folder, follow=0)
    with pytest.raises(UsageError, match="--follow is True, expected 1 or more rows, or a run's folder"):
        config(folder, follow=True)
