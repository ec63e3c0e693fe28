"""The model's own noise schedule and objective, from its scheduler's configuration."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from diffusers import DDPMScheduler

from bucketline.errors import ModelError
from bucketline.train.objectives import NoiseSchedule, Objective

if TYPE_CHECKING:
    from pathlib import Path

    import torch

FOLDER = "scheduler"
CONFIG = "scheduler_config.json"

STABLE_DIFFUSION = {
    "num_train_timesteps": 1000,
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "prediction_type": "epsilon",
}
"""For a folder without a scheduler. Source: the scheduler configuration published with Stable Diffusion 1.5."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSchedule:
    """How much noise at which timestep, and what to predict."""

    noise: NoiseSchedule
    objective: Objective
    config: dict[str, Any]  # as diffusers' schedulers take it
    assumed: bool  # the folder has none, so it is Stable Diffusion's


def load_schedule(model_folder: Path, device: torch.device) -> ModelSchedule:
    """Read `scheduler/scheduler_config.json` of a model folder.

    Raises:
        ModelError: where it cannot be read, or asks for an objective that is not supported; the field is named.
    """
    path = model_folder / FOLDER / CONFIG
    assumed = not path.exists()
    try:
        config = dict(STABLE_DIFFUSION) if assumed else json.loads(path.read_text(encoding="utf-8"))
        scheduler = DDPMScheduler.from_config(config)
    except (OSError, ValueError, TypeError, NotImplementedError) as error:
        raise ModelError(f"{path} is no configuration of a diffusers noise scheduler: {error}") from error
    prediction = scheduler.config.prediction_type
    if prediction not in set(Objective):
        raise ModelError(f"{path}: prediction_type is {prediction!r}, expected {' or '.join(Objective)}")
    return ModelSchedule(
        noise=NoiseSchedule.from_alphas_cumprod(scheduler.alphas_cumprod, device),
        objective=Objective(prediction),
        config=config,
        assumed=assumed,
    )
