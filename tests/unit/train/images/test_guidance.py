"""How strongly images follow their captions."""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING

import diffusers
import pytest
import torch

from bucketline.families.flux import Flux
from bucketline.families.registry import FAMILIES
from bucketline.train.images import drawing
from bucketline.train.images.pipeline import draw_latents
from bucketline.train.images.prompts import DrawingBatch
from bucketline.train.noise import load_schedule, sample_noise
from bucketline.train.run import train
from tests.family_models import tiny_vae
from tests.unit.train.tiny_run import ALONE, config, facts, make_batch, make_training

if TYPE_CHECKING:
    from pathlib import Path

    from bucketline.families.family import Family


@pytest.mark.parametrize("family", FAMILIES)
def test_images_have_the_guidance_of_the_familys_pipeline(family: type[Family]) -> None:
    pipeline = getattr(diffusers, family.pipelines[0])
    assert hasattr(pipeline, "load_lora_weights") >= family.has_lora_loader  # PRX has a UNet's
    given = inspect.signature(pipeline.__call__).parameters
    found = [given[name].default for name in ("guidance_scale", "true_cfg_scale") if name in given]
    if issubclass(pipeline, diffusers.ModularPipeline):  # in the configuration of its guider
        found = [pipeline().guider.config.guidance_scale]
    by_a_second_model = "unconditional_transformer" in inspect.signature(pipeline.__init__).parameters
    assert family.is_guidable is not by_a_second_model
    expected = 1.0 if by_a_second_model else next(scale for scale in found if scale is not None)
    assert family.image_guidance == expected


def test_guidance_leads_away_from_the_empty_caption(tmp_path: Path) -> None:
    """One step of DDIM is affine in the prediction, so its results are mixed as the predictions are."""
    training = make_training(tmp_path)
    one_step = dataclasses.replace(training.config, image_steps=1)
    training = dataclasses.replace(training, config=one_step, scheduler=load_schedule(tmp_path, torch.device("cpu")).config)
    batch, other = make_batch(2), make_batch(2, first=5)
    dropped = dataclasses.replace(batch, tokens=other.tokens)
    plain = DrawingBatch(batch=batch, negative=None, noise=sample_noise(batch), guidance=3.0, entries=())
    guided = draw_latents(training, tiny_vae(), dataclasses.replace(plain, negative=dropped))
    captioned, empty = (draw_latents(training, tiny_vae(), dataclasses.replace(plain, batch=one)) for one in (batch, dropped))
    assert not torch.equal(captioned, empty)
    torch.testing.assert_close(guided, empty + 3.0 * (captioned - empty), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("guidance", [None, 1.0])
def test_a_run_draws_against_the_same_rows_with_empty_captions(
    folder: Path, monkeypatch: pytest.MonkeyPatch, guidance: float | None
) -> None:
    drawn: list[DrawingBatch] = []

    def noting(training: object, vae: object, one: DrawingBatch) -> torch.Tensor:
        drawn.append(one)
        return one.noise

    monkeypatch.setattr(drawing, "draw_latents", noting)
    train(config(folder, max_steps=1, num_images=2, image_guidance=guidance), ALONE)
    assert drawn
    for one in drawn:
        batch, dropped = one.batch, one.negative
        assert (dropped is None) is (guidance == 1.0)
        assert one.guidance == (guidance or 7.5)
        if dropped is not None:
            assert torch.equal(batch.ids, dropped.ids)
            assert torch.equal(batch.latents, dropped.latents)
            assert bool((dropped.tokens[0] == dropped.tokens[-1]).all())
            assert not torch.equal(batch.token_mask, dropped.token_mask) or not torch.equal(batch.tokens, dropped.tokens)


def test_a_distilled_model_is_told_no_guidance_in_training_and_the_images_in_drawing() -> None:
    family = Flux({"guidance_embeds": True}, facts())
    batch = dataclasses.replace(make_batch(2), text_fixed={"pooled": torch.zeros(2, 8)})

    def told(one: Family) -> list[float]:
        found: list[float] = one.arguments(torch.zeros(2, 4, 8, 8), torch.zeros(2), batch)["guidance"].tolist()
        return found

    assert (told(family), told(family.with_guidance(3.5)), told(family)) == ([1.0, 1.0], [3.5, 3.5], [1.0, 1.0])
    assert (family.image_guidance, Flux({"guidance_embeds": False}, facts()).image_guidance) == (3.5, 1.0)
