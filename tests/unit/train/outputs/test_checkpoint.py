"""Checkpoints are whole or passed over, and are written while training continues."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import re
import shutil
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from diffusers import UNet2DConditionModel

from bucketline.errors import StateError, TrainError
from bucketline.files.paths import CHECKPOINTS, METRICS
from bucketline.store.format.block import file_digest
from bucketline.train import checkpoint
from bucketline.train.checkpoint import (
    Output,
    RunState,
    Saver,
    WholeModel,
    copied,
    damage,
    folder_of_step,
    last_whole,
    load_optimizer,
    load_weights,
    read_state,
    set_aside,
)
from bucketline.train.optim import Average
from bucketline.train.step import Training
from tests.commands import spawn
from tests.kit import flip_bit, tree, untouched
from tests.unit.train.tiny_run import ALONE, UNET, config

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import nn

WAIT_S = 30.0
WEIGHTS = WholeModel(folder="unet")
MODEL, MOMENTS = "unet/diffusion_pytorch_model.safetensors", "optimizer/shard-00001-model-00001-of-00001.safetensors"


@dataclass(kw_only=True)
class Trained:
    """The parts of a checkpoint."""

    model: nn.Module
    average: Average
    optimizer: torch.optim.Optimizer

    def step(self, seed: int = 0) -> None:
        drawn = torch.Generator().manual_seed(seed)
        for parameter in self.model.parameters():
            parameter.grad = torch.empty_like(parameter).copy_(torch.randn(parameter.shape, generator=drawn))
        self.optimizer.step()
        self.optimizer.zero_grad()


def parts(seed: int = 0, layout: torch.memory_format = torch.contiguous_format, **changes: Any) -> Trained:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = UNet2DConditionModel.from_config({**UNET, **changes}).to(memory_format=layout)
    made = Trained(model=model, average=Average(model, 0.9), optimizer=torch.optim.AdamW(model.parameters(), fused=True))
    made.step(seed)
    return made


def state(steps_done: int) -> RunState:
    return RunState(
        version=checkpoint.VERSION,
        steps_done=steps_done,
        loader={"step": steps_done},
        config={"seed": 0},
    )


def save(output_dir: Path, trained: Trained, kept: RunState, *, keep: int) -> Path:
    copies = copied(WEIGHTS, trained.model, trained.average, trained.optimizer)
    folder = output_dir / CHECKPOINTS / folder_of_step(kept.steps_done)
    checkpoint.begin_aside(folder)
    checkpoint.write(folder, WEIGHTS, WEIGHTS.config(trained.model), copies, kept, card="# a card", keep=keep)
    return folder


def load(folder: Path, trained: Trained) -> None:
    load_weights(folder, WEIGHTS, trained.model)
    with trained.average.applied():
        load_weights(folder, WEIGHTS, trained.model, averaged=True)
    load_optimizer(folder, trained.model, trained.optimizer)


def unsaved(folder: Path) -> Trained:
    """Return other parts, as at the start of a run: the optimizer has no state."""
    made = parts(1)
    made.optimizer = torch.optim.AdamW(made.model.parameters(), fused=True, weight_decay=0.5)
    load(folder, made)
    return made


def names(output_dir: Path) -> list[str]:
    return sorted(path.name for path in (output_dir / CHECKPOINTS).iterdir())


def test_what_is_loaded_is_what_was_saved_and_the_options_are_this_runs(tmp_path: Path) -> None:
    saved = parts(0)
    folder = save(tmp_path, saved, state(5), keep=2)
    loaded = unsaved(folder)
    for averaged in (False, True):
        with contextlib.ExitStack() as both:
            for one in (saved, loaded) if averaged else ():
                both.enter_context(one.average.applied())
            own = loaded.model.state_dict()
            assert all(torch.equal(tensor, own[name]) for name, tensor in saved.model.state_dict().items())
    before, after = saved.optimizer.state_dict()["state"], loaded.optimizer.state_dict()["state"]
    assert all(torch.equal(before[i][name], after[i][name]) for i in before for name in before[i])
    assert loaded.optimizer.param_groups[0]["weight_decay"] == 0.5
    assert read_state(folder) == state(5)


@pytest.mark.parametrize("saved_as", [torch.channels_last, torch.contiguous_format], ids=str)
def test_moments_are_laid_out_as_their_parameters_and_the_next_step_is_the_same(
    tmp_path: Path, saved_as: torch.memory_format
) -> None:
    """On a GPU parameters are channels_last; the fused step refuses moments of another layout there, and mixes them up here."""
    saved, loaded = parts(0, saved_as), parts(1, torch.channels_last)
    saved.step(2)
    load(save(tmp_path, saved, state(1), keep=1), loaded)
    for parameter in loaded.model.parameters():
        entry = loaded.optimizer.state[parameter]
        assert entry["exp_avg"].stride() == entry["exp_avg_sq"].stride() == parameter.stride()
    for trained in (saved, loaded):
        trained.step(3)
    for name, tensor in saved.model.state_dict().items():
        torch.testing.assert_close(loaded.model.state_dict()[name], tensor, rtol=1e-6, atol=1e-7)


def test_the_newest_few_stay_and_what_a_resume_has_skipped_is_set_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained = parts()
    for steps_done in (1, 2, 3, 9):
        save(tmp_path, trained, state(steps_done), keep=2)
    assert names(tmp_path) == ["step-00000003", "step-00000009"]
    with caplog.at_level(logging.WARNING):
        set_aside(tmp_path / CHECKPOINTS / "step-00000003")
    (tmp_path / CHECKPOINTS / "step-00000007.partial").mkdir()  # of a killed process
    save(tmp_path, trained, state(4), keep=2)
    *kept, aside = names(tmp_path)
    assert kept == ["step-00000003", "step-00000004"]
    assert re.fullmatch(r"step-00000009\.damaged-\w{4}", aside)
    assert f"step-00000009 is now {aside} and does not count as kept; remove it" in caplog.text
    save(tmp_path, trained, state(5), keep=2)
    assert names(tmp_path) == ["step-00000004", "step-00000005", aside]


@pytest.mark.parametrize("harm", ["flipped", "cut", "gone", "no digests", "being written"])
def test_a_torn_checkpoint_is_passed_over_with_a_warning_that_names_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: str
) -> None:
    good = save(tmp_path, parts(), state(1), keep=2)
    torn = shutil.copytree(good, good.with_name("step-00000002.partial" if harm == "being written" else "step-00000002"))
    whole = tree(torn)
    for name in ("digests.json",) if harm == "no digests" else (MODEL, MOMENTS, "state.json", "unet_ema/config.json"):
        if harm == "flipped":
            flip_bit(torn / name, 4 * (torn / name).stat().st_size)
        elif harm == "cut":
            (torn / name).write_bytes(whole[name][:-1])
        elif harm != "being written":
            (torn / name).unlink()
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert last_whole(tmp_path) == good
        if harm != "being written":
            assert "step-00000002 is incomplete or damaged" in caplog.text
            assert name.rpartition("/")[2] in caplog.text
        (torn / name).write_bytes(whole[name])
    (good / "digests.json").unlink()
    (torn / "digests.json").unlink()
    with pytest.raises(TrainError, match="no complete checkpoint"):
        last_whole(tmp_path)


@pytest.mark.slow
def test_a_full_disk_is_called_that_whichever_library_writes_when_it_is_full(tmp_path: Path) -> None:
    ran = spawn([sys.executable, "-m", "tests.unit.train.outputs.filled_disk", tmp_path]).done()
    kind, *said, done = ran.out.splitlines()
    assert done.endswith("done")
    assert said
    assert kind == "limit" or all("cannot be written: No space left on device, " in line for line in said)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, parts(), state(1), keep=1)
    narrow, shallow = parts(block_out_channels=[4, 8]), parts(layers_per_block=2)
    for other in (narrow, shallow):
        with pytest.raises(StateError, match=r"does not fit this model: its \d+ tensors differ"):
            load(folder, other)
    with pytest.raises(StateError, match=r"does not fit this model: Size mismatch .*\.exp_avg"):
        load_optimizer(folder, narrow.model, narrow.optimizer)
    folder = save(tmp_path, shallow, state(2), keep=1)
    with pytest.raises(StateError, match=r"does not fit this model: the optimizer has no state\.\w+"):
        load_optimizer(folder, narrow.model, narrow.optimizer)


class _Ran:
    """The function that a pickle of it calls when it is loaded."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("ran",)


LIES = {
    "a pickle that acts": (MOMENTS, pickle.dumps(_Ran(), protocol=2), "does not fit this model"),
    "nothing": (MOMENTS, b"", "does not fit this model"),
    "JSON without end": ("state.json", b"[" * 100_000, "state.json is not a checkpoint state"),
    "another version": ("state.json", b'{"version": 99}', "has version 99, this trainer reads 1"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_file_that_is_something_else_is_refused_and_nothing_in_it_runs(
    tmp_path: Path, lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its digest is right."""
    monkeypatch.chdir(tmp_path)
    (name, data, message), folder = LIES[lie], save(tmp_path, parts(), state(1), keep=1)
    (folder / name).write_bytes(data)
    size, digest = file_digest(folder / name)
    document = json.loads((folder / "digests.json").read_bytes())
    document[name] = [size, digest]
    (folder / "digests.json").write_text(json.dumps(document), encoding="utf-8")
    assert damage(folder) is None
    with pytest.raises(StateError, match=message):
        load(folder, parts())
    assert not (tmp_path / "ran").exists()
    (folder / "digests.json").write_bytes(b"[" * 100_000)
    assert str(damage(folder)).startswith("digests.json: ")


# ---------------------------------------------------------------------------------------------- while training continues


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
    made = Saver(training, ALONE, WEIGHTS, None, lambda *_: None)
    yield made
    made.close()


def test_steps_continue_while_a_checkpoint_is_written_and_the_next_save_waits_for_it(
    saver: Saver, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, is_reached, may_continue = checkpoint.write, threading.Event(), threading.Event()

    def held(*given: Any, **options: Any) -> None:
        is_reached.set()
        assert may_continue.wait(WAIT_S)
        write(*given, **options)

    monkeypatch.setattr(checkpoint, "write", held)
    saver.save({Output.CHECKPOINT: "# a card"}, state(1))
    assert is_reached.wait(WAIT_S)
    for _ in range(3):
        trained.step()
        saver.poll()
    first = saver.saved[Output.CHECKPOINT]
    assert not first.exists()
    saving = threading.Thread(target=saver.save, args=({Output.CHECKPOINT: "# a card"}, state(4)))
    saving.start()
    saving.join(0.05)
    assert saving.is_alive()
    may_continue.set()
    saving.join(WAIT_S)
    assert first.exists(), "one at a time, in order"
    saver.finish()
    folders = (first, saver.saved[Output.CHECKPOINT])
    assert [damage(folder) for folder in folders] == [None, None]
    states = [unsaved(folder).optimizer.state_dict()["state"].values() for folder in folders]
    assert [{int(entry["step"]) for entry in found} for found in states] == [{1}, {4}]


def test_a_failure_of_the_writer_is_raised_between_steps_and_once_and_earlier_ones_stay(
    saver: Saver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    saver.save({Output.CHECKPOINT: "# a card"}, state(1))
    saver.finish()
    with untouched(tmp_path / "run"):
        monkeypatch.setattr(checkpoint, "sync_tree", full)
        saver.save({Output.CHECKPOINT: "# a card"}, state(2))
        saver.close()
        with pytest.raises(TrainError, match=r"step-00000002 cannot be written: No space left on device, \d+ bytes are free"):
            saver.poll()
        saver.finish()
