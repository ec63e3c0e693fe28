"""Noise by timestep: scheduler configurations that were published with several families, and what pipelines make of them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


class NoiseLevels(Protocol):
    """A flow's noise by size: of shares of all timesteps, above 0 to 1, for latents of a height and width."""

    def __call__(self, shares: Tensor, height: int, width: int) -> Tensor: ...


SCALED_LINEAR: Mapping[str, Any] = {
    "num_train_timesteps": 1000,
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "prediction_type": "epsilon",
}
"""Source: the scheduler configuration published with Stable Diffusion 1.5, and that of SDXL."""


LINEAR: Mapping[str, Any] = {**SCALED_LINEAR, "beta_start": 0.0001, "beta_end": 0.02, "beta_schedule": "linear"}
"""Source: the scheduler configuration published with DiT-XL/2, and that of PixArt."""


def shifted(shares: Tensor, factor: float) -> Tensor:
    """Return noise whose odds are `factor` times as high."""
    return factor * shares / (1 + (factor - 1) * shares)


def by_size_and_steps(_family: object, _index: Mapping[str, Any], /, num_steps: int = 50) -> NoiseLevels:
    """Return the levels of Flux.2's pipeline, by as many steps as it draws in by default.

    Source: `compute_empirical_mu` of diffusers' pipeline.
    """

    def levels(shares: Tensor, height: int, width: int) -> Tensor:
        num_tokens = height * width // 4
        most, fewest = 0.00016927 * num_tokens + 0.45666666, 8.73809524e-05 * num_tokens + 1.89833333  # in 200 steps, in 10
        return shifted(shares, math.exp(most if num_tokens > 4300 else most + (200 - num_steps) / 190 * (fewest - most)))

    return levels


def alike_if_distilled(_family: object, index: Mapping[str, Any], /) -> NoiseLevels | None:
    """Return the levels of Krea 2's pipeline for a distilled model, of which all sizes are shifted alike."""
    return (lambda shares, _height, _width: shifted(shares, math.exp(1.15))) if index.get("is_distilled") else None


def by_pixels(family: Any, _index: Mapping[str, Any], /) -> NoiseLevels:  # noqa: ANN401 - a Family: its file imports this
    """Return the levels of Ideogram 4's pipeline: logit-normal, with a mean that rises with an image's pixels.

    Source: `_logit_normal_sigmas` and `_resolution_aware_mu` of diffusers' pipeline, with limits at a log SNR of 15 and -18.
    """
    import torch

    def levels(shares: Tensor, height: int, width: int) -> Tensor:
        mean = 0.5 * math.log(height * width * family.store.px_per_latent**2 / 512**2)
        found: Tensor = torch.special.ndtri(shares)
        return (mean + 1.5 * found).sigmoid().clamp(1 / (1 + math.exp(7.5)), 1 / (1 + math.exp(-9.0)))

    return levels


def flow(shift: float, **more: float | str) -> dict[str, Any]:
    """Return the configuration of a flow whose noise has odds `shift` times as high, with `more` fields of diffusers'."""
    return {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": shift, **more}
