"""One step's loss for each family, written out with diffusers' own schedulers and pipelines, and nothing of the trainer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler, FluxPipeline
from diffusers.pipelines.flux.pipeline_flux import calculate_shift

from bucketline.loader.plan.rng import Purpose, normal, uniform

if TYPE_CHECKING:
    from torch import Tensor

    from bucketline.loader import Batch
    from tests.unit.train.packed_families import Packed


def reference_loss(packed: Packed, model: Any, batch: Batch) -> Tensor:
    """Return the mean loss of a batch."""
    vae = json.loads((packed.model / "vae" / "config.json").read_text(encoding="utf-8"))
    clean = (batch.latents.float() - (vae.get("shift_factor") or 0.0)) * vae["scaling_factor"]
    noise = normal(batch.keys, Purpose.NOISE, shape=tuple(clean.shape[1:]))
    index = (uniform(batch.keys, Purpose.TIMESTEP) * 1000).long()
    if packed.family in ("sd3", "flux"):
        sigma = _sigmas(packed, clean)[index]
        noisy = (1 - sigma.view(-1, 1, 1, 1)) * clean + sigma.view(-1, 1, 1, 1) * noise
        wanted, told = noise - clean, sigma * 1000
    else:
        noisy = _scheduler(DDPMScheduler, packed).add_noise(clean, noise, index)
        wanted, told = noise, index
    prediction = _CALLS[packed.family](model, noisy, told, batch)
    return torch.nn.functional.mse_loss(prediction, wanted)


def _scheduler(kind: Any, packed: Packed) -> Any:
    return kind.from_pretrained(packed.model, subfolder="scheduler")


def _sigmas(packed: Packed, clean: Tensor) -> Tensor:
    """Return the noise's share by index, rising."""
    scheduler = _scheduler(FlowMatchEulerDiscreteScheduler, packed)
    sigmas: Tensor = scheduler.sigmas.flip(0)
    if packed.family == "flux":
        mu = calculate_shift((clean.shape[2] // 2) * (clean.shape[3] // 2))
        sigmas = scheduler.time_shift(mu, 1.0, sigmas)
    return sigmas


def _sd(model: Any, noisy: Tensor, told: Tensor, batch: Batch) -> Any:
    return model(noisy, told, batch.tokens.float()).sample


def _sdxl(model: Any, noisy: Tensor, told: Tensor, batch: Batch) -> Any:
    rows = zip(batch.original_size.tolist(), batch.crop.tolist(), batch.target_size.tolist(), strict=True)
    ids = [[*original, *crop, *target] for original, crop, target in rows]
    added = {"text_embeds": batch.text_fixed["pooled"].float(), "time_ids": torch.tensor(ids, dtype=torch.float32)}
    return model(noisy, told, batch.tokens.float(), added_cond_kwargs=added).sample


def _dit(model: Any, noisy: Tensor, told: Tensor, batch: Batch) -> Any:
    return model(noisy, timestep=told, class_labels=batch.tokens.reshape(-1)).sample[:, :4]


def _pixart(model: Any, noisy: Tensor, told: Tensor, batch: Batch) -> Any:
    height, width = (int(side) for side in batch.target_size[0])
    added: dict[str, Any] = {"resolution": None, "aspect_ratio": None}
    if model.config.sample_size == 128:
        resolution = torch.tensor([height, width]).repeat(len(noisy), 1).float()
        added = {"resolution": resolution, "aspect_ratio": torch.tensor([float(height / width)]).repeat(len(noisy), 1)}
    mask = batch.token_mask.float()
    output = model(
        noisy,
        encoder_hidden_states=batch.tokens.float(),
        encoder_attention_mask=mask,
        timestep=told,
        added_cond_kwargs=added,
    ).sample
    return output.chunk(2, dim=1)[0]


def _sd3(model: Any, noisy: Tensor, told: Tensor, batch: Batch) -> Any:
    pooled = batch.text_fixed["pooled"].float()
    return model(noisy, batch.tokens.float(), pooled_projections=pooled, timestep=told).sample


def _flux(model: Any, noisy: Tensor, told: Tensor, batch: Batch) -> Any:
    pipeline: Any = FluxPipeline
    count, channels, height, width = noisy.shape
    output = model(
        hidden_states=pipeline._pack_latents(noisy, count, channels, height, width),
        timestep=told / 1000,
        guidance=torch.ones(count),
        pooled_projections=batch.text_fixed["pooled"].float(),
        encoder_hidden_states=batch.tokens.float(),
        txt_ids=torch.zeros(batch.tokens.shape[1], 3),
        img_ids=pipeline._prepare_latent_image_ids(count, height // 2, width // 2, "cpu", torch.float32),
    ).sample
    return pipeline._unpack_latents(output, height * 8, width * 8, 8)


_CALLS = {
    "sd": _sd,
    "sdxl": _sdxl,
    "dit": _dit,
    "pixart_alpha": _pixart,
    "pixart_sigma": _pixart,
    "sd3": _sd3,
    "flux": _flux,
}
