"""The model's own noise schedule and objective, from its scheduler's configuration unless the run is told otherwise."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler

from bucketline.errors import ModelError, UsageError
from bucketline.train.families.family import SCALED_LINEAR
from bucketline.train.objectives import DynamicShift, FlowSchedule, NoiseSchedule, Objective

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch

    from bucketline.train.objectives import Schedule

FOLDER = "scheduler"
CONFIG = "scheduler_config.json"
FLOW_CLASS = FlowMatchEulerDiscreteScheduler.__name__


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSchedule:
    """How much noise at which timestep, and what to predict."""

    noise: Schedule
    objective: Objective
    config: dict[str, Any]  # as diffusers' schedulers take it, of the objective that is trained
    assumed: bool  # the folder has none, so it is the one published with the family


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a run asks of the schedule; None: what the scheduler's configuration says."""

    objective: Objective | None = None
    shift: float | None = None
    patch_size: int = 1  # latent positions of a token, each way
    published: Mapping[str, Any] | None = None  # for a folder without a scheduler; None: Stable Diffusion's


def load_schedule(model_folder: Path, device: torch.device, wanted: Wanted | None = None) -> ModelSchedule:
    """Read `scheduler/scheduler_config.json` of a model folder.

    Raises:
        ModelError: where it cannot be read, or asks for an objective that is not supported; the field is named.
        UsageError: where the run asks for what such a scheduler does not give.
    """
    wanted = wanted or Wanted()
    path = model_folder / FOLDER / CONFIG
    assumed = not path.exists()
    try:
        config = dict(wanted.published or SCALED_LINEAR) if assumed else json.loads(path.read_text(encoding="utf-8"))
        is_flow = config.get("_class_name") == FLOW_CLASS
        if is_flow and wanted.objective not in (None, Objective.FLOW):
            raise UsageError(f"--objective is {wanted.objective}, and {path} is a {FLOW_CLASS}, which has no table of noise")
        if is_flow or wanted.objective is Objective.FLOW:
            return _flow(config if is_flow else {"_class_name": FLOW_CLASS, "shift": 1.0}, wanted, assumed=assumed)
        if wanted.shift is not None:
            raise UsageError(
                f"--shift is {wanted.shift}, and {path} is no {FLOW_CLASS}; leave it out, or give --objective flow"
            )
        return _diffusion(config, path, device, wanted.objective, assumed=assumed)
    except (OSError, ValueError, TypeError, AttributeError, NotImplementedError) as error:
        raise ModelError(f"{path} is no configuration of a diffusers noise scheduler: {error}") from error


def _flow(config: dict[str, Any], wanted: Wanted, *, assumed: bool) -> ModelSchedule:
    if wanted.shift is not None:
        config = {**config, "shift": wanted.shift, "use_dynamic_shifting": False}
    said: Any = FlowMatchEulerDiscreteScheduler.from_config(config)
    shift: float | DynamicShift = float(said.config.shift)
    if said.config.use_dynamic_shifting:
        shift = DynamicShift(
            base=said.config.base_shift,
            largest=said.config.max_shift,
            fewest_tokens=said.config.base_image_seq_len,
            most_tokens=said.config.max_image_seq_len,
            is_exponential=said.config.time_shift_type == "exponential",
        )
    noise = FlowSchedule(num_timesteps=said.config.num_train_timesteps, shift=shift, patch_size=wanted.patch_size)
    return ModelSchedule(noise=noise, objective=Objective.FLOW, config=config, assumed=assumed)


def _diffusion(
    config: dict[str, Any], path: Path, device: torch.device, asked: Objective | None, *, assumed: bool
) -> ModelSchedule:
    scheduler: Any = DDPMScheduler.from_config(config)
    prediction = scheduler.config.prediction_type if asked is None else str(asked)
    supported = (Objective.EPSILON, Objective.V_PREDICTION)
    if prediction not in supported:
        raise ModelError(f"{path}: prediction_type is {prediction!r}, expected {' or '.join(supported)}")
    return ModelSchedule(
        noise=NoiseSchedule.from_alphas_cumprod(scheduler.alphas_cumprod, device),
        objective=Objective(prediction),
        config={**config, "prediction_type": prediction},
        assumed=assumed,
    )
