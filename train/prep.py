"""From a batch to what the model sees: scaling, noise, timesteps and target, all on the batch's device.

Every draw is keyed by the batch, never by a generator's state, so ranks and resumes change nothing.
Shape letters as in `objectives`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from bucketline.loader.draws import Purpose, normal, uniform
from bucketline.train import objectives

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from bucketline.loader import Batch
    from bucketline.train.objectives import NoiseSchedule, Objective


@dataclass(frozen=True, slots=True, kw_only=True)
class Noised:
    """What the model is given and what it should answer."""

    noisy: Tensor  # [B, C, h, w] float32
    timesteps: Tensor  # [B] int64
    target: Tensor  # [B, C, h, w] float32


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentScale:
    """How stored latents become the model's: (stored - shift) · scale. Source: diffusers' AutoencoderKL configuration."""

    scale: float
    shift: float

    def apply(self, stored: Tensor) -> Tensor:
        """Give the latents that the model sees, in 32 bits."""
        return (stored.float() - self.shift) * self.scale

    def invert(self, latents: Tensor) -> Tensor:
        """Give the latents that the VAE decodes."""
        return latents / self.scale + self.shift


class Prep:
    """Noises batches, in training at keyed random timesteps, in validation at given ones."""

    def __init__(self, *, scale: LatentScale, schedule: NoiseSchedule, objective: Objective, compiled: bool = False) -> None:
        """Keep the tables on their device; `compiled`: fuse the arithmetic with torch.compile."""
        self.scale = scale
        self.schedule = schedule
        self.objective = objective
        self._noise: Callable[[Tensor, Tensor, Tensor], Noised] = self._eager
        if compiled:
            # Only the arithmetic: the draws stay outside, where they are the same with and without a compiler.
            self._noise = torch.compile(self._eager, dynamic=False)

    def for_training(self, batch: Batch) -> Noised:
        """Noise a batch at timesteps drawn uniformly by its keys."""
        share = uniform(batch.keys, Purpose.TIMESTEP)  # [B] float64 in [0, 1)
        timesteps = (share * self.schedule.num_timesteps).long()
        return self._noise(batch.latents, _noise_like(batch.latents, batch.keys), timesteps)

    def for_validation(self, batch: Batch, noise: Tensor, timestep: int) -> Noised:
        """Noise a batch at one timestep with the noise that `sample_noise` gives for it."""
        timesteps = torch.full_like(batch.keys, timestep)
        return self._eager(batch.latents, noise, timesteps)

    def _eager(self, latents: Tensor, noise: Tensor, timesteps: Tensor) -> Noised:
        clean = self.scale.apply(latents)
        signal_share = self.schedule.signal[timesteps].view(-1, 1, 1, 1)
        noise_share = self.schedule.noise[timesteps].view(-1, 1, 1, 1)
        return Noised(
            noisy=objectives.add_noise(clean, noise, signal_share, noise_share),
            timesteps=timesteps,
            target=objectives.target(self.objective, clean, noise, signal_share, noise_share),
        )


def sample_noise(batch: Batch) -> Tensor:
    """Give each sample its own fixed noise, [B, C, h, w] float32, whatever batch, rank or step it stands in."""
    keys = batch.ids[:, :8].contiguous().view(torch.int64).squeeze(1)
    return _noise_like(batch.latents, keys)


def _noise_like(latents: Tensor, keys: Tensor) -> Tensor:
    return normal(keys, Purpose.NOISE, shape=tuple(latents.shape[1:]))
