"""Saving a step while training continues: whole, of one step, and one at a time."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from bucketline.errors import TrainError
from bucketline.files.run_marker import METRICS
from bucketline.train import checkpoint
from bucketline.train.outputs import saved_tensors
from bucketline.train.outputs import saver as saving
from bucketline.train.outputs.saver import Output, Saver
from bucketline.train.step import Training
from tests.unit.train.outputs.test_checkpoint import WEIGHTS, load, parts, state
from tests.unit.train.tiny_run import ALONE, config

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.unit.train.outputs.test_checkpoint import Trained

WAIT_S = 30.0


class Gate:
    """A stop for a thread, until it is opened."""

    def __init__(self) -> None:
        self.is_reached, self._is_open = threading.Event(), threading.Event()

    def open(self) -> None:
        self._is_open.set()

    def holding(self, function: Any) -> Any:
        def held(*arguments: Any, **options: Any) -> Any:
            self.is_reached.set()
            assert self._is_open.wait(WAIT_S)
            return function(*arguments, **options)

        return held


@pytest.fixture
def trained() -> Trained:
    return parts(0)


@pytest.fixture
def saver(tmp_path: Path, trained: Trained) -> Iterator[Saver]:
    training: Any = Training(
        config=config(tmp_path),
        family=None,  # type: ignore[arg-type]
        model=trained.model,
        optimizer=trained.optimizer,
        average=trained.average,
        prep=None,  # type: ignore[arg-type]
        autocast=torch.autocast("cpu", enabled=False),
    )
    training.config.output_dir.mkdir()
    (training.config.output_dir / METRICS).touch()
    made = Saver(training, ALONE, WEIGHTS, None)
    yield made
    made.close()


def save(saver: Saver, steps_done: int) -> None:
    saver.save({Output.CHECKPOINT: "# a card"}, state(steps_done))


def step(trained: Trained) -> None:
    for parameter in trained.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    trained.optimizer.step()
    trained.average.update(0)


def test_steps_go_on_while_a_checkpoint_is_written_and_the_next_save_waits_for_it(
    saver: Saver, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    monkeypatch.setattr(saved_tensors, "write", gate.holding(saved_tensors.write))
    save(saver, 1)
    assert gate.is_reached.wait(WAIT_S)
    for _ in range(3):
        step(trained)
        saver.poll()
    first = saver.saved[Output.CHECKPOINT]
    assert not first.exists()
    saving = threading.Thread(target=save, args=(saver, 4))
    saving.start()
    saving.join(0.05)
    assert saving.is_alive()
    gate.open()
    saving.join(WAIT_S)
    assert first.exists(), "one at a time, in order"
    saver.finish()
    found = []
    for folder in (first, saver.saved[Output.CHECKPOINT]):
        assert checkpoint.damage(folder) is None
        loaded = parts(1)
        load(folder, loaded)
        found.append({int(entry["step"]) for entry in loaded.optimizer.state_dict()["state"].values()})
    assert found == [{1}, {4}]


def test_a_failure_of_the_writer_is_raised_between_steps_and_once(
    saver: Saver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saved_tensors, "_sync_tree", full)
    save(saver, 1)
    saver._pool.shutdown()
    with pytest.raises(TrainError, match=r"step-00000001 cannot be written: .*No space left"):
        saver.poll()
    saver.finish()
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def test_the_memory_of_the_first_save_is_made_after_the_first_step_and_taken_by_it(saver: Saver) -> None:
    saver.poll()
    saver.finish()
    made = dict(saver._memory._memory)
    assert {section for section, _ in made} == {"model", "average", "optimizer"}
    save(saver, 1)
    saver.finish()
    assert saver._memory._memory.keys() == made.keys()
    assert all(saver._memory._memory[key] is tensor for key, tensor in made.items())


def test_a_failure_of_a_copy_ends_the_save_and_leaves_nothing(
    saver: Saver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no such memory")

    monkeypatch.setattr(saving, "copy_through", fail)
    with pytest.raises(RuntimeError, match="no such memory"):
        save(saver, 1)
    saver.finish()
    assert not (tmp_path / "run" / "checkpoints").exists()
