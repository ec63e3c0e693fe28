"""Drawing latents with a trained model from stored captions or classes, with keyed starting noise: DDIM, or Euler's steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler

from bucketline.train.objectives import FlowSchedule

if TYPE_CHECKING:
    from torch import Tensor, nn

    from bucketline.loader import Batch
    from bucketline.train.families import Family
    from bucketline.train.schedule import ModelSchedule


@torch.no_grad()
def sample_latents(
    batch: Batch,
    *,
    noise: Tensor,
    family: Family,
    model: nn.Module,
    schedule: ModelSchedule,
    num_steps: int,
    autocast: torch.autocast,
) -> Tensor:
    """Give latents as the model sees them, [B, C, h, w] float32, one for each row of `batch`; `noise` is like them."""
    scheduler = _scheduler(schedule, num_steps, noise)
    latents = noise
    for timestep in scheduler.timesteps:
        with autocast:
            prediction = family.predict(model, latents, timestep.expand(len(latents)), batch)
        latents = scheduler.step(prediction.float(), timestep, latents, return_dict=False)[0]
    return latents


def _scheduler(schedule: ModelSchedule, num_steps: int, noise: Tensor) -> Any:  # noqa: ANN401 - diffusers has no types
    """Make diffusers' scheduler for one size.

    Source: Song et al. 2020, "Denoising Diffusion Implicit Models" (arXiv 2010.02502), its timesteps spaced from the last one
    back, since only that one is near pure noise: Lin et al. 2023 (arXiv 2305.08891). Of a flow, steps as `FluxPipeline`'s.
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
