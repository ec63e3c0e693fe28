"""How stored latents become those that a model is trained on: drawn if they are moments, then shifted and scaled by their VAE.

The trainer and `Batch.scaled` share it. Letters: B rows, C latent channels, h and w latent height and width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bucketline.errors import UsageError
from bucketline.extensions import imported
from bucketline.loader.plan.rng import Purpose, normal
from bucketline.store.format.columns import LatentKind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bucketline.typed_json import Json

_PATCH = 2  # of a VAE's `batch_norm`, by the store's format
LOG_VARIANCE_RANGE = (-30.0, 20.0)  # Source: diffusers' DiagonalGaussianDistribution


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentScale:
    """Scaling of stored latents for a model: (stored - shift) · scale, per channel if the VAE has a mean and std.

    Per channel and place in a p by p patch if the VAE normalises patches.

    Source: diffusers' AutoencoderKL configuration, and its use in the pipelines.
    """

    scale: float | Tensor  # [C, p, p]
    shift: float | Tensor = 0.0  # [C, p, p]

    @classmethod
    def of(cls, vae: Mapping[str, Json], device: torch.device) -> LatentScale:
        """Return the scaling of a VAE by a store's record of it."""

        def each(values: Json, side: int = 1) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device).reshape(-1, side, side)

        if isinstance(norm := vae.get("batch_norm"), dict):
            return cls(scale=1 / each(norm["std"], _PATCH), shift=each(norm["mean"], _PATCH))
        shift = vae.get("latents_mean") or vae.get("shift_factor") or 0.0
        return cls(scale=each(vae["scaling_factor"]) / each(vae.get("latents_std") or 1.0), shift=each(shift))

    def apply(self, stored: Tensor, posterior_noise: Tensor | None = None) -> Tensor:
        """Return the latents for the model, in 32 bits; with noise, those drawn by it from stored moments."""
        if posterior_noise is not None:
            mean, log_variance = stored.float().chunk(2, dim=1)
            stored = mean + (0.5 * log_variance.clamp(*LOG_VARIANCE_RANGE)).exp() * posterior_noise
        return (stored.float() - _over(self.shift, stored)) * _over(self.scale, stored)

    def invert(self, latents: Tensor) -> Tensor:
        """Return the latents for the VAE's decoder."""
        return latents / _over(self.scale, latents) + _over(self.shift, latents)


def _over(each: float | Tensor, latents: Tensor) -> float | Tensor:
    """Return a patch's numbers, [C, p, p], repeated over latents, [B, C, h, w]; a channel's over [B, C, …] of any axes."""
    if isinstance(each, float):
        return each
    if each.shape[0] not in (1, latents.shape[1]):  # torch would repeat latents of one channel
        raise UsageError(
            f"the scaling is of {each.shape[0]} channels and the latents have {latents.shape[1]}; give one of as many"
        )
    if each.shape[-1] == 1:
        return each.reshape(-1, *(1 for _ in latents.shape[2:]))
    return each.repeat(1, latents.shape[2] // each.shape[1], latents.shape[3] // each.shape[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedScale:
    """How the latents of a loader's stores are scaled, by what these record of their encoders; read when it is first used."""

    where: str = field(default="a store that is not known", compare=False)
    encoders: Mapping[str, Json] = field(default_factory=dict)
    _found: dict[torch.device, LatentScale] = field(default_factory=dict, init=False, repr=False, compare=False)

    def on(self, device: torch.device) -> LatentScale:
        """Return the scaling by tensors on a device, which are made once."""
        if device not in self._found:
            vae = self.encoders.get("vae")
            try:
                with torch.inference_mode(mode=False):  # or a backward pass through `invert` could not use the tensors later
                    self._found[device] = _usable(self._of_family(vae), device)
            except (
                KeyError,
                TypeError,
                ValueError,
                RuntimeError,
                OverflowError,
            ) as error:  # whatever a store of other arrays has there
                raise UsageError(
                    f"{self.where} does not record how its latents are scaled: encoders.vae is {vae!s:.100}, expected a "
                    "mapping of finite numbers with a scaling_factor that is not 0. Give the scaling: "
                    "batch.scaled(LatentScale(scale=0.18215)), or scale=1.0 for latents stored as the model takes them; "
                    'or write the store with it: encoders={"vae": {"scaling_factor": 0.18215}}'
                ) from error
        return self._found[device]

    def _of_family(self, vae: Json) -> Mapping[str, Json]:
        """Return the VAE's record as the pipeline scales latents by it, whose captions the stores have."""
        if not isinstance(vae, dict):
            raise TypeError(f"a {type(vae).__name__}")
        if vae.get("shift_factor") and vae.get("latents_mean"):
            raise ValueError("both shift_factor and latents_mean")
        text = self.encoders.get("text_encoder")
        if not isinstance(text, dict) or "family" not in text:
            return vae
        # by name: families type their batches, and their files take longer to import than a first batch
        family = imported("bucketline.families.registry:family_named")(text["family"])
        return vae if family is None else family.scaling(vae)


def _usable(vae: Mapping[str, Json], device: torch.device) -> LatentScale:
    """Return the scaling of a VAE's record."""
    scale = LatentScale.of(vae, device)
    on_host = LatentScale.of(vae, torch.device("cpu"))
    for each in (on_host.scale, on_host.shift):
        if not torch.as_tensor(each).isfinite().all():
            raise ValueError("a number that is not finite")
    if not torch.as_tensor(on_host.scale).all():
        raise ValueError("a factor of 0")
    return scale


def noise_like(latents: Tensor, kind: LatentKind, keys: Tensor, purpose: Purpose = Purpose.NOISE) -> Tensor:
    """Return normal noise by the keys, [B], of the shape of latents, [B, C, h, w] float32, or of those drawn from moments."""
    channels, *axes = latents.shape[1:]
    return normal(keys, purpose, shape=(channels // 2 if kind is LatentKind.MOMENTS else channels, *axes))


def posterior_noise(latents: Tensor, kind: LatentKind, keys: Tensor) -> Tensor | None:
    """Return the noise that draws latents from stored moments; None if the store has latents."""
    return noise_like(latents, kind, keys, Purpose.POSTERIOR) if kind is LatentKind.MOMENTS else None
