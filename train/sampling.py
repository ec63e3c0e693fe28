"""Drawing latents with a trained model: DDIM from stored caption embeddings, with keyed starting noise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from diffusers import DDIMScheduler

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from bucketline.loader import Batch
    from bucketline.train.families import Family


@torch.no_grad()
def sample_latents(
    batch: Batch,
    *,
    noise: Tensor,
    family: Family,
    model: nn.Module,
    scheduler_config: Mapping[str, Any],
    num_steps: int,
    autocast: torch.autocast,
) -> Tensor:
    """Give latents as the model sees them, [B, C, h, w] float32, one for each caption of `batch`; `noise` is like them.

    Source: Song et al. 2020, "Denoising Diffusion Implicit Models" (arXiv 2010.02502), by diffusers' scheduler. Timesteps
    are spaced from the last one back, since only that one is near pure noise: Lin et al. 2023 (arXiv 2305.08891).
    """
    scheduler = DDIMScheduler.from_config(
        dict(scheduler_config),
        clip_sample=False,
        thresholding=False,
        set_alpha_to_one=True,
        timestep_spacing="trailing",
    )
    scheduler.set_timesteps(num_steps, device=noise.device)
    latents = noise
    for timestep in scheduler.timesteps:
        with autocast:
            prediction = family.predict(model, latents, timestep.expand(len(latents)), batch)
        latents = scheduler.step(prediction.float(), timestep, latents, return_dict=False)[0]
    return latents
