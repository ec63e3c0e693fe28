"""Runs with each optimizer: in two parts, and refused together with what it excludes."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from bucketline.errors import MissingExtraError, UsageError
from bucketline.extras import extra_named
from bucketline.train.config import Precision, WeightDtype
from bucketline.train.optim import NAMED, find_optimizer, make_optimizer, refuse_combinations
from bucketline.train.run import train
from tests.unit.train.outputs.test_checkpoint import MOMENTS
from tests.unit.train.tiny_run import ALONE, config, train_in_two_parts, write_unet

if TYPE_CHECKING:
    from pathlib import Path


BF16: dict[str, Any] = {"weights": WeightDtype.BF16, "precision": Precision.BF16}
RUNS: list[Any] = [
    *(pytest.param({"optimizer": name}, id=name) for name in (*NAMED, "torch.optim:NAdam") if name != "adamw"),
    *(pytest.param({"optimizer": name, "lora_rank": 4}, id=f"{name} lora") for name in ("muon", "prodigy")),
    *(
        pytest.param({"optimizer": name, **BF16, **more}, id=f"{name} bf16")
        for name, more in (
            ("adamw", {"ema": "0.9999:cpu:2"}),
            ("adamw-8bit", {"clip_norm": None}),
        )
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("chosen", RUNS)
def test_a_run_in_two_parts_equals_one_to_the_bit(folder: Path, chosen: dict[str, Any]) -> None:
    write_unet(folder / "model", block_out_channels=[8, 32])  # moments of 8 bits are for weights of 4096 values
    more = {"accumulation": 1, "num_images": 1, "validate_every": 2, "learning_rate": None, "warmup_steps": 2, **chosen}
    whole = config(folder, output_dir=folder / "whole", max_steps=4, **more)
    parts = train_in_two_parts(whole, 2)
    last = "checkpoints/step-00000004"
    part = "lora" if "lora_rank" in chosen else "unet"
    files = [one for end in ("", "_ema") for one in (whole.output_dir / last / (part + end)).glob("[dp]*.safetensors")]
    assert len(files) == 2
    for file in files:
        own, other = load_file(file), load_file(parts / last / file.parent.name / file.name)
        assert all(torch.equal(tensor, other[name]) for name, tensor in own.items())
    last_weights, average = (load_file(file) for file in files)
    assert any(not torch.equal(tensor, average[name]) for name, tensor in last_weights.items())
    whole_state, state = (load_file(run / last / MOMENTS) for run in (whole.output_dir, parts))
    assert chosen["optimizer"] != "adamw-8bit" or any(name.endswith("exp_avg.codes") for name in state)
    assert whole_state.keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in whole_state.items())
    numbers = [json.loads((run / last / "state.json").read_bytes())["optimizer"] for run in (whole.output_dir, parts)]
    assert numbers[0] == numbers[1]


def test_another_optimizer_than_the_checkpoints_is_refused_naming_both(folder: Path) -> None:
    asked = config(folder, max_steps=1, accumulation=1, ema="off")
    train(asked, ALONE)
    other = dataclasses.replace(asked, max_steps=2, resume=True, optimizer="muon")
    with pytest.raises(UsageError, match=r"--optimizer is muon, .*step-00000001 was trained with adamw; use --optimizer"):
        train(other, ALONE)


@pytest.mark.parametrize(
    ("chosen", "world_size", "message"),
    [
        (
            {"optimizer": "prodigy", "betas": "0.9,0.99"},
            1,
            "--betas is 0.9,0.99: leave it out, or choose adamw or adamw-8bit",
        ),
        ({"optimizer": "muon", **BF16}, 1, "leave out --weights bf16, or choose adamw or adamw-8bit"),
        (
            {"weights": WeightDtype.BF16, "precision": Precision.FP32},
            1,
            r"is fp32 \(also by auto, .*\): give --precision bf16 as well",
        ),
        ({**BF16, "lora_rank": 4}, 1, "--weights is bf16 with --lora-rank 4"),
        ({"optimizer": "adamw-8bit", "sharding": "fsdp"}, 2, "give --sharding ddp, or choose adamw or muon"),
        ({"optimizer": "prodigy", "sharding": "fsdp"}, 2, "--optimizer is prodigy, which may not work on sharded"),
        ({"optimizer": "lion"}, 1, "--optimizer is 'lion', expected adamw, adamw-8bit, muon, prodigy, or any other"),
        (
            {"optimizer": "muon", "optimizer_arg": ("momentum=0.9",)},
            1,
            "--optimizer-arg is momentum=0.9, and --optimizer is muon",
        ),
        ({"optimizer": "torch.optim:NAdam", "optimizer_arg": ("eps",)}, 1, "--optimizer-arg is 'eps', expected NAME=VALUE"),
        ({"optimizer": "torch.optim:NAdam", "optimizer_arg": ("lr=1",)}, 1, "--optimizer-arg is 'lr=1'; use --learning-rate"),
        ({"optimizer": "torch.optim:NAdam", **BF16}, 1, "leave out --weights bf16"),
        ({"optimizer": "torch.optim:NAdam", "sharding": "fsdp"}, 2, "give --sharding ddp"),
    ],
)
def test_what_an_optimizer_excludes_is_refused_by_name(
    tmp_path: Path, chosen: dict[str, Any], world_size: int, message: str
) -> None:
    more = {"accumulation": 1, **chosen, "optimizer": chosen.get("optimizer", "adamw")}
    with pytest.raises(UsageError, match=message):
        refuse_combinations(config(tmp_path, **more), world_size)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"optimizer": "no_such_package:Lion"}, "cannot be imported: No module named 'no_such_package'. Install"),
        ({"optimizer": "torch.optim:Lion"}, "cannot be imported: .*no attribute 'Lion'"),
        ({"optimizer": "torch.nn:Linear"}, r"it is not a torch\.optim\.Optimizer"),
        ({"optimizer": "torch.optim:LBFGS"}, "its step computes the loss again"),
        ({"optimizer": f"{__name__}:TwoWeights"}, "it has other weights for evaluation"),
        ({"optimizer": "torch.optim:NAdam", "optimizer_arg": ("speed=9",)}, "does not take lr speed=9: .* Fix --optimizer-arg"),
        ({"optimizer": "torch.optim:NAdam", "optimizer_arg": ("eps=-1",)}, "does not take lr eps=-1: .* Fix --optimizer-arg"),
    ],
)
def test_another_optimizer_that_cannot_be_used_is_refused(tmp_path: Path, chosen: dict[str, Any], message: str) -> None:
    asked = config(tmp_path, **chosen)
    refuse_combinations(asked, 1)
    with pytest.raises(UsageError, match=message):
        make_optimizer(asked, torch.nn.Linear(2, 2), compiled=False)


class TwoWeights(torch.optim.SGD):
    """As a schedule-free optimizer is."""

    def eval(self) -> None:
        """Exchange the weights."""


def test_a_missing_library_is_told_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("adamw_8bit", "prodigy"):
        monkeypatch.delitem(sys.modules, f"bucketline.train.optimizers.{module}", raising=False)
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'bucketline\[quantised\]'"), extra_named("train"):
        find_optimizer(config(tmp_path, optimizer="adamw-8bit"))
    monkeypatch.setitem(sys.modules, "prodigyopt", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'bucketline\[optimizers\]'"), extra_named("train"):
        find_optimizer(config(tmp_path, optimizer="prodigy"))
