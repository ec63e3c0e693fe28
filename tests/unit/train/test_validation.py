"""Validation: weights respected, and the same whatever the batches."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from bucketline.loader import Batch
from bucketline.train.config import Objective
from bucketline.train.step import ValidationResult, validate
from tests.unit.train.tiny_run import make_batch, make_training

FAR = 1000


def run(folder: Path, *batches: Batch) -> ValidationResult:
    training = make_training(folder, val_timesteps=3, objective=Objective.EPSILON)
    return validate(training, batches, lambda sums: sums)


def test_the_loss_is_the_same_whatever_the_batches(tmp_path: Path) -> None:
    whole = run(tmp_path, make_batch(4))
    parts = run(tmp_path, make_batch(1), make_batch(3, first=1))
    assert parts.loss == pytest.approx(whole.loss, rel=1e-5)
    assert parts.zero_loss == pytest.approx(whole.zero_loss, rel=1e-6)


def test_a_row_that_only_fills_the_shape_counts_for_nothing(tmp_path: Path) -> None:
    batch = make_batch(3)
    filled = dataclasses.replace(batch, weight=torch.tensor([1.0, 1.0, 0.0]), columns={"target": batch.latents.clone()})
    filled.latents[2] = FAR
    assert run(tmp_path, filled).loss == pytest.approx(run(tmp_path, make_batch(2)).loss, rel=1e-5)


def test_predicting_zero_scores_the_mean_square_of_the_target(tmp_path: Path) -> None:
    assert run(tmp_path, make_batch(64)).zero_loss == pytest.approx(1.0, abs=0.03)


def test_the_mean_over_timesteps_which_are_the_middles_of_equal_parts_is_the_loss(tmp_path: Path) -> None:
    found = run(tmp_path, make_batch(2))
    assert list(found.loss_per_timestep) == [166, 500, 833]
    assert found.loss == pytest.approx(sum(found.loss_per_timestep.values()) / 3)
