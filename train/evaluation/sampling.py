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

    from bucketline.loader import Batch
    from bucketline.train.noise_schedule import ModelSchedule
    from bucketline.train.step import Training


@torch.no_grad()
def sample_latents(
    training: Training,
    schedule: ModelSchedule,
    batch: Batch,
    noise: Tensor,
    dropped: Batch | None = None,
    *,
    guidance: float | None = None,
) -> Tensor:
    """Return latents of the averaged model, in its scaling, [B, C, h, w] float32, one per row of `batch`; `noise` likewise.

    `dropped`: the same rows with empty captions or negative prompts, for classifier-free guidance (Ho and Salimans 2022,
    arXiv 2207.12598). `guidance`: how strong; None: as `guidance_of`.
    """
    guidance = guidance_of(training) if guidance is None else guidance
    told = replace(training, family=training.family.with_guidance(guidance))
    scheduler = _scheduler(schedule, training.config.image_steps, noise)
    latents = noise
    # A batch in the shape of a validation's runs its graphs; nothing is compiled for another.
    with training.averaged() as model, torch.compiler.set_stance("eager_on_recompile"):
        for timestep in scheduler.timesteps:
            timesteps = timestep.repeat(len(latents))
            prediction = told.predict(model, latents, timesteps, batch).float()
            if dropped is not None:
                plain = told.predict(model, latents, timesteps, dropped).float()
                prediction = plain + guidance * (prediction - plain)
            latents = scheduler.step(prediction, timestep, latents, return_dict=False)[0]
    return latents


def guidance_of(training: Training) -> float:
    """Return the guidance of a run's images: its option, or what the model's pipeline takes by default."""
    asked = training.config.image_guidance
    return training.family.image_guidance if asked is None else asked


def _scheduler(schedule: ModelSchedule, num_steps: int, noise: Tensor) -> Any:  # noqa: ANN401 - diffusers has no types
    """Return diffusers' scheduler for one latent size.

    Source: Song et al. 2020, "Denoising Diffusion Implicit Models" (arXiv 2010.02502), with trailing timesteps, since only the
    last one is near pure noise: Lin et al. 2023 (arXiv 2305.08891). Flow: the steps of `FluxPipeline`.
    """
    scheduler: Any
    if isinstance(schedule.noise, FlowSchedule):
        factor = schedule.noise.factor(noise.shape[2], noise.shape[3])
        scheduler = FlowMatchEulerDiscreteScheduler.from_config(schedule.config, use_dynamic_shifting=False, shift=factor)
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1.0 / num_steps, num_steps), device=noise.device)
        return scheduler
    scheduler = DDIMScheduler.from_config(
        schedule.config, clip_sample=False, thresholding=False, set_alpha_to_one=True, timestep_spacing="trailing"
    )
    scheduler.set_timesteps(num_steps, device=noise.device)
    return scheduler
