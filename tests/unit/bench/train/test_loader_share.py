"""The training benchmark at a tiny size: its pairs are equal work, and its figures can be true."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from bucketline.bench.cases.train import Train, TrainSaves, Window, interval, results_of, results_of_saves
from bucketline.bench.fixtures.trained_model import MODELS, kept_store
from bucketline.store import Store
from tests.unit.bench.measured import measured


def test_a_loaders_images_are_held_against_resident_ones(capsys: pytest.CaptureFixture[str]) -> None:
    results = measured(Train, capsys, "--rows", 8, "--steps", 2, "--repeats", 2)
    assert results["resident batches"]["limit_ratio"] == 1
    assert results["the loader's"]["mark"] == "at least 0.99"
    low, high = (results[f"the pairs' mean ratio, 95 % {end}"]["median"] for end in ("from", "to"))
    assert low <= results["the loader's"]["limit_ratio"] <= high
    assert results["compiled after the warm-up"]["median"] == 0
    assert results["mixed buckets ÷ the best one, a FLOP"]["median"] > 0
    assert "MFU" not in results, "no peak of a CPU is known"


def test_a_mixed_window_is_held_against_the_best_bucket_by_its_flops() -> None:
    def window(flops: float, seconds: float) -> Window:
        return Window(images=4, seconds=seconds, wait_s=0.5, flops=flops)

    pairs = [(window(8e12, 2.0), window(8e12, 1.0))]
    alone = {"small": [window(2e12, 1.0)], "large": [window(16e12, 1.0)]}
    found = {one.subject: one for one in results_of("m", pairs, 0, alone, peak_flops=8e12)}
    assert found["the loader's"].limit_ratio == 0.5
    assert found["data wait"].median == 0.25
    assert found["MFU"].median == 0.5
    assert found["mixed buckets ÷ the best one, a FLOP"].median == 0.5


def test_the_interval_holds_the_mean_and_narrows_with_the_number_of_pairs() -> None:
    few, many = interval([0.98, 1.02] * 2), interval([0.98, 1.02] * 50)
    assert few[0] < many[0] < 1 < many[1] < few[1]


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_store_of_each_model_has_its_buckets_and_columns(tmp_path: Path, name: str) -> None:
    store = Store.open(kept_store(tmp_path, name, 2))
    model = MODELS[name]
    assert {(one.height_px, one.width_px) for one in store.buckets("train")} == set(model.buckets_px)
    assert list(store.manifest.text.tokens) == [model.tokens.name]
    assert list(store.manifest.text.fixed) == ([] if model.pooled is None else ["pooled"])


# The time that a save stops training is in the step that follows it.


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
