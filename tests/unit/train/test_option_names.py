"""The answers to options that other trainers have."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from bucketline.help_screen import options_of
from bucketline.train.config import TrainConfig
from bucketline.train.option_names import ELSEWHERE, translated
from tests.commands import BIN, spawn

if TYPE_CHECKING:
    from bucketline.typed_json import Json

OURS = {word for one in options_of(TrainConfig) for word in one.words}


def test_no_answer_is_for_an_option_that_the_trainer_has() -> None:
    assert not OURS & {*ELSEWHERE}


@pytest.mark.parametrize(
    ("then", "now"),
    [
        ({"accum": 2, "seed": 0}, {"accumulation": 2, "seed": 0}),
        ({"ema": "off", "ema_decay": 0.9999, "ema_every": 1}, {"ema": "off"}),
        ({"ema": "cpu", "ema_decay": 0.999, "ema_every": 10}, {"ema": "0.999:cpu:10"}),
        ({"ema_decay": 0.999}, {"ema": "0.999:device"}),
        (
            {"timestep_sampling": "logit_normal", "logit_mean": -0.5, "logit_std": 1.0, "mode_scale": 1.29},
            {"timesteps": "logit-normal:-0.5,1"},
        ),
        ({"timestep_sampling": "mode", "logit_mean": 0.0, "logit_std": 1.0, "mode_scale": 0.5}, {"timesteps": "mode:0.5"}),
        ({"timestep_sampling": "uniform", "logit_mean": 0.0}, {"timesteps": "uniform"}),
        ({"timestep_min": 0.0, "timestep_max": 0.9}, {"timestep_range": "0:0.9"}),
        ({"min_snr_gamma": 5.0, "flow_weighting": None}, {"loss_weight": "min-snr:5"}),
        ({"min_snr_gamma": None, "flow_weighting": "sigma_sqrt"}, {"loss_weight": "sigma-sqrt"}),
        ({"min_snr_gamma": None}, {"loss_weight": "none"}),
        (
            {"lr_schedule": "cosine", "lr_floor": 0.1, "schedule_steps": 20, "decay_steps": None},
            {"lr_schedule": "cosine:0.1@20"},
        ),
        ({"lr_schedule": "wsd", "lr_floor": 0.1, "schedule_steps": 21}, {"lr_schedule": "wsd:5:0.1@21"}),
        ({"lr_schedule": "wsd", "lr_floor": 0.0, "schedule_steps": 21}, {"lr_schedule": "wsd@21"}),
        ({"lr_schedule": "constant", "lr_floor": 0.1, "schedule_steps": None}, {"lr_schedule": "constant"}),
        ({"lr_schedule": "cosine:0.1@20", "ema": "0.9:cpu"}, {"lr_schedule": "cosine:0.1@20", "ema": "0.9:cpu"}),
        ({"checkpoint_every": 4, "checkpoint_minutes": 30.0}, {"save_every": "4,30m"}),
        ({"checkpoint_every": None, "checkpoint_minutes": None}, {"save_every": None}),
        ({"checkpoint_every": 4}, {"save_every": "4,30m"}),
        ({"sharding": "hsdp", "shard_ranks": None}, {"sharding": "fsdp:machine"}),
        ({"sharding": "hsdp", "shard_ranks": 8}, {"sharding": "fsdp:8"}),
        ({"sharding": "fsdp", "shard_ranks": None}, {"sharding": "fsdp"}),
        ({"follow": True, "wait_rows": 64}, {"follow": 64}),
        ({"push_to_hub": "me/a", "push_exports": True}, {"push_to_hub": "me/a:exports"}),
        ({"store": ["a", "b:2"], "store_weight": [1.0, 0.5]}, {"store": ["a@1", "b:2@0.5"]}),
        ({"batch_size": None, "batch_pixels": 1 << 22, "batch_tokens": None, "batch_multiple": 8}, {"batch": "4MP/8"}),
        (
            {"memory": "24G", "save_every": "1000, 60m", "batch": "4096tok"},
            {"memory": "24GiB", "save_every": "1000,1h", "batch": "4ktok"},
        ),
        ({"memory": None, "save_every": None}, {"memory": None, "save_every": None}),
    ],
)
def test_options_that_an_older_version_recorded_are_spelt_as_today(then: dict[str, Json], now: dict[str, Json]) -> None:
    fixed = {"guidance": 3.5, "weights": "fp32", "optimizer": "adamw"}
    assert translated(then, TrainConfig) == {**fixed, **now}, "these had one value before they were options"
    assert {*now} <= {"seed", *TrainConfig.__dataclass_fields__}


def test_the_options_that_answers_name_exist() -> None:
    known = OURS | {"--grid", "--crop", "--flip", "--help", "--model", "--epochs", "--nproc_per_node"}  # of other commands too
    named = {word for answer in ELSEWHERE.values() for word in re.findall(r"--[a-z0-9_-]+", answer)}
    assert named <= known
    assert {"--lr", "--resolution", "--mixed-precision", "--train-batch-size", "--network-dim", "--device"} <= {*ELSEWHERE}


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ("--lr=1e-4", "there is no option --lr; here it is --learning-rate"),
        ("--mixed_precision", "there is no option --mixed-precision; here it is --precision"),
        ("--resolution", "there is no option --resolution; the sizes are the store's, packed by `ingest pack --grid`"),
        (
            "--nproc_per_node=2",
            "there is no option --nproc-per-node; several processes are started by `torchrun --nproc_per_node",
        ),
        ("--prefetch-mib", "there is no option --prefetch-mib; here it is prefetch_bytes, in a run file"),
    ],
)
def test_an_option_of_another_trainer_is_answered_with_ours(given: str, answer: str) -> None:
    refused = spawn([BIN / "bucketline", "train", given, "1"])
    assert (refused.code, refused.out) == (2, "")
    assert answer in refused.err
