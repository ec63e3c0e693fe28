"""Choices of a run: each resumed to the bit, and what it leaves."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bucketline.errors import UsageError
from bucketline.torch_setup import set_up_torch
from bucketline.train.config import Ema, LrSchedule, Objective
from bucketline.train.log import read_metrics
from bucketline.train.model import recomputed
from bucketline.train.run import train
from tests.unit.train.tiny_run import ALONE, built, config, train_in_two_parts

CHOICES: dict[str, dict[str, Any]] = {
    "no average, a cosine, a flow's weights": {
        "ema": "off",
        "lr_schedule": "cosine:0.1@5",
        "objective": Objective.FLOW,
        "loss_weight": "cosmap",
        "timesteps": "logit-normal",
    },
    "an average on the cpu, wsd, min-SNR and timesteps by mode": {
        "ema": "0.9999:cpu:2",
        "lr_schedule": "wsd:3:0.1@5",
        "loss_weight": "min-snr:5",
        "timesteps": "mode",
        "timestep_range": "0:0.9",
    },
    "an average every few steps, cosines": {"ema": "0.9999:2", "lr_schedule": "cosine-restarts:2@6"},
}


@pytest.mark.parametrize("choice", CHOICES)
def test_a_run_in_two_parts_equals_one_to_the_bit(folder: Path, choice: str) -> None:
    whole = config(folder, output_dir=folder / "whole", max_steps=6, accumulation=1, **CHOICES[choice])
    parts = train_in_two_parts(whole, 3)
    last = "checkpoints/step-00000006"
    for file in (whole.output_dir / last).glob("*/*.safetensors"):
        other = load_file(parts / last / file.parent.name / file.name)
        assert all(torch.equal(tensor, other[name]) for name, tensor in load_file(file).items())


def test_a_resume_keeps_the_horizon_of_the_run_that_it_continues(folder: Path) -> None:
    first = config(folder, max_steps=4, log_every=1, warmup_steps=1, lr_schedule="linear")
    train(first, ALONE)
    longer = dataclasses.replace(first, max_steps=6, resume=True)
    with pytest.raises(UsageError, match=r"rate is 0 from step 4 on: .* linear@6, or a floor above 0"):
        train(longer, ALONE)
    train(dataclasses.replace(longer, lr_schedule=LrSchedule.parse("linear:0.5", "it")), ALONE)
    rates = [float(str(line["lr"])) for line in read_metrics(folder / "run") if "lr" in line]
    assert rates == pytest.approx([1e-3, 1e-3, 2e-3 / 3, 1e-3 / 3, 5e-4, 5e-4])


def folders_of(checkpoint: Path) -> list[str]:
    return sorted(path.name for path in checkpoint.iterdir() if path.is_dir())


def test_without_an_average_no_folder_of_one_is_written_and_a_resume_may_begin_one(folder: Path) -> None:
    plain = config(folder, max_steps=2, ema=Ema())
    summary = train(plain, ALONE)
    assert folders_of(summary.checkpoint) == ["optimizer", "scheduler", "unet"]
    assert "unet_ema" not in (summary.checkpoint / "README.md").read_text(encoding="utf-8")
    summary = train(dataclasses.replace(plain, max_steps=3, resume=True, ema=Ema(decay=0.9999)), ALONE)
    assert folders_of(summary.checkpoint) == ["optimizer", "scheduler", "unet", "unet_ema"]
    summary = train(dataclasses.replace(plain, max_steps=4, resume=True), ALONE)
    assert folders_of(summary.checkpoint) == ["optimizer", "scheduler", "unet"]


@pytest.mark.parametrize("own", [{}, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, {"PYTORCH_ALLOC_CONF": "x:1"}])
def test_torchs_allocators_are_set_up_unless_the_user_has(own: dict[str, str]) -> None:
    for version, more in (("2.11.0", ""), ("2.13.0+cu130", ",pinned_max_round_threshold_mb:1")):
        environment = dict(own)
        set_up_torch(environment, version)
        assert environment == (own or {"PYTORCH_ALLOC_CONF": f"expandable_segments:True{more}"})


def test_the_installed_torch_knows_what_it_is_told() -> None:
    """Its parser takes any setting without a GPU, and refuses what it does not know with one; so look for the names."""
    environment: dict[str, str] = {}
    set_up_torch(environment, torch.__version__)
    library = (Path(torch.__file__).parent / "lib" / "libc10.so").read_bytes()
    for setting in environment["PYTORCH_ALLOC_CONF"].split(","):
        assert setting.partition(":")[0].encode() in library


def test_recomputing_saves_no_generators_state(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be read from the device for each block and step."""
    run = built(config(folder, recompute=1.0))
    functions = [getattr(module, "_gradient_checkpointing_func", None) for module in run.training.model.modules()]
    assert {function for function in functions if function} == {recomputed}

    def refused() -> torch.Tensor:
        raise AssertionError("a state was read")

    monkeypatch.setattr(torch, "get_rng_state", refused)
    block, inputs = torch.nn.Linear(3, 3), torch.ones(2, 3, requires_grad=True)
    result = recomputed(block, inputs)
    result.sum().backward()
    assert torch.equal(result, block(inputs))
