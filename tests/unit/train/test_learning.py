"""Rows and timesteps that are learned from, and their weights."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from bucketline.errors import UsageError
from bucketline.loader import Loader, LoaderConfig, WeightedStore
from bucketline.store import Store
from bucketline.train.config import ObjectiveOptions, TimestepRange, Timesteps
from bucketline.train.noise import draw_timesteps, squared_error
from bucketline.train.run import train
from bucketline.train.step import loss_of, mean_weight
from tests.unit.train.tiny_run import (
    ALONE,
    add_to_store,
    config,
    losses,
    make_batch,
    make_training,
    samples,
    train_in_two_parts,
)

if TYPE_CHECKING:
    from pathlib import Path

KEYS = torch.arange(4000) * 7919 + 1


@pytest.mark.parametrize("sampling", ["uniform", "logit-normal", "mode"])
def test_timesteps_stay_in_their_range_and_fill_it(sampling: Any) -> None:
    timesteps = Timesteps(name=sampling)
    drawn = draw_timesteps(ObjectiveOptions(timesteps=timesteps, timestep_range=TimestepRange(low=0.25, high=0.75)), KEYS, 1000)
    assert (int(drawn.min()), int(drawn.max())) >= (250, 700)
    assert int(drawn.min()) < 300
    assert int(drawn.max()) < 750
    whole = draw_timesteps(ObjectiveOptions(timesteps=timesteps), KEYS, 1000)
    for low, wanted in ((0.0, whole), (0.5, 500 + whole // 2)):
        ranged = ObjectiveOptions(timesteps=timesteps, timestep_range=TimestepRange(low=low, high=1.0))
        assert torch.equal(draw_timesteps(ranged, KEYS, 1000), wanted)


def test_each_stores_rows_have_its_weight(folder: Path) -> None:
    add_to_store(folder / "other.store", samples({"train/128x128": 6}, prefix="other "))
    stores = (folder / "tiny.store", folder / "other.store")
    with Loader(stores, LoaderConfig(batch_size=2, epochs=1, row_weights=(1.0, 0.25))) as loader:
        found = torch.cat([batch.weight for batch in loader if batch.bucket == "train/128x128"])
    found = found[found > 0]  # the last batch is padded
    assert sorted(found.tolist()) == [0.25] * 6 + [1.0] * (len(found) - 6)
    with pytest.raises(UsageError, match="row_weights has 1 numbers, expected one for each of 2 stores"):
        Loader(stores, LoaderConfig(batch_size=2, row_weights=(1.0,)))


@pytest.mark.parametrize("prior", [1.0, 0.25, 0.0])
def test_the_loss_is_the_weighted_mean_of_the_errors(tmp_path: Path, prior: float) -> None:
    """As diffusers' scripts add two means, of as many instances as priors, but on the scale of a run without weights."""
    training = make_training(tmp_path)
    batch = dataclasses.replace(make_batch(4), weight=torch.tensor([1.0, 1.0, prior, prior]))
    noised = training.prep.for_training(batch)
    weighing = dataclasses.replace(training, mean_weight=(1.0 + prior) / 2)
    with torch.no_grad():
        errors = squared_error(training.predict(training.model, noised.noisy, noised.timesteps, batch), noised.target)
        assert torch.equal(loss_of(training, batch), errors.mean())
        weighted = float(loss_of(weighing, batch))
    diffusers = float(errors[:2].mean() + prior * errors[2:].mean())
    assert weighted == pytest.approx(diffusers / (1 + prior), rel=1e-6)
    assert weighted == pytest.approx(float((errors * batch.weight).sum() / batch.weight.sum()), rel=1e-6)


def test_a_row_that_is_a_batch_of_its_own_keeps_its_weight(tmp_path: Path) -> None:
    """So does one in a bucket that only one store has, on any rank."""
    training = make_training(tmp_path)
    weighing = dataclasses.replace(training, mean_weight=0.5)
    batch = dataclasses.replace(make_batch(1), weight=torch.tensor([0.25]))
    with torch.no_grad():
        assert float(loss_of(weighing, batch)) == pytest.approx(float(loss_of(training, batch)) / 2, rel=1e-6)


def test_weights_count_by_the_rows_that_a_pass_reads(folder: Path) -> None:
    add_to_store(folder / "other.store", samples({"train/128x128": 6}, prefix="other "))
    mine, other = (Store.open(folder / f"{name}.store") for name in ("tiny", "other"))
    rows = sum(bucket.num_rows for bucket in mine.buckets("train"))
    shares = (WeightedStore(store=mine, repeats=3), WeightedStore(store=other))
    asked = config(folder, store=(folder / "tiny.store", f"{folder}/other.store@0.25"))
    assert mean_weight(asked, shares) == pytest.approx((3 * rows + 6 * 0.25) / (3 * rows + 6))
    assert mean_weight(config(folder), shares) is None
    with pytest.raises(UsageError, match="the weight of every --store that has rows is 0, expected one above 0"):
        mean_weight(config(folder, store=(f"{folder}/tiny.store@0", f"{folder}/other.store@0")), shares)
    paths, short = (f"{folder}/tiny.store", f"{folder}/other.store"), {"max_steps": 2, "log_every": 1}
    train(config(folder, **short, store=[f"{path}@2" for path in paths], output_dir=folder / "twos"), ALONE)
    train(config(folder, **short, store=paths, output_dir=folder / "none"), ALONE)
    assert losses(folder / "twos") == losses(folder / "none")


def test_a_run_with_weights_resumes_to_the_bit_and_records_them(folder: Path) -> None:
    add_to_store(folder / "other.store", samples({"train/128x128": 6}, prefix="other "))
    stores = (folder / "tiny.store", f"{folder}/other.store@0.25")
    whole = config(folder, store=stores, output_dir=folder / "whole", max_steps=4, timestep_range="0:0.5")
    train_in_two_parts(whole, 2)
    recorded = json.loads((whole.output_dir / "config.json").read_text(encoding="utf-8"))["config"]
    assert recorded["store"] == list(map(str, stores))
