"""The VAEs of diffusers whose latents are packed, imported or decoded, by class.

Letters: B images, C latent channels, h and w latent height and width, H and W those of an image in px.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bucketline.families.family import StandIn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

DEFAULT_VAE = "AutoencoderKL"  # of a configuration without a class


@dataclass(frozen=True, slots=True, kw_only=True)
class VaeKind:
    """The shapes and constants of a VAE; those of its configuration's fields that may be left to the class's defaults."""

    is_packed: bool = True  # `ingest pack` can encode with it
    has_posterior: bool = True  # a distribution, not one latent
    has_frames: bool = False  # takes images as videos of one frame, [B, 3, 1, H, W]
    has_batch_norm: bool = False  # normalises latents in 2 by 2 patches, by statistics among its weights
    scaling: float = 1.0
    levels_field: str | None = None  # a list of one more than it halves
    halvings_field: str | None = None  # a list of as many as it halves
    downscale_field: str | None = None  # px per latent pixel, each way
    downscale: int = 8  # without these fields

    def px_per_latent(self, config: Mapping[str, Any]) -> int | None:
        """Return px per latent pixel, each way; None if a field that says it is missing or not a list."""
        if self.levels_field is not None:
            levels = config.get(self.levels_field)
            return 2 ** (len(levels) - 1) if isinstance(levels, list | tuple) and levels else None
        if self.halvings_field is not None and (halvings := config.get(self.halvings_field)) is not None:
            return 2 ** len(halvings) if isinstance(halvings, list | tuple) else None
        return int(config.get(self.downscale_field or "") or self.downscale)


VAES: dict[str, VaeKind] = {
    "AutoencoderKL": VaeKind(scaling=0.18215, levels_field="block_out_channels"),
    "AutoencoderDC": VaeKind(has_posterior=False, levels_field="encoder_block_out_channels"),
    "AutoencoderKLFlux2": VaeKind(has_batch_norm=True, levels_field="block_out_channels"),
    "AutoencoderKLQwenImage": VaeKind(has_frames=True, halvings_field="temperal_downsample"),
    "AutoencoderKLQwenImage21": VaeKind(has_frames=True, halvings_field="temperal_downsample", downscale=16),
    "AutoencoderKLWan": VaeKind(is_packed=False, has_frames=True, downscale_field="scale_factor_spatial"),
    "AutoencoderKLHunyuanVideo": VaeKind(
        is_packed=False,
        has_frames=True,
        scaling=0.476986,
        downscale_field="spatial_compression_ratio",
    ),
}
PACKED_VAES = tuple(name for name, kind in VAES.items() if kind.is_packed)


def vae_class(config: Mapping[str, Any]) -> str:
    return str(config.get("_class_name") or DEFAULT_VAE)


def latent_channels(config: Mapping[str, Any]) -> int | None:
    """Return C of a VAE's configuration; None if it does not say."""
    found = config.get("latent_channels", config.get("z_dim"))
    return found if isinstance(found, int) else None


def vae_encode(vae: Any, pixels: Tensor) -> Tensor:  # noqa: ANN401 - diffusers has no types
    """Encode images, [B, 3, H, W] from -1 to 1: return the parameters of the latents' distribution, [B, 2C, h, w].

    Of a VAE without a distribution, return the latents, [B, C, h, w]. One of four channels sees opaque images.
    """
    import torch

    kind = VAES[type(vae).__name__]
    if getattr(vae.config, "in_channels", 3) == 4:
        pixels = torch.cat([pixels, torch.ones_like(pixels[:, :1])], dim=1)
    found = vae.encode(pixels[:, :, None] if kind.has_frames else pixels)
    latents: Tensor = found.latent_dist.parameters if kind.has_posterior else found.latent
    return latents[:, :, 0] if kind.has_frames else latents


def vae_decode(vae: Any, latents: Tensor) -> Tensor:  # noqa: ANN401 - likewise
    """Decode unscaled latents, [B, C, h, w], to images, [B, 3, H, W], about from -1 to 1."""
    has_frames = VAES[type(vae).__name__].has_frames
    images: Tensor = vae.decode(latents[:, :, None] if has_frames else latents, return_dict=False)[0]
    return (images[:, :, 0] if has_frames else images)[:, :3]  # without the opacity


def px_per_latent(vae: Any) -> int:  # noqa: ANN401 - likewise
    """Return px per latent pixel of a loaded VAE, each way."""
    found = VAES[type(vae).__name__].px_per_latent(vae.config)
    assert found is not None, "a loaded VAE has the lists that say so"
    return found


def stand_in(vae: Any) -> StandIn:  # noqa: ANN401 - likewise
    """Return what a pipeline that is to return latents reads of a VAE, whatever class it expects.

    It is not a module: a pipeline takes the device of any of its modules for that of all, and the VAE may be on another.
    """
    scale = px_per_latent(vae)
    levels = (0,) * scale.bit_length()  # one more than it halves
    config = StandIn(**{**vae.config, "block_out_channels": levels, "encoder_block_out_channels": levels})
    more = {"spatial_compression_ratio": scale, "temperal_downsample": levels[1:], "bn": getattr(vae, "bn", None)}
    return StandIn(config=config, dtype=vae.dtype, **more)


def batch_norm(vae: Any) -> dict[str, Any]:  # noqa: ANN401 - likewise
    """Return mean and standard deviation by which a VAE's latents are normalised in 2 by 2 patches, 4 C numbers each, and ε."""
    import torch

    eps = float(vae.config.batch_norm_eps)
    std = torch.sqrt(vae.bn.running_var.double() + eps)
    return {"mean": vae.bn.running_mean.double().tolist(), "std": std.tolist(), "eps": eps}
