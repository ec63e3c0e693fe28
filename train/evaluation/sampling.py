"""Sample latents from a trained model with stored captions or classes and keyed starting noise: DDIM, or Euler for flows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler

from bucketline.train.noise_schedule import FlowSchedule

if TYPE_CHECKING:
    from torch import Tensor

    from bucketline.families.family import Family
    from bucketline.train.evaluation.prompts import DrawingBatch
    from bucketline.train.noise_schedule import ModelSchedule
    from bucketline.train.step import Training


@torch.no_grad()
def sample_latents(training: Training, schedule: ModelSchedule, one: DrawingBatch) -> Tensor:
    """Return latents of the averaged model for a batch, in the model's scaling, [B, C, h, w] float32.

    With `negative` conditions, by classifier-free guidance (Ho and Salimans 2022, arXiv 2207.12598).
    """
    told = replace(training, family=training.family.with_guidance(one.guidance))
    scheduler = _scheduler(training.family, schedule, training.config.image_steps, one.noise)
    latents = one.noise
    # A batch in the shape of a validation's runs its graphs; nothing is compiled for another.
    with training.averaged() as model, torch.compiler.set_stance("eager_on_recompile"):
        for timestep in scheduler.timesteps:
            timesteps = timestep.repeat(len(latents))
            prediction = told.predict(model, latents, timesteps, one.batch).float()
            if one.negative is not None:
                plain = told.predict(model, latents, timesteps, one.negative).float()
                prediction = told.family.guided(prediction, plain, one.guidance)
            latents = scheduler.step(prediction, timestep, latents, return_dict=False)[0]
    return latents


def guidance_of(training: Training) -> float:
    """Return the guidance of a run's images: its option, or what the model's pipeline takes by default."""
    asked = training.config.image_guidance
    return training.family.image_guidance if asked is None else asked


def _scheduler(family: Family, schedule: ModelSchedule, num_steps: int, noise: Tensor) -> Any:  # noqa: ANN401 - diffusers has no types
    """Return diffusers' scheduler for one latent size.

    Source: Song et al. 2020, "Denoising Diffusion Implicit Models" (arXiv 2010.02502), with trailing timesteps, since only the
    last one is near pure noise: Lin et al. 2023 (arXiv 2305.08891). Flow: the steps of the family's pipeline.
    """
    scheduler: Any
    if isinstance(schedule.noise, FlowSchedule):
        scheduler = FlowMatchEulerDiscreteScheduler.from_config(schedule.config)
        sigmas = np.linspace(1.0, 1.0 / num_steps, num_steps) if family.sets_sigmas else None
        mu = schedule.noise.mu(noise.shape[2], noise.shape[3])
        scheduler.set_timesteps(num_steps, sigmas=sigmas, mu=mu, device=noise.device)
        return scheduler
    scheduler = DDIMScheduler.from_config(
        schedule.config, clip_sample=False, thresholding=False, set_alpha_to_one=True, timestep_spacing="trailing"
    )
    scheduler.set_timesteps(num_steps, device=noise.device)
    return scheduler
