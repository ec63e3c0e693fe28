"""Scheduler configurations that were published with several families."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

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


def flow(shift: float, **more: float | str) -> dict[str, Any]:
    """Return the configuration of a flow whose noise has odds `shift` times as high, with `more` fields of diffusers'."""
    return {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": shift, **more}
