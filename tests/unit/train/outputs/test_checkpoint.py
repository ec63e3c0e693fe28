"""Checkpoints are whole or passed over."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import pickle
import shutil
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from diffusers import UNet2DConditionModel

from bucketline.errors import StateError, TrainError
from bucketline.files.run_marker import CHECKPOINTS
from bucketline.loader.mixture import StoreId
from bucketline.store.format.hashing import file_digest
from bucketline.train import checkpoint
from bucketline.train.checkpoint import RunState, damage, last_whole, read_state
from bucketline.train.ema import Average
from bucketline.train.outputs import saved_tensors
from bucketline.train.outputs.saver import HostMemory, copied
from bucketline.train.outputs.weights import WholeModel
from tests.commands import spawn
from tests.kit import flip_bit, tree
from tests.unit.train.tiny_run import UNET

BEFORE: dict[str, Json] = {
    "guidance": 3.5,
    "weights": "fp32",
    "optimizer": "adamw",
}  # of a state from before there were these options

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from bucketline.typed_json import Json


@dataclass(kw_only=True)
class Trained:
    """The parts of a checkpoint."""

    model: nn.Module
    average: Average
    optimizer: torch.optim.Optimizer


WEIGHTS = WholeModel(folder="unet")


def parts(seed: int = 0, layout: torch.memory_format = torch.contiguous_format, **changes: Any) -> Trained:
    """Make a model that has taken one optimizer step."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = UNet2DConditionModel.from_config({**UNET, **changes}).to(memory_format=layout)
    average = Average(model, 0.9)  # of the weights before the step
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return Trained(model=model, average=average, optimizer=optimizer)


def state(steps_done: int) -> RunState:
    return RunState(
        version=checkpoint.VERSION,
        steps_done=steps_done,
        world_size=1,
        stores=(StoreId(path="a.store", store_id="s", generation=1, digest="m", repeats=1),),
        plan_digest="p",
        loader={"step": steps_done},
        window=None,
        config={"seed": 0},
    )


def save(output_dir: Path, trained: Trained, kept: RunState, *, keep: int) -> Path:
    copies = copied(HostMemory(), WEIGHTS, trained.model, trained.average, trained.optimizer)
    folder = output_dir / CHECKPOINTS / checkpoint.folder_of_step(kept.steps_done)
    saved_tensors.write(folder, WEIGHTS, copies, kept, card="# a card", keep=keep)
    return folder


def load(folder: Path, trained: Trained) -> None:
    saved_tensors.load_weights(folder, WEIGHTS, trained.model)
    with trained.average.applied():
        saved_tensors.load_weights(folder, WEIGHTS, trained.model, averaged=True)
    saved_tensors.load_saved_optimizer(folder, trained.optimizer)


def test_what_is_loaded_is_what_was_saved(tmp_path: Path) -> None:
    saved, loaded = parts(0), parts(1)
    folder = save(tmp_path, saved, state(5), keep=2)
    load(folder, loaded)
    for name, tensor in saved.model.state_dict().items():
        assert torch.equal(tensor, loaded.model.state_dict()[name])
    with saved.average.applied(), loaded.average.applied():
        for name, tensor in saved.model.state_dict().items():
            assert torch.equal(tensor, loaded.model.state_dict()[name])
    before, after = saved.optimizer.state_dict()["state"], loaded.optimizer.state_dict()["state"]
    assert all(torch.equal(before[i][name], after[i][name]) for i in before for name in before[i])
    assert read_state(folder) == dataclasses.replace(state(5), config={**BEFORE, **state(5).config})


def test_options_have_their_names_of_now_in_a_state_of_the_last_version(tmp_path: Path) -> None:
    then: dict[str, Json] = {"accum": 2, "seed": 0, "pictures_every": None, "ema_decay": 0.999}
    now = {**BEFORE, "accumulation": 2, "seed": 0, "images_every": None, "ema": "0.999:device"}
    assert read_state(save(tmp_path, parts(), dataclasses.replace(state(1), config=then), keep=1)).config == now


def test_the_newest_few_stay(tmp_path: Path) -> None:
    trained = parts()
    for steps_done in (1, 2, 3):
        save(tmp_path, trained, state(steps_done), keep=2)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000002", "step-00000003"]


@pytest.mark.parametrize(
    "file", ["unet/diffusion_pytorch_model.safetensors", "optimizer.pt", "state.json", "unet_ema/config.json"]
)
@pytest.mark.parametrize("harm", ["flipped", "cut", "gone"])
def test_a_torn_checkpoint_is_passed_over_with_a_warning_that_names_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str, harm: str
) -> None:
    trained = parts()
    good = save(tmp_path, trained, state(1), keep=2)
    torn = save(tmp_path, trained, state(2), keep=2) / file
    if harm == "flipped":
        flip_bit(torn, 4 * torn.stat().st_size)
    elif harm == "cut":
        torn.write_bytes(torn.read_bytes()[:-1])
    else:
        torn.unlink()
    with caplog.at_level(logging.WARNING):
        assert last_whole(tmp_path) == good
    assert "step-00000002 is incomplete or damaged" in caplog.text
    assert torn.name in caplog.text


def test_a_checkpoint_without_its_digests_is_torn(tmp_path: Path) -> None:
    folder = save(tmp_path, parts(), state(1), keep=1)
    (folder / "digests.json").unlink()
    assert damage(folder) is not None
    with pytest.raises(TrainError, match="no complete checkpoint"):
        last_whole(tmp_path)


def test_a_checkpoint_that_was_being_written_is_not_taken(tmp_path: Path) -> None:
    good = save(tmp_path, parts(), state(1), keep=1)
    shutil.copytree(good, good.with_name("step-00000009.partial"))
    assert last_whole(tmp_path) == good


def test_a_full_disk_leaves_the_checkpoints_before_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = parts()
    save(tmp_path, trained, state(1), keep=1)
    before = tree(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saved_tensors, "_sync_tree", full)
    with pytest.raises(TrainError, match=r"step-00000002 cannot be written: No space left on device, \d+ bytes are free"):
        save(tmp_path, trained, state(2), keep=1)
    assert tree(tmp_path) == before


@pytest.mark.slow
def test_a_full_disk_is_called_that_whichever_library_writes_when_it_is_full(tmp_path: Path) -> None:
    ran = spawn([sys.executable, "-m", "tests.unit.train.outputs.filled_disk", tmp_path])
    assert ran.code == 0, ran.out + ran.err
    kind, *said, done = ran.out.splitlines()
    assert done.endswith("done")
    assert any("safetensors" in line or "serializing" in line for line in said)
    assert any("inline_container" in line or "iostream" in line for line in said)
    assert kind == "limit" or all("cannot be written: No space left on device, " in line for line in said)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, parts(), state(1), keep=1)
    with pytest.raises(StateError, match="does not fit this model"):
        load(folder, parts(block_out_channels=[4, 8]))


def with_right_digests(folder: Path, name: str, data: bytes) -> Path:
    """Put other bytes into a checkpoint's file, which its digests say are those."""
    (folder / name).write_bytes(data)
    size, digest = file_digest(folder / name)
    document = json.loads((folder / "digests.json").read_bytes())
    document["files"][name] = {"num_bytes": size, "digest": digest}
    (folder / "digests.json").write_text(json.dumps(document), encoding="utf-8")
    assert damage(folder) is None
    return folder


class _Ran:
    """The function that a pickle of it calls when it is loaded."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("ran",)


@pytest.mark.parametrize(
    "data", [pickle.dumps(_Ran(), protocol=2), b"", b"\x80\x02"], ids=["a pickle that acts", "nothing", "a torn pickle"]
)
def test_an_optimizer_that_is_something_else_is_refused_and_nothing_in_it_runs(
    tmp_path: Path, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = with_right_digests(save(tmp_path, parts(), state(1), keep=1), "optimizer.pt", data)
    with pytest.raises(StateError, match="does not fit this model"):
        load(folder, parts())
    assert not (tmp_path / "ran").exists()


def test_json_without_end_is_no_state_and_no_digests(tmp_path: Path) -> None:
    deep = b"[" * 100_000
    folder = with_right_digests(save(tmp_path, parts(), state(1), keep=1), "state.json", deep)
    with pytest.raises(StateError, match=r"state.json is not a checkpoint state"):
        read_state(folder)
    (folder / "digests.json").write_bytes(deep)
    assert str(damage(folder)).startswith("digests.json: ")


def test_a_checkpoint_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, parts(), state(1), keep=1)
    document = json.loads((folder / "state.json").read_bytes())
    (folder / "state.json").write_text(json.dumps({**document, "version": 99}), encoding="utf-8")
    with pytest.raises(StateError, match="has version 99, this trainer reads 3"):
        read_state(folder)


def test_a_torn_checkpoint_that_a_run_has_gone_back_behind_costs_no_whole_one(tmp_path: Path) -> None:
    save(tmp_path, parts(), state(1), keep=1)
    torn = save(tmp_path, parts(), state(9), keep=2)
    (torn / "digests.json").unlink()
    left = torn.with_name("step-00000007.partial")
    left.mkdir()
    saved = save(tmp_path, parts(), state(2), keep=1)
    assert last_whole(tmp_path) == saved
    assert not left.exists()


def names(output_dir: Path) -> list[str]:
    return sorted(path.name for path in (output_dir / "checkpoints").iterdir())


def test_a_checkpoint_with_files_of_other_lengths_does_not_count_as_kept(tmp_path: Path) -> None:
    trained = parts()
    for steps_done in (1, 2, 3):
        save(tmp_path, trained, state(steps_done), keep=9)
    (tmp_path / "checkpoints" / "step-00000003" / "optimizer.pt").write_bytes(b"cut")
    save(tmp_path, trained, state(4), keep=2)
    assert names(tmp_path) == ["step-00000002", "step-00000003", "step-00000004"]
    save(tmp_path, trained, state(5), keep=2)
    assert names(tmp_path) == ["step-00000004", "step-00000005"]


def test_what_a_resume_has_skipped_is_set_aside_under_its_own_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained = parts()
    resumed = save(tmp_path, trained, state(4), keep=2)
    for _ in range(2):
        save(tmp_path, trained, state(9), keep=2)
        with caplog.at_level(logging.WARNING):
            checkpoint.set_aside(resumed)
    save(tmp_path, trained, state(12), keep=2)
    assert names(tmp_path) == ["step-00000004", "step-00000009.damaged", "step-00000009.damaged1", "step-00000012"]
    assert "step-00000009 is now step-00000009.damaged1 and does not count as kept; remove it" in caplog.text


def test_a_resumed_optimizer_has_this_runs_options_and_the_saved_state(tmp_path: Path) -> None:
    trained, other = parts(), parts(1)
    folder = save(tmp_path, trained, state(1), keep=1)
    other.optimizer.param_groups[0]["weight_decay"] = 0.5
    load(folder, other)
    assert other.optimizer.param_groups[0]["weight_decay"] == 0.5
    pairs = zip(trained.optimizer.state_dict()["state"].values(), other.optimizer.state_dict()["state"].values(), strict=True)
    assert all(torch.equal(one["exp_avg"], two["exp_avg"]) for one, two in pairs)


@pytest.mark.parametrize("saved_as", [torch.channels_last, torch.contiguous_format], ids=str)
def test_moments_lie_in_memory_as_their_parameters_do_and_the_next_step_is_the_same(
    tmp_path: Path, saved_as: torch.memory_format
) -> None:
    """On a GPU parameters are channels_last; the fused step refuses moments of another layout there, and mixes them up here."""

    def step(trained: Trained, seed: int) -> None:
        drawn = torch.Generator().manual_seed(seed)
        for parameter in trained.model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=drawn)
            parameter.grad = torch.empty_like(parameter).copy_(parameter.grad)
        trained.optimizer.step()

    saved, loaded = parts(0, saved_as), parts(1, torch.channels_last)
    step(saved, 2)
    folder = save(tmp_path, saved, state(1), keep=1)
    load(folder, loaded)
    assert not all(parameter.is_contiguous() for parameter in loaded.model.parameters())
    for parameter in loaded.model.parameters():
        entry = loaded.optimizer.state[parameter]
        assert entry["exp_avg"].stride() == entry["exp_avg_sq"].stride() == parameter.stride()
    for trained in (saved, loaded):
        step(trained, 3)
    for name, tensor in saved.model.state_dict().items():
        torch.testing.assert_close(loaded.model.state_dict()[name], tensor, rtol=1e-6, atol=1e-7)
