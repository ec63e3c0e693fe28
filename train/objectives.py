"""What the model learns to predict, and how much noise each timestep has. Pure functions of tensors.

Shape letters: B samples, C latent channels, h and w latent height and width, T timesteps of the noise schedule.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Objective(StrEnum):
    """The prediction target, spelt as a diffusers scheduler's `prediction_type`."""

    EPSILON = "epsilon"
    V_PREDICTION = "v_prediction"


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseSchedule:
    """The share of signal and of noise at each timestep: x_t = signal[t] · x_0 + noise[t] · ε.

    Source: Ho et al. 2020, "Denoising Diffusion Probabilistic Models" (arXiv 2006.11239), equation 4,
    with signal = √ᾱ and noise = √(1 - ᾱ).
    """

    signal: Tensor  # [T] float32
    noise: Tensor  # [T] float32

    @classmethod
    def from_alphas_cumprod(cls, alphas_cumprod: Tensor, device: torch.device) -> NoiseSchedule:
        """Take the schedule from a diffusers scheduler's table, [T] float32."""
        return cls(signal=alphas_cumprod.sqrt().to(device), noise=(1 - alphas_cumprod).sqrt().to(device))

    @property
    def num_timesteps(self) -> int:
        """T."""
        return self.signal.shape[0]


def add_noise(clean: Tensor, noise: Tensor, signal_share: Tensor, noise_share: Tensor) -> Tensor:
    """Give x_t. All [B, C, h, w] float32, the shares [B, 1, 1, 1]. Source: as `NoiseSchedule`."""
    return signal_share * clean + noise_share * noise


def target(objective: Objective, clean: Tensor, noise: Tensor, signal_share: Tensor, noise_share: Tensor) -> Tensor:
    """Give what the model should predict, [B, C, h, w] float32.

    Source: epsilon: Ho et al. 2020 (arXiv 2006.11239), equation 14. v = √ᾱ·ε - √(1 - ᾱ)·x_0: Salimans and Ho 2022,
    "Progressive Distillation for Fast Sampling of Diffusion Models" (arXiv 2202.00512), section 4.
    """
    if objective is Objective.EPSILON:
        return noise
    return signal_share * noise - noise_share * clean


def squared_error(prediction: Tensor, wanted: Tensor) -> Tensor:
    """Give each sample's mean squared error in 32 bits, [B] float32; both are [B, C, h, w]."""
    return (prediction.float() - wanted.float()).square().flatten(1).mean(1)
