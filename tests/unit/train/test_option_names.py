"""The answers to options that other trainers have."""

from __future__ import annotations

import re

import pytest

from bucketline.help_screen import options_of
from bucketline.train.config import TrainConfig
from bucketline.train.option_names import ELSEWHERE
from tests.commands import BIN, spawn

OURS = {word for one in options_of(TrainConfig) for word in one.words}


def test_no_answer_is_for_an_option_that_the_trainer_has() -> None:
    assert not OURS & {*ELSEWHERE}


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
