"""Training on a store of quantised text: the noising step dequantises what the loader leaves as it is stored."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from bucketline.loader import Loader, LoaderConfig, TextForm
from bucketline.loader.batch import LatentScale, dequantised
from bucketline.store import Store
from bucketline.train import data as data_module
from bucketline.train import noise as noise_module
from bucketline.train.model import facts_of
from bucketline.train.noise import NoiseSchedule, Prep
from bucketline.train.run import train
from tests.kit import quantised
from tests.unit.train.tiny_run import ALONE, config, encoders, losses, samples, write_unet

if TYPE_CHECKING:
    from pathlib import Path

    from bucketline.loader import Batch

WIDTH = 40
ROWS = {"train/128x128": 9, "val/128x128": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quantised")
    quantised("I8", WIDTH, encoders()).make_store(path / "tiny.store", samples(ROWS))
    write_unet(path / "model", cross_attention_dim=WIDTH)
    return path


def first_batch(folder: Path, form: TextForm) -> Batch:
    with Loader(folder / "tiny.store", LoaderConfig(batch_size=3, epochs=1, text=form)) as loader:
        return next(loader.forever())


def make_prep(*, compiled: bool = False) -> Prep:
    schedule = NoiseSchedule.from_alphas_cumprod(torch.linspace(0.999, 0.01, 1000), torch.device("cpu"))
    return Prep(scale=LatentScale(scale=0.5, shift=0.25), schedule=schedule, compiled=compiled)


def assert_prepared(prep: Prep, folder: Path) -> None:
    stored, expected = (first_batch(folder, form) for form in (TextForm.STORED, TextForm.DEQUANTISED))
    noised = prep.for_training(stored)
    found = noised.conditions(stored)
    assert (stored.tokens.dtype, found.tokens.dtype, found.tokens_scale) == (torch.int8, torch.float16, None)
    assert torch.equal(found.tokens, expected.tokens)
    plain = prep.for_training(expected)
    assert plain.tokens is None
    assert plain.conditions(expected) is expected


def test_the_noising_step_gives_the_tokens_that_the_loader_would(folder: Path) -> None:
    assert_prepared(make_prep(), folder)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, about itself
def test_the_compiled_noising_step_gives_the_same_bits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced as one graph and decomposed, by a backend that needs no compiler."""
    compiled = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    monkeypatch.setattr(torch, "compile", compiled)
    assert_prepared(make_prep(compiled=True), folder)


def test_a_run_has_the_losses_of_one_whose_loader_dequantises(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.dtype] = []

    def noted(tokens: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        seen.append(tokens.dtype)
        return dequantised(tokens, scale)

    monkeypatch.setattr(noise_module, "dequantised", noted)
    asked = config(folder, max_steps=3, validate_every=3, caption_dropout=0.2)
    train(replace(asked, output_dir=folder / "stored"), ALONE)
    assert seen == [torch.int8] * 6  # of three steps of two batches
    monkeypatch.setattr(data_module, "TextForm", type("Form", (), {"STORED": TextForm.DEQUANTISED}))
    train(replace(asked, output_dir=folder / "dequantised"), ALONE)
    assert len(seen) == 6
    assert losses(folder / "stored") == losses(folder / "dequantised")


def test_a_model_is_held_against_the_width_that_is_delivered(folder: Path) -> None:
    store = Store.open(folder / "tiny.store")
    assert dict(facts_of(store, store.buckets()).text) == {"tokens": WIDTH, "pooled": 6}
