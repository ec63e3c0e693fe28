"""A run that ended can be continued, in the way that its message says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bucketline.errors import StateError, TrainError, UsageError
from bucketline.store.change.garbage_collect import collect
from bucketline.store.write.publish import lock_store
from bucketline.train import log, save
from bucketline.train import run as run_module
from bucketline.train import step as step_module
from bucketline.train import weight_layout as weights
from bucketline.train.run import train
from tests.unit.train.tiny_run import ALONE, add_to_store, config, losses, samples

if TYPE_CHECKING:
    from bucketline.train.config import TrainConfig


class Clock:
    """A clock on which every optimizer step takes eleven minutes."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def perf_counter(self) -> float:
        return self.now_s

    def train_step(self, *args: object) -> object:
        self.now_s += 660.0
        return step_module.train_step(*args)  # type: ignore[arg-type]


def checkpoints(asked: TrainConfig) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (asked.output_dir / "checkpoints").iterdir())


def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(log, "time", clock)
    monkeypatch.setattr(save, "time", clock)
    monkeypatch.setattr(run_module, "train_step", clock.train_step)


def test_a_checkpoint_is_made_every_thirty_minutes_though_none_is_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = config(folder, output_dir=folder / "plain")
    train(plain, ALONE)
    asked = config(folder, keep=9)
    slow(monkeypatch)
    train(asked, ALONE)
    assert checkpoints(asked) == [3, 6, 7]
    assert losses(asked.output_dir) == losses(plain.output_dir)


@pytest.mark.slow
def test_thirty_minutes_are_counted_from_the_checkpoint_before(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch)
    often = config(folder, output_dir=folder / "often", save_every="2,30m", keep=9)
    train(often, ALONE)
    assert checkpoints(often) == [2, 4, 6, 7]
    rarely = config(folder, save_every="5,40m", keep=9)
    train(rarely, ALONE)
    assert checkpoints(rarely) == [4, 5, 7]
    never = config(folder, output_dir=folder / "never", save_every=None)
    train(never, ALONE)
    assert checkpoints(never) == [7]


def diverge(asked: TrainConfig) -> None:
    train(replace(asked, max_steps=20, learning_rate=1e30, log_every=5), ALONE)


def spoil_weights(asked: TrainConfig) -> None:
    train(replace(asked, max_steps=1, learning_rate=1e39, clip_norm=None), ALONE)


def block_a_file(asked: TrainConfig) -> None:
    real = log.write_config

    def blocked(*arguments: object) -> None:
        (asked.output_dir / "config.json").mkdir()
        real(*arguments)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(run_module, "write_config", blocked)
        train(asked, ALONE)


def fill_the_disk(asked: TrainConfig) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(weights, "save_file", full)
        train(replace(asked, max_steps=1), ALONE)


@pytest.mark.parametrize("end", [diverge, spoil_weights, block_a_file, fill_the_disk])
def test_a_run_that_ends_before_its_first_checkpoint_is_not_told_to_resume(end: object, folder: Path) -> None:
    asked = config(folder)
    with pytest.raises(TrainError) as ended:
        end(asked)  # type: ignore[operator]
    assert "--resume" not in str(ended.value)
    assert "there is no checkpoint yet: " in str(ended.value)
    assert str(ended.value).endswith(("with the same command", ", and start over", "with a lower --learning-rate"))
    assert not list((asked.output_dir / "checkpoints").glob("step-????????"))


def test_a_run_that_ends_after_a_checkpoint_is_told_to_resume(folder: Path) -> None:
    asked = config(folder, max_steps=1)
    train(asked, ALONE)
    with pytest.raises(TrainError, match=r"norm .*: continue with --resume, with a lower --learning-rate"):
        diverge(replace(asked, resume=True))


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        ({"lora_rank": 2}, {"lora_rank": 4}, r"--lora-rank is 4, .*step-00000001 was trained with 2; use --lora-rank 2"),
        (
            {"lora_rank": 2, "lora_targets": "to_q,to_k"},
            {"lora_rank": 2},
            r"--lora-targets is None, .* was trained with to_q,to_k; use --lora-targets to_q,to_k",
        ),
    ],
)
def test_a_resume_with_another_value_of_a_fixed_option_names_both(
    before: dict[str, object], now: dict[str, object], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(config(folder, max_steps=1, **before), ALONE)
    said = "the adapters fit only this random base, of this seed" in capsys.readouterr().err
    assert said is ("lora_rank" in before), "the tests' model has no weights"
    with pytest.raises(UsageError, match=message) as refused:
        train(config(folder, max_steps=2, resume=True, **now), ALONE)
    assert "--model" not in str(refused.value)


def test_a_resume_whose_generation_was_collected_is_told_to_take_a_new_plan(folder: Path) -> None:
    asked = config(folder, max_steps=1)
    train(asked, ALONE)
    (path,) = asked.store
    add_to_store(Path(path), samples({"train/128x128": 20}, "later/"))
    with lock_store(Path(path)):
        collect(Path(path), older_than_s=0.0)
    again = replace(asked, max_steps=2, resume=True)
    with pytest.raises(StateError, match=r"planned on generation 1 of .*tiny\.store, .* continue with --resume --new-plan"):
        train(again, ALONE)
    assert train(replace(again, new_plan=True), ALONE).steps_done == 2
