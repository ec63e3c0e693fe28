"""A training step as diffusers' scripts (`examples/`) write it, with its schedulers, models and pipelines only.

Of the trainer there are the options, the numbers that are drawn for a row, by its key, and of most families how the model is
called, which `test_families.py` compares with the pipeline's own call.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu
from diffusers.pipelines.ideogram4.pipeline_ideogram4 import _logit_normal_sigmas, _resolution_aware_mu
from diffusers.training_utils import compute_loss_weighting_for_sd3, compute_snr
from torch import Tensor
from torch.nn.functional import mse_loss, pixel_shuffle, pixel_unshuffle

from bucketline.families.family import Family
from bucketline.loader import Batch
from bucketline.loader.plan.order import Purpose, normal, uniform
from bucketline.train.config import Objective, TrainConfig

T = 1000
LIBRARY: Any = diffusers  # which has no types


@dataclass(frozen=True, kw_only=True)
class Script:
    """A script for a model's folder, with its arguments."""

    folder: Path
    kind: Family
    asked: TrainConfig

    @property
    def family(self) -> str:
        return self.kind.name

    @cached_property
    def vae(self) -> Any:
        return self._part("vae")

    @cached_property
    def model(self) -> Any:
        folder = "unet" if (self.folder / "unet").exists() else "transformer"
        model = self._part(folder)
        if self.family == "hidream_image":  # the script's `force_inference_output` would leave the experts without gradients
            model.unpatchify = lambda tokens, sizes, _: type(model).unpatchify(model, tokens, sizes, is_training=False)
        return (
            model.eval() if self.family == "class_labels" else model.train()
        )  # a DiT drops labels in training, by torch's generator

    def _part(self, name: str) -> Any:
        kind = getattr(diffusers, json.loads((self.folder / name / "config.json").read_text(encoding="utf-8"))["_class_name"])
        return kind.from_pretrained(self.folder / name, local_files_only=True)

    @cached_property
    def scheduler(self) -> Any:
        config = json.loads((self.folder / "scheduler" / "scheduler_config.json").read_text(encoding="utf-8"))
        objective = self.asked.objective
        if "FlowMatch" in config["_class_name"] or config.get("use_flow_sigmas") or objective is Objective.FLOW:
            shift = {"shift": config.get("flow_shift", 1.0)} if config.get("use_flow_sigmas") or "shift" not in config else {}
            if self.asked.shift is not None:
                shift = {"shift": self.asked.shift, "use_dynamic_shifting": False}
            given = {**config, **shift, "use_beta_sigmas": False, "_class_name": "FlowMatchEulerDiscreteScheduler"}
            return LIBRARY.FlowMatchEulerDiscreteScheduler.from_config(given)
        more = {} if objective is None else {"prediction_type": str(objective)}
        return LIBRARY.DDPMScheduler.from_config({**config, **more})

    @property
    def shifts_by_size(self) -> bool:
        return bool(self.scheduler.config.get("use_dynamic_shifting"))

    def step(self, batches: Sequence[Batch], prior_weight: float | None = None) -> tuple[float, float]:
        """Return the loss of a step over some batches, and the norm of its gradient, which stays on the model.

        `prior_weight`: that of the loss of each batch's second half.
        """
        loss = torch.stack([self.loss(batch, prior_weight) / len(batches) for batch in batches]).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        trained = [one for one in self.model.parameters() if one.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(trained, math.inf if self.asked.clip_norm is None else self.asked.clip_norm)
        return float(loss.detach()), float(norm)

    def loss(self, batch: Batch, prior_weight: float | None) -> Tensor:
        clean = scaled(self.vae, self.family, batch.latents.float())
        noise = normal(batch.keys, Purpose.NOISE, shape=tuple(clean.shape[1:]))
        noise += self.asked.noise_offset * normal(batch.keys, Purpose.NOISE_OFFSET, shape=(clean.shape[1], 1, 1))
        indices = (self._density(batch) * T).long()
        is_flow = not isinstance(self.scheduler, diffusers.DDPMScheduler)
        weighting = torch.ones(len(clean))
        if is_flow:
            sigmas = self._sigmas(clean)[indices].view(-1, 1, 1, 1)
            noisy, told, target = (1.0 - sigmas) * clean + sigmas * noise, sigmas.flatten() * T, noise - clean
            weighting = compute_loss_weighting_for_sd3(self.asked.loss_weight.name.replace("-", "_"), sigmas).flatten()
        else:
            noisy, told, target = self.scheduler.add_noise(clean, noise, indices), indices, noise
            if is_v := self.scheduler.config.prediction_type == "v_prediction":
                target = self.scheduler.get_velocity(clean, noise, indices)
            if (gamma := self.asked.loss_weight.gamma) is not None:
                snr = compute_snr(self.scheduler, indices)
                weighting = torch.stack([snr, gamma * torch.ones_like(indices)], dim=1).min(dim=1)[0] / (snr + is_v)
        if (call := CALLS.get(self.family)) is not None:
            prediction = call(self.model, noisy, told, batch, self.asked.guidance)
        else:
            prediction = self.kind.predict(self.model, noisy, told, batch)
        errors = mse_loss(prediction.float(), target.float(), reduction="none").flatten(1).mean(1) * weighting
        if prior_weight is None:
            return errors.mean()
        own, prior = errors.chunk(2)
        return own.mean() + prior_weight * prior.mean()

    def _density(self, batch: Batch) -> Tensor:
        """Return the share of all timesteps up to that of each row, as `compute_density_for_timestep_sampling` draws it."""
        asked = self.asked.timesteps
        if asked.name == "logit-normal":
            drawn = normal(batch.keys, Purpose.TIMESTEP, (1,))[:, 0].double()
            return torch.sigmoid(asked.mean + asked.std * drawn)
        u = uniform(batch.keys, Purpose.TIMESTEP)
        if asked.name == "mode":
            return 1 - u - asked.scale * (torch.cos(math.pi * u / 2) ** 2 - 1 + u)
        return u

    def _sigmas(self, clean: Tensor) -> Tensor:
        """Return the noise's share by index, rising; by the size where the pipeline draws images so."""
        sigmas: Tensor = self.scheduler.sigmas.flip(0)[-T:]
        config = self.scheduler.config
        if self.family == "ideogram4" and self.asked.shift is None:
            px = 2 ** (len(self.vae.config.block_out_channels) - 1)
            mu = _resolution_aware_mu(px * clean.shape[2], px * clean.shape[3], base_mu=0.0)
            by_pixels: Tensor = _logit_normal_sigmas(T, mu, std=1.5)
            return by_pixels.flip(0)
        if self.shifts_by_size:
            tokens = clean.shape[2] * clean.shape[3] // (1 if self.family == "qwenimage21" else 4)
            mu = calculate_shift(
                tokens, config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift
            )
            if self.family.startswith("flux2"):
                mu = compute_empirical_mu(tokens, 50)
            sigmas = self.scheduler.time_shift(mu, 1.0, sigmas)
        return sigmas


def scaled(vae: Any, family: str, latents: Tensor) -> Tensor:
    """Return the VAE's latents as the model takes them."""
    config: Mapping[str, Any] = vae.config
    if hasattr(vae, "bn"):
        own = {"ernie_image": 1e-5}.get(family, config.get("batch_norm_eps", 1e-5))
        mean, std = vae.bn.running_mean, torch.sqrt(vae.bn.running_var + own)
        if family == "ideogram4":  # a patch's places, and in each of them the channels
            return _from_places((_to_places(latents) - mean) / std, latents.shape)
        tiles = pixel_unshuffle(latents, 2)
        return pixel_shuffle((tiles - mean.view(1, -1, 1, 1)) / std.view(1, -1, 1, 1), 2)
    if config.get("latents_mean") is not None:
        mean, std = (torch.tensor(config[name]).view(1, -1, 1, 1) for name in ("latents_mean", "latents_std"))
        return (latents - mean) / std
    return (latents - (config.get("shift_factor") or 0.0)) * float(config["scaling_factor"])


def _to_places(latents: Tensor) -> Tensor:
    """As `patchify_latents` of Ideogram 4's script."""
    count, channels, height, width = latents.shape
    tiles = latents.view(count, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 3, 5, 1)
    return tiles.reshape(count, height * width // 4, 4 * channels)


def _from_places(tokens: Tensor, shape: Sequence[int]) -> Tensor:
    """As Ideogram 4's pipeline decodes."""
    count, channels, height, width = shape
    return tokens.view(count, height // 2, width // 2, 2, 2, channels).permute(0, 5, 1, 3, 2, 4).reshape(*shape)


def _sd(model: Any, noisy: Tensor, told: Tensor, batch: Batch, _: float) -> Any:
    return model(noisy, told, batch.tokens.float()).sample


def _sdxl(model: Any, noisy: Tensor, told: Tensor, batch: Batch, _: float) -> Any:
    rows = zip(batch.original_size.tolist(), batch.crop.tolist(), batch.target_size.tolist(), strict=True)
    ids = [[*original, *crop, *target] for original, crop, target in rows]
    added = {"text_embeds": batch.text_fixed["pooled"].float(), "time_ids": torch.tensor(ids, dtype=torch.float32)}
    return model(noisy, told, batch.tokens.float(), added_cond_kwargs=added).sample


def _dit(model: Any, noisy: Tensor, told: Tensor, batch: Batch, _: float) -> Any:
    return model(noisy, timestep=told, class_labels=batch.tokens.reshape(-1)).sample.chunk(2, dim=1)[0]


def _sd3(model: Any, noisy: Tensor, told: Tensor, batch: Batch, _: float) -> Any:
    pooled = batch.text_fixed["pooled"].float()
    return model(noisy, batch.tokens.float(), pooled_projections=pooled, timestep=told).sample


def _flux(model: Any, noisy: Tensor, told: Tensor, batch: Batch, guidance: float) -> Any:
    pipeline = LIBRARY.FluxPipeline
    count, channels, height, width = noisy.shape
    output = model(
        hidden_states=pipeline._pack_latents(noisy, count, channels, height, width),
        timestep=told / 1000,
        guidance=torch.full([count], guidance),
        pooled_projections=batch.text_fixed["pooled"].float(),
        encoder_hidden_states=batch.tokens.float(),
        txt_ids=torch.zeros(batch.tokens.shape[1], 3),
        img_ids=pipeline._prepare_latent_image_ids(count, height // 2, width // 2, "cpu", torch.float32),
    ).sample
    return pipeline._unpack_latents(output, height * 8, width * 8, 8)


def _qwenimage(model: Any, noisy: Tensor, told: Tensor, batch: Batch, _: float) -> Any:
    pipeline = LIBRARY.QwenImagePipeline
    count, channels, height, width = noisy.shape
    output = model(
        hidden_states=pipeline._pack_latents(noisy[:, None], count, channels, height, width),
        encoder_hidden_states=batch.tokens.float(),
        encoder_hidden_states_mask=batch.token_mask.long(),
        timestep=told / 1000,
        img_shapes=[(1, height // 2, width // 2)] * count,
    ).sample
    return pipeline._unpack_latents(output, height * 8, width * 8, 8)[:, :, 0]


def _qwenimage21(model: Any, noisy: Tensor, told: Tensor, batch: Batch, _: float) -> Any:
    """Each row by itself: of a batch, the model would place all images after the longest caption."""
    pipeline = LIBRARY.QwenImage21Pipeline
    _, channels, height, width = noisy.shape
    found = []
    for one, timestep, tokens, mask in zip(noisy, told / 1000, batch.tokens.float(), batch.token_mask, strict=True):
        packed = pipeline._pack_latents(one[None, :, None], 1, channels, height, width)
        own = tokens[mask][None]
        output = model(
            hidden_states=packed,
            timestep=timestep[None],
            encoder_hidden_states=own,
            img_shapes=[[(1, height, width)]],
            img_mask=torch.arange(own.shape[1] + height * width // 4)[None] >= own.shape[1],
        ).sample
        found.append(output[:, -packed.shape[1] :].transpose(1, 2).view(1, *noisy.shape[1:]))
    return torch.cat(found)


CALLS: dict[str, Callable[[Any, Tensor, Tensor, Batch, float], Any]] = {
    "sd": _sd,
    "sdxl": _sdxl,
    "class_labels": _dit,
    "sd3": _sd3,
    "flux": _flux,
    "qwenimage": _qwenimage,
    "qwenimage21": _qwenimage21,
}
"""By the name of a family: its model's prediction of the noise, or of noise - latents, for latents [B, C, h, w]."""
