"""Prepare a batch for the model: scaling, noise, timesteps and target, all on the batch's device.

Every random draw is keyed by the batch, never by a generator's state, so it does not depend on ranks or resumes.
Shapes: B samples, C latent channels, h and w latent height and width.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import torch

from bucketline.families.packing import PATCH
from bucketline.loader.dequantise import dequantised
from bucketline.loader.plan.rng import Purpose, normal, uniform
from bucketline.store.format.columns import LatentKind
from bucketline.train import noise_schedule
from bucketline.train.noise_schedule import TimestepSampling

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from bucketline.loader import Batch
    from bucketline.train.config import TrainConfig
    from bucketline.train.noise_schedule import FlowWeighting, Objective, Schedule
    from bucketline.typed_json import Json

LOG_VARIANCE_RANGE = (-30.0, 20.0)  # Source: diffusers' DiagonalGaussianDistribution


@dataclass(frozen=True, slots=True, kw_only=True)
class Noised:
    """The model's inputs and its prediction target."""

    noisy: Tensor  # [B, C, h, w] float32
    timesteps: Tensor  # [B], as the model takes them
    target: Tensor  # [B, C, h, w] float32
    weight: Tensor | None  # [B] float32, loss weight of each sample; None: 1
    tokens: Tensor | None = None  # [B, L, D] float16, dequantised; None if the batch's tokens are not quantised

    def conditions(self, batch: Batch) -> Batch:
        """Return the batch with its tokens as the model takes them."""
        return batch if self.tokens is None else replace(batch, tokens=self.tokens, tokens_scale=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentScale:
    """Scaling of stored latents for the model: (stored - shift) · scale, per channel if the VAE has a mean and std.

    Per channel and place in a p by p patch if the VAE normalises patches.

    Source: diffusers' AutoencoderKL configuration, and its use in the pipelines.
    """

    scale: float | Tensor  # [C, p, p]
    shift: float | Tensor  # [C, p, p]

    @classmethod
    def of(cls, vae: Mapping[str, Json], device: torch.device) -> LatentScale:
        """Return the scaling of a VAE by a store's record of it."""

        def each(values: Json, side: int = 1) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device).reshape(-1, side, side)

        if isinstance(norm := vae.get("batch_norm"), dict):
            return cls(scale=1 / each(norm["std"], PATCH), shift=each(norm["mean"], PATCH))
        shift = vae.get("latents_mean") or vae.get("shift_factor") or 0.0
        return cls(scale=each(vae["scaling_factor"]) / each(vae.get("latents_std") or 1.0), shift=each(shift))

    def apply(self, stored: Tensor) -> Tensor:
        """Return the latents for the model, in 32 bits."""
        return (stored.float() - _over(self.shift, stored)) * _over(self.scale, stored)

    def invert(self, latents: Tensor) -> Tensor:
        """Return the latents for the VAE's decoder."""
        return latents / _over(self.scale, latents) + _over(self.shift, latents)


def _over(each: float | Tensor, latents: Tensor) -> float | Tensor:
    """Return a patch's numbers, [C, p, p], repeated over latents, [B, C, h, w]."""
    if isinstance(each, float) or each.shape[-1] == 1:
        return each
    return each.repeat(1, latents.shape[2] // each.shape[1], latents.shape[3] // each.shape[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class NoisingOptions:
    """Options of a run, by their names: the distribution of timesteps (uniform, logit-normal or mode), and the loss weighting.

    Source: Esser et al. 2024 (arXiv 2403.03206), equations 19 and 20; a mean above 0 favours noisier timesteps, a mode scale
    above 0 those in the middle. A schedule's shift is applied afterwards.
    """

    timestep_sampling: TimestepSampling = TimestepSampling.UNIFORM
    logit_mean: float = 0.0
    logit_std: float = 1.0
    mode_scale: float = 1.29
    timestep_min: float = 0.0  # as a share of all
    timestep_max: float = 1.0
    min_snr_gamma: float | None = None
    flow_weighting: FlowWeighting | None = None

    @classmethod
    def of(cls, config: TrainConfig) -> NoisingOptions:
        """Return those of a run."""
        return cls(**{field.name: getattr(config, field.name) for field in fields(cls)})

    def draw(self, keys: Tensor, num_timesteps: int) -> Tensor:
        """Draw a timestep for each key, [B] int64."""
        if self.timestep_sampling is TimestepSampling.LOGIT_NORMAL:
            share = (normal(keys, Purpose.TIMESTEP, (1,)).squeeze(1).double() * self.logit_std + self.logit_mean).sigmoid()
        else:
            share = uniform(keys, Purpose.TIMESTEP)  # [B] float64 in [0, 1)
        if self.timestep_sampling is TimestepSampling.MODE:
            share = 1 - share - self.mode_scale * ((0.5 * math.pi * share).cos().square() - 1 + share)
        share = self.timestep_min + (self.timestep_max - self.timestep_min) * share
        return (share * num_timesteps).long().clamp(max=math.ceil(self.timestep_max * num_timesteps) - 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Prep:
    """Noise batches: at keyed random timesteps in training, at fixed ones in validation."""

    scale: LatentScale
    schedule: Schedule
    objective: Objective
    options: NoisingOptions = NoisingOptions()
    compiled: bool = False  # fuse the arithmetic in training with torch.compile

    @functools.cached_property
    def _noise(self) -> Callable[..., Noised]:
        # Compile only the arithmetic: draws stay outside, so they are the same with and without a compiler.
        return torch.compile(self._eager, dynamic=False) if self.compiled else self._eager

    def for_training(self, batch: Batch) -> Noised:
        """Noise a batch at timesteps drawn from its keys, and dequantise its tokens."""
        indices = self.options.draw(batch.keys, self.schedule.num_timesteps)
        drawn = _posterior_noise(batch, batch.keys), _noise_like(batch, batch.keys)
        text = (batch.tokens, batch.tokens_scale) if batch.tokens_scale is not None else ()
        return self._noise(batch.latents, *drawn, indices, *text)

    def for_validation(self, batch: Batch, noise: Tensor, timestep: int) -> Noised:
        """Noise a batch at one timestep; `noise` is the result of `sample_noise`. Its tokens stay as they are."""
        indices = torch.full_like(batch.keys, timestep)
        return self._eager(batch.latents, _posterior_noise(batch, _sample_keys(batch)), noise, indices)

    def _eager(
        self,
        latents: Tensor,
        posterior_noise: Tensor | None,
        noise: Tensor,
        indices: Tensor,
        tokens: Tensor | None = None,
        tokens_scale: Tensor | None = None,
    ) -> Noised:
        if posterior_noise is not None:
            mean, log_variance = latents.float().chunk(2, dim=1)
            latents = mean + (0.5 * log_variance.clamp(*LOG_VARIANCE_RANGE)).exp() * posterior_noise
        clean = self.scale.apply(latents)
        shares = self.schedule.at(indices, clean.shape[2], clean.shape[3])
        weight = None
        if self.options.min_snr_gamma is not None:
            weight = noise_schedule.min_snr_weight(self.objective, shares, self.options.min_snr_gamma)
        elif self.options.flow_weighting is not None:
            weight = noise_schedule.flow_weight(self.options.flow_weighting, shares)
        return Noised(
            noisy=noise_schedule.add_noise(clean, noise, shares),
            timesteps=shares.timesteps,
            target=noise_schedule.target(self.objective, clean, noise, shares),
            weight=weight,
            tokens=dequantised(tokens, tokens_scale) if tokens is not None and tokens_scale is not None else None,
        )


def sample_noise(batch: Batch) -> Tensor:
    """Return fixed noise per sample, [B, C, h, w] float32, independent of batch, rank and step."""
    return _noise_like(batch, _sample_keys(batch))


def _sample_keys(batch: Batch) -> Tensor:
    return batch.ids[:, :8].contiguous().view(torch.int64).squeeze(1)


def _noise_like(batch: Batch, keys: Tensor, purpose: Purpose = Purpose.NOISE) -> Tensor:
    channels, height, width = batch.latents.shape[1:]
    return normal(keys, purpose, shape=(channels // 2 if _has_moments(batch) else channels, height, width))


def _posterior_noise(batch: Batch, keys: Tensor) -> Tensor | None:
    """Return the noise that draws latents from stored moments; None if the store has latents."""
    return _noise_like(batch, keys, Purpose.POSTERIOR) if _has_moments(batch) else None


def _has_moments(batch: Batch) -> bool:
    return batch.latent_kind is LatentKind.MOMENTS
