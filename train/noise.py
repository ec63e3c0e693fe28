"""From a batch to the model's noisy inputs and target: schedules, objectives and loss weights, and a model's own scheduler.

Every random draw is keyed by the batch, never by a generator's state, so it does not depend on ranks or resumes.
Shapes: B samples, C latent channels, h and w latent height and width, T timesteps.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from bucketline.errors import ModelError, UsageError
from bucketline.families.packing import SCALED_LINEAR, flow, shifted
from bucketline.loader.batch import LatentScale, dequantised, noise_like, posterior_noise
from bucketline.loader.plan.order import Purpose, normal, uniform
from bucketline.train.config import Objective, ObjectiveOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor

    from bucketline.families.packing import NoiseLevels
    from bucketline.loader import Batch
    from bucketline.train.config import LossWeight, MaskLoss

log = logging.getLogger(__name__)

SCHEDULER_CONFIG = "scheduler/scheduler_config.json"
FLOW_CLASS = "FlowMatchEulerDiscreteScheduler"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixing:
    """Mixing coefficients at some timesteps: x_t = signal · x_0 + noise · ε."""

    signal: Tensor  # [B, 1, 1, 1] float32
    noise: Tensor  # [B, 1, 1, 1] float32
    timesteps: Tensor  # [B], as the model takes them: the index, int64, or for a flow 1000 · noise, float32


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseSchedule:
    """A schedule by table, the same for every size: signal √ᾱ and noise √(1 - ᾱ) (Ho et al. 2020, arXiv 2006.11239, eq. 4)."""

    signal: Tensor  # [T] float32
    noise: Tensor  # [T] float32
    objective: Objective = Objective.EPSILON  # or v
    config: Mapping[str, Any] = field(default_factory=dict)  # for diffusers' schedulers, with that objective

    @classmethod
    def from_alphas_cumprod(cls, alphas_cumprod: Tensor, device: torch.device, **more: Any) -> NoiseSchedule:  # noqa: ANN401
        """Build the schedule from a diffusers scheduler's `alphas_cumprod`, [T] float32, and `more` fields."""
        return cls(signal=alphas_cumprod.sqrt().to(device), noise=(1 - alphas_cumprod).sqrt().to(device), **more)

    @property
    def num_timesteps(self) -> int:
        return self.signal.shape[0]

    def at(self, indices: Tensor, _height: int, _width: int) -> Mixing:
        """Look up the mixing at some timesteps, [B] int64; the model takes the index as its timestep."""
        return Mixing(
            signal=self.signal[indices].view(-1, 1, 1, 1), noise=self.noise[indices].view(-1, 1, 1, 1), timesteps=indices
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSchedule:
    """A straight path from image to noise: noise n and signal 1 - n, shifted towards noise by a factor s.

    n = s·u / (1 + (s - 1)·u) of u = (index + 1) / T. Source: Esser et al. 2024 (arXiv 2403.03206), section 5.3.2; diffusers'
    `FlowMatchEulerDiscreteScheduler`, whose exponential and linear shifts are the same with s = e^μ and s = μ.
    """

    objective: ClassVar = Objective.FLOW

    num_timesteps: int
    shift: float | Mapping[str, Any]  # or one by number of tokens, by the fields of diffusers' configuration
    patch_size: int  # latent positions per token, in each direction
    levels: NoiseLevels | None = None  # a family's own: u of one shift, or n in place of a shift by size
    config: Mapping[str, Any] = field(default_factory=dict, compare=False)  # for diffusers' scheduler

    def factor(self, height: int, width: int) -> float:
        """Return s for latents of a height and width."""
        if isinstance(self.shift, float):
            return self.shift
        mu = self.mu(height, width)
        assert mu is not None
        return math.exp(mu) if self.shift["time_shift_type"] == "exponential" else mu

    def mu(self, height: int, width: int) -> float | None:
        """Return the shift for a size, linear in its tokens (diffusers' `calculate_shift`); None for a fixed one."""
        if isinstance(self.shift, float):
            return None
        num_tokens = (height // self.patch_size) * (width // self.patch_size)
        names = ("base_shift", "max_shift", "base_image_seq_len", "max_image_seq_len")
        least, most, fewest, largest = (self.shift[name] for name in names)
        slope = (most - least) / (largest - fewest)
        return float(least + slope * (num_tokens - fewest))

    def at(self, indices: Tensor, height: int, width: int) -> Mixing:
        """Compute the mixing at some timesteps, [B] int64, of latents of a size; the model takes T · noise as its timestep."""
        plain = (indices + 1).float() / self.num_timesteps
        noise = plain if self.levels is None else self.levels(plain, height, width)
        if self.levels is None or isinstance(self.shift, float):
            noise = shifted(noise, self.factor(height, width))
        each = noise.view(-1, 1, 1, 1)
        return Mixing(signal=1 - each, noise=each, timesteps=noise * self.num_timesteps)


Schedule = NoiseSchedule | FlowSchedule
"""The amount of noise at each timestep, and the prediction target."""


def add_noise(clean: Tensor, noise: Tensor, mixing: Mixing) -> Tensor:
    """Return x_t; all are [B, C, h, w] float32. Source: see the schedule."""
    return mixing.signal * clean + mixing.noise * noise


def target(objective: Objective, clean: Tensor, noise: Tensor, mixing: Mixing) -> Tensor:
    """Return the prediction target, [B, C, h, w] float32.

    Source: Ho et al. 2020 (arXiv 2006.11239), equation 14; v = √ᾱ·ε - √(1 - ᾱ)·x_0: Salimans and Ho 2022 (arXiv 2202.00512),
    section 4; a flow's velocity ε - x_0: Esser et al. 2024 (arXiv 2403.03206), equation 13.
    """
    if objective is Objective.EPSILON:
        return noise
    if objective is Objective.FLOW:
        return noise - clean
    return mixing.signal * noise - mixing.noise * clean


def weights_of_errors(asked: LossWeight, objective: Objective, mixing: Mixing) -> Tensor | None:
    """Return each sample's loss weight, [B] float32; None: each counts alike.

    min-snr: Hang et al. 2023 (arXiv 2303.09556), section 3.4. By a flow's noise n: cosmap and sigma-sqrt: Esser et al. 2024
    (arXiv 2403.03206), section 3.1; sigma-squared, by which a velocity's error is the image's: `--precondition_outputs` of
    diffusers' scripts.
    """
    if asked.gamma is not None:
        snr = (mixing.signal / mixing.noise).square().flatten()
        if objective is Objective.EPSILON:
            return (asked.gamma / snr).clamp(max=1.0)  # finite for SNR 0 too, as in a zero-terminal-SNR schedule
        assert objective is Objective.V_PREDICTION
        return snr.clamp(max=asked.gamma) / (snr + 1)
    noise = mixing.noise.flatten()
    if asked.name == "cosmap":
        return 2 / (math.pi * (1 - 2 * noise + 2 * noise.square()))
    if asked.name == "sigma-sqrt":
        return noise**-2
    return noise.square() if asked.name == "sigma-squared" else None


def squared_error(prediction: Tensor, wanted: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the mean squared error per sample, times its `mask`, [B, h, w], if there is one.

    It is computed in 32 bits, [B] float32; both inputs are [B, C, h, w].
    """
    squared = (prediction.float() - wanted.float()).square()
    return (squared if mask is None else squared * mask.unsqueeze(1)).flatten(1).mean(1)


# ----------------------------------------------------------------------------------------------------------------------- masks
# With m = clamp(mask, floor, 1) of a sample's positions p, and its squared errors (mean over channels) d, weight by noise n and
# weight of its row w, relative to the stores' mean, the loss of a step's N samples i, of all ranks and micro-batches, is
#
#     plain    mean_i(n_i · w_i · mean_p(m · d))
#     sample   mean_i(n_i · w_i · mean_p(m · d) / mean_p(m))
#     batch    mean_i(n_i · w_i · mean_p(m · d)) / mean_i(mean_p(m))
#
# A quotient whose divisor is 0 is 0. Weights do not count in a divisor: in a batch of one row, its own would cancel. So where
# all masks are 1, all three are the loss without masks.
# Source: sd-scripts' `apply_masked_loss`; OneTrainer's `normalize_masked_area_loss`; ai-toolkit's masks of a batch.


def mask_of(batch: Batch, asked: MaskLoss) -> Tensor | None:
    """Return how much each position counts, [B, h, w] float32; None if the stores have no masks."""
    return None if batch.mask is None else batch.mask.clamp(min=asked.floor)


def areas_of(mask: Tensor) -> Tensor:
    """Return the mean of each sample's mask, [B] float32."""
    return mask.flatten(1).mean(1)


def divided(errors: Tensor, areas: Tensor) -> Tensor:
    """Return errors divided by areas of any shape, and 0 where an area is: so is the error."""
    return errors / torch.where(areas > 0, areas, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Noised:
    """The model's inputs and its prediction target."""

    noisy: Tensor  # [B, C, h, w] float32
    timesteps: Tensor  # [B], as the model takes them
    target: Tensor  # [B, C, h, w] float32
    weight: Tensor | None  # [B] float32, loss weight of each sample; None: 1
    tokens: Tensor | None = None  # [B, L, D] float16, dequantised; None if the batch's tokens are not quantised

    def conditions(self, batch: Batch) -> Batch:
        return batch if self.tokens is None else replace(batch, tokens=self.tokens, tokens_scale=None)


def draw_timesteps(options: ObjectiveOptions, keys: Tensor, num_timesteps: int) -> Tensor:
    """Draw a timestep for each key, [B] int64; a schedule's shift is applied to it afterwards."""
    asked, low, high = options.timesteps, options.timestep_range.low, options.timestep_range.high
    if asked.name == "logit-normal":
        share = (normal(keys, Purpose.TIMESTEP, (1,)).squeeze(1).double() * asked.std + asked.mean).sigmoid()
    else:
        share = uniform(keys, Purpose.TIMESTEP)  # [B] float64 in [0, 1)
    if asked.name == "mode":
        share = 1 - share - asked.scale * ((0.5 * math.pi * share).cos().square() - 1 + share)
    share = low + (high - low) * share
    return (share * num_timesteps).long().clamp(max=math.ceil(high * num_timesteps) - 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Prep:
    """Noise batches: at keyed random timesteps in training, at fixed ones in validation."""

    scale: LatentScale
    schedule: Schedule
    options: ObjectiveOptions = field(default_factory=ObjectiveOptions)  # a run's
    compiled: bool = False  # fuse the arithmetic in training with torch.compile

    @functools.cached_property
    def _in_training(self) -> Callable[..., Noised]:
        # Compile only the arithmetic: draws stay outside, so they are the same with and without a compiler.
        return torch.compile(self._noised, dynamic=False) if self.compiled else self._noised

    def for_training(self, batch: Batch) -> Noised:
        """Noise a batch at timesteps drawn from its keys, and dequantise its tokens."""
        indices = draw_timesteps(self.options, batch.keys, self.schedule.num_timesteps)
        noise = noise_like(batch.latents, batch.latent_kind, batch.keys)
        if offset := self.options.noise_offset:
            noise = noise + offset * normal(batch.keys, Purpose.NOISE_OFFSET, shape=(noise.shape[1], 1, 1))
        drawn = posterior_noise(batch.latents, batch.latent_kind, batch.keys), noise
        text = (batch.tokens, batch.tokens_scale) if batch.tokens_scale is not None else ()
        return self._in_training(batch.latents, *drawn, indices, *text)

    def for_validation(self, batch: Batch, noise: Tensor, timestep: int) -> Noised:
        """Noise a batch at one timestep; `noise` is the result of `sample_noise`. Its tokens stay as they are."""
        indices = torch.full_like(batch.keys, timestep)
        of_posterior = posterior_noise(batch.latents, batch.latent_kind, _sample_keys(batch))
        return self._noised(batch.latents, of_posterior, noise, indices)

    def _noised(
        self,
        latents: Tensor,
        of_posterior: Tensor | None,
        noise: Tensor,
        indices: Tensor,
        tokens: Tensor | None = None,
        tokens_scale: Tensor | None = None,
    ) -> Noised:
        clean = self.scale.apply(latents, of_posterior)
        mixing, objective = self.schedule.at(indices, clean.shape[2], clean.shape[3]), self.schedule.objective
        return Noised(
            noisy=add_noise(clean, noise, mixing),
            timesteps=mixing.timesteps,
            target=target(objective, clean, noise, mixing),
            weight=weights_of_errors(self.options.loss_weight, objective, mixing),
            tokens=dequantised(tokens, tokens_scale) if tokens is not None and tokens_scale is not None else None,
        )


def sample_noise(batch: Batch) -> Tensor:
    """Return fixed noise per sample, [B, C, h, w] float32, independent of batch, rank and step."""
    return noise_like(batch.latents, batch.latent_kind, _sample_keys(batch))


def _sample_keys(batch: Batch) -> Tensor:
    return batch.ids[:, :8].contiguous().view(torch.int64).squeeze(1)


def load_schedule(
    model_folder: Path,
    device: torch.device,
    *,
    objective: Objective | None = None,
    shift: float | None = None,
    patch_size: int = 1,
    published: Mapping[str, Any] | None = None,
    levels: NoiseLevels | None = None,
) -> Schedule:
    """Read `scheduler/scheduler_config.json` of a model folder; without one, take the `published` (Stable Diffusion's if None).

    `objective` and `shift` are a run's options; None: as in the configuration. `patch_size`: latent positions per token. If the
    `published` schedule is a flow, another one is refused unless the run has an objective. `levels`: the family's own.
    """
    path = model_folder / SCHEDULER_CONFIG
    assumed = not path.exists()
    try:
        config = dict(published or SCALED_LINEAR) if assumed else json.loads(path.read_text(encoding="utf-8"))
        if config.get("use_flow_sigmas"):  # a solver of several orders for a flow: DPM-Solver, UniPC
            config = flow(config.get("flow_shift") or 1.0, num_train_timesteps=config.get("num_train_timesteps", 1000))
        is_flow = config.get("_class_name") == FLOW_CLASS
        if is_flow and objective not in (None, Objective.FLOW):
            raise UsageError(f"--objective is {objective}, and {path} is a {FLOW_CLASS}, which has no table of noise levels")
        if objective is Objective.FLOW and not is_flow:
            config, is_flow = {"_class_name": FLOW_CLASS, "shift": 1.0}, True
        if objective is None and not is_flow and (published or {}).get("_class_name") == FLOW_CLASS:
            raise ModelError(
                f"{path}: _class_name is {config.get('_class_name')}, expected a {FLOW_CLASS}, or a solver with "
                "use_flow_sigmas, since this model predicts a flow; take the scheduler published with it, or set --objective"
            )
        if shift is not None and not is_flow:
            raise UsageError(f"--shift is {shift}, and {path} is not a {FLOW_CLASS}; leave it out, or use --objective flow")
        if shift is not None:
            config |= {"shift": shift, "use_dynamic_shifting": False}
        if objective is not None and not is_flow:
            config |= {"prediction_type": str(objective)}
        by_size = "use_dynamic_shifting"
        if shift is not None or bool(config.get(by_size)) is not bool((published or {}).get(by_size)):
            levels = None  # the pipeline's scheduler does not take them either
        found: Schedule = _flow(config, patch_size, levels) if is_flow else _diffusion(config, path, device)
    except (OSError, ValueError, TypeError, AttributeError, NotImplementedError) as error:
        raise ModelError(f"{path} is not a configuration of a diffusers noise scheduler: {error}") from error
    if assumed:
        log.warning(
            "%s has no scheduler/: using the schedule published with the model's kind, and its objective, %s",
            model_folder,
            found.objective,
        )
    return found


def _flow(config: dict[str, Any], patch_size: int, levels: NoiseLevels | None) -> FlowSchedule:
    from diffusers import FlowMatchEulerDiscreteScheduler

    config = {**config, "use_beta_sigmas": False}  # how a sampler's steps are spaced (Chroma), for which diffusers needs scipy
    full = FlowMatchEulerDiscreteScheduler.from_config(config).config
    shift = dict(full) if full["use_dynamic_shifting"] else float(full["shift"])
    num_timesteps = full["num_train_timesteps"]
    return FlowSchedule(num_timesteps=num_timesteps, shift=shift, patch_size=patch_size, levels=levels, config=config)


def _diffusion(config: dict[str, Any], path: Path, device: torch.device) -> NoiseSchedule:
    import diffusers

    kind = config.get("_class_name")
    found = getattr(diffusers, str(kind), None)
    lacks_a_library = hasattr(found, "_backends")  # of diffusers' stand-ins; of the schedulers, DPMSolverSDEScheduler
    takes = set(inspect.signature(found).parameters) if isinstance(found, type) else set()
    has_betas = lacks_a_library or {"beta_schedule", "prediction_type"} <= takes
    if kind is not None and not has_betas:
        raise ModelError(
            f"{path}: _class_name is {kind!s:.80}, expected a scheduler of diffusers with a table of noise levels, such as "
            f"DDPMScheduler, or {FLOW_CLASS}; take the scheduler published with this model"
        )
    scheduler: Any = diffusers.DDPMScheduler.from_config(config)
    prediction, supported = scheduler.config.prediction_type, (Objective.EPSILON, Objective.V_PREDICTION)
    if prediction not in supported:
        raise ModelError(f"{path}: prediction_type is {prediction!r}, expected {' or '.join(supported)}")
    config = {**config, "prediction_type": prediction}
    return NoiseSchedule.from_alphas_cumprod(scheduler.alphas_cumprod, device, objective=Objective(prediction), config=config)
