"""The time that a save stops training is in the step that follows it."""

from __future__ import annotations

import itertools

import pytest

from bucketline.bench.cases.train import TrainSaves, results_of_saves
from tests.unit.bench.measured import measured


def test_a_step_with_a_save_is_held_against_the_others() -> None:
    took = [1.0, 1.0, 9.0, 1.0, 1.0, 3.0, 1.0, 1.0, 5.0, 1.0, 1.0]  # after 1 step, and after 3, 6 and 9 a save
    first_end = 100.0
    found = {one.subject: one for one in results_of_saves("m", [*itertools.accumulate(took, initial=first_end)], 3)}
    assert found["a step"].median == 1.0
    assert found["the first step with a save"].limit_ratio == 9.0
    assert found["a step with a save"].limit_ratio == 4.0
    assert found["a step with a save"].is_met is False


def test_a_run_is_measured_and_leaves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    results = measured(TrainSaves, capsys, "--model", "tiny", "--rows", 8, "--save-every", 2, "--repeats", 1)
    assert results["a step"]["repeats"] == 3
    assert results["a step with a save"]["mark"] == "at most 2"
