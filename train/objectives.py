"""What the model learns to predict, how much noise each timestep has, and what an error counts. Pure functions of tensors.

Shape letters: B samples, C latent channels, h and w latent height and width, T timesteps of the noise schedule.
A timestep is an index from 0 to T - 1, more noise with each; what the model is told of it is the schedule's to say.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Objective(StrEnum):
    """The prediction target; the first two spelt as a diffusers scheduler's `prediction_type`."""

    EPSILON = "epsilon"
    V_PREDICTION = "v_prediction"
    FLOW = "flow"


class TimestepSampling(StrEnum):
    """How often which timestep is trained."""

    UNIFORM = "uniform"
    LOGIT_NORMAL = "logit_normal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """What is mixed at some timesteps: x_t = signal · x_0 + noise · ε."""

    signal: Tensor  # [B, 1, 1, 1] float32
    noise: Tensor  # [B, 1, 1, 1] float32
    timesteps: Tensor  # [B], what the model is told: the index, int64, or of a flow 1000 · noise, float32


class Schedule(Protocol):
    """How much noise at which timestep."""

    @property
    def num_timesteps(self) -> int:
        """T."""

    def at(self, indices: Tensor, height: int, width: int) -> Shares:
        """Give the shares at some timesteps, [B] int64, of latents of a height and width."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseSchedule:
    """The share of signal and of noise by table, the same for every size.

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

    def at(self, indices: Tensor, _height: int, _width: int) -> Shares:
        """Look the shares up; the model is told the index."""
        return Shares(
            signal=self.signal[indices].view(-1, 1, 1, 1), noise=self.noise[indices].view(-1, 1, 1, 1), timesteps=indices
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicShift:
    """A shift that follows from the number of tokens: μ, a straight line through (fewest, base) and (most, largest)."""

    base: float
    largest: float
    fewest_tokens: int
    most_tokens: int
    is_exponential: bool  # the factor is e^μ, else μ

    def factor(self, num_tokens: int) -> float:
        """Give what the odds of noise are multiplied by. Source: diffusers' `calculate_shift` of Flux and SD3."""
        slope = (self.largest - self.base) / (self.most_tokens - self.fewest_tokens)
        mu = self.base + slope * (num_tokens - self.fewest_tokens)
        return math.exp(mu) if self.is_exponential else mu


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSchedule:
    """A straight path from picture to noise: noise = n and signal = 1 - n, shifted towards noise by a factor s.

    n = s·u / (1 + (s - 1)·u) of u = (index + 1) / T. Source: Lipman et al. 2022 (arXiv 2210.02747) and Esser et al. 2024,
    "Scaling Rectified Flow Transformers" (arXiv 2403.03206), section 5.3.2; diffusers' `FlowMatchEulerDiscreteScheduler`,
    whose exponential and linear shifts are the same formula with s = e^μ and s = μ.
    """

    num_timesteps: int
    shift: float | DynamicShift
    patch_size: int  # latent positions of a token, each way

    def factor(self, height: int, width: int) -> float:
        """Give s for latents of a height and width."""
        if isinstance(self.shift, float):
            return self.shift
        return self.shift.factor((height // self.patch_size) * (width // self.patch_size))

    def at(self, indices: Tensor, height: int, width: int) -> Shares:
        """Compute the shares; the model is told T times the noise's."""
        factor = self.factor(height, width)
        plain = (indices + 1).float() / self.num_timesteps
        noise = factor * plain / (1 + (factor - 1) * plain)
        each = noise.view(-1, 1, 1, 1)
        return Shares(signal=1 - each, noise=each, timesteps=noise * self.num_timesteps)


def add_noise(clean: Tensor, noise: Tensor, shares: Shares) -> Tensor:
    """Give x_t; all [B, C, h, w] float32. Source: as the schedule."""
    return shares.signal * clean + shares.noise * noise


def target(objective: Objective, clean: Tensor, noise: Tensor, shares: Shares) -> Tensor:
    """Give what the model should predict, [B, C, h, w] float32.

    Source: epsilon: Ho et al. 2020 (arXiv 2006.11239), equation 14. v = √ᾱ·ε - √(1 - ᾱ)·x_0: Salimans and Ho 2022,
    "Progressive Distillation for Fast Sampling of Diffusion Models" (arXiv 2202.00512), section 4. Of a flow the velocity
    ε - x_0: Esser et al. 2024 (arXiv 2403.03206), equation 13.
    """
    if objective is Objective.EPSILON:
        return noise
    if objective is Objective.FLOW:
        return noise - clean
    return shares.signal * noise - shares.noise * clean


def min_snr_weight(objective: Objective, shares: Shares, gamma: float) -> Tensor:
    """Give what each sample's error counts, [B] float32: min(SNR, gamma) / SNR for epsilon, min(SNR, gamma) / (SNR + 1) for v.

    Source: Hang et al. 2023, "Efficient Diffusion Training via Min-SNR Weighting Strategy" (arXiv 2303.09556), section 3.4.
    """
    snr = (shares.signal / shares.noise).square().flatten()
    if objective is Objective.EPSILON:
        return (gamma / snr).clamp(max=1.0)  # where SNR is 0 too, as in a schedule that ends in noise alone
    assert objective is Objective.V_PREDICTION
    return snr.clamp(max=gamma) / (snr + 1)


def squared_error(prediction: Tensor, wanted: Tensor) -> Tensor:
    """Give each sample's mean squared error in 32 bits, [B] float32; both are [B, C, h, w]."""
    return (prediction.float() - wanted.float()).square().flatten(1).mean(1)


def weighted(errors: Tensor, weight: Tensor | None) -> Tensor:
    """Give each sample's error, [B], times what it counts, where that is not 1 for all."""
    return errors if weight is None else errors * weight
