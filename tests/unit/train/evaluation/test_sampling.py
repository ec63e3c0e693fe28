"""Drawn images have the steps and the noise of diffusers' own pipelines."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import diffusers
import pytest
import torch

from bucketline.families.flux import Flux
from bucketline.families.packing import pack, unpack
from bucketline.families.sd3 import Sd3
from bucketline.train.ema import Average
from bucketline.train.evaluation.prompts import DrawingBatch
from bucketline.train.evaluation.sampling import sample_latents
from bucketline.train.noise_schedule import CONFIG, load_schedule
from tests.family_models import T5_WIDTH, tiny_model
from tests.unit.train.test_step import make_training
from tests.unit.train.tiny_run import facts, make_batch

if TYPE_CHECKING:
    from pathlib import Path

    from bucketline.loader import Batch

STEPS = 6
CPU = torch.device("cpu")
FIXED = {"shift": 3.0}
DYNAMIC = {"use_dynamic_shifting": True, "base_image_seq_len": 4, "max_image_seq_len": 64}
NO_ENCODERS = {f"{name}{number}": None for name in ("text_encoder", "tokenizer") for number in ("", "_2", "_3")}


def draw_by_sd3(model: Any, scheduler: Any, batch: Batch, noise: torch.Tensor) -> torch.Tensor:
    pipeline = diffusers.StableDiffusion3Pipeline(transformer=model, scheduler=scheduler, vae=None, **NO_ENCODERS)
    pipeline.set_progress_bar_config(disable=True)
    drawn: torch.Tensor = pipeline(
        prompt_embeds=batch.tokens.float(),
        pooled_prompt_embeds=batch.text_fixed["pooled"].float(),
        latents=noise,
        height=8 * noise.shape[2],
        width=8 * noise.shape[3],
        guidance_scale=1.0,
        num_inference_steps=STEPS,
        output_type="latent",
    ).images
    return drawn


def draw_by_flux(model: Any, scheduler: Any, batch: Batch, noise: torch.Tensor) -> torch.Tensor:
    encoders = {name: value for name, value in NO_ENCODERS.items() if not name.endswith("_3")}
    pipeline = diffusers.FluxPipeline(transformer=model, scheduler=scheduler, vae=None, **encoders)
    pipeline.set_progress_bar_config(disable=True)
    drawn: torch.Tensor = pipeline(
        prompt_embeds=batch.tokens.float(),
        pooled_prompt_embeds=batch.text_fixed["pooled"].float(),
        latents=pack(noise),
        height=8 * noise.shape[2],
        width=8 * noise.shape[3],
        guidance_scale=3.5,
        num_inference_steps=STEPS,
        output_type="latent",
    ).images
    return unpack(drawn, noise.shape[2], noise.shape[3])


@pytest.mark.parametrize("scheduler", [FIXED, DYNAMIC], ids=["fixed", "dynamic"])
@pytest.mark.parametrize(("name", "family", "pooled", "draw"), [("sd3", Sd3, 20, draw_by_sd3), ("flux", Flux, 8, draw_by_flux)])
def test_a_flows_images_are_those_of_the_familys_pipeline(
    tmp_path: Path, name: str, family: Any, pooled: int, draw: Any, scheduler: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model = tiny_model(name).eval()
    own = family(dict(model.config), facts(latent_channels=4))
    (tmp_path / CONFIG).parent.mkdir()
    config = {"_class_name": "FlowMatchEulerDiscreteScheduler", **scheduler}
    (tmp_path / CONFIG).write_text(json.dumps(config), encoding="utf-8")
    plain = make_training(tmp_path / "unet", accumulation=1)
    asked = dataclasses.replace(plain.config, image_steps=STEPS)
    training = dataclasses.replace(plain, config=asked, family=own, model=model, average=Average(model, 0.9))
    generator = torch.Generator().manual_seed(1)
    texts = torch.randn(2, 4, T5_WIDTH, generator=generator), torch.randn(2, pooled, generator=generator)
    batch = dataclasses.replace(make_batch(2), tokens=texts[0], text_fixed={"pooled": texts[1]})
    noise = torch.randn(2, 4, 8, 6, generator=generator)
    schedule = load_schedule(tmp_path, CPU, patch_size=own.patch_size)
    found = sample_latents(training, schedule, DrawingBatch(batch=batch, negative=None, noise=noise, guidance=3.5, entries=()))
    theirs = diffusers.FlowMatchEulerDiscreteScheduler.from_config(schedule.config)
    torch.testing.assert_close(found, draw(model.eval(), theirs, batch, noise), rtol=1e-4, atol=1e-4)
