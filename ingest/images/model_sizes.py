"""Image sizes of a model: its default grid, its latent sizes, and the sizes that it cannot take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bucketline.errors import ModelError
from bucketline.families.family import Family, refuse_unsquare
from bucketline.families.registry import family_of_model, square_only
from bucketline.families.vaes import PACKED_VAES, VAES, latent_channels, vae_class
from bucketline.ingest.images.bucket_grid import Grid, parse_grid

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bucketline.ingest.encoders.model_folder import ModelFolder


def latent_sizes(model: ModelFolder) -> tuple[str, int, int]:
    """Return a VAE's class, px per latent pixel (each way) and latent channels, from `vae/config.json` only."""
    model.part("vae")
    config = model.config("vae") or {}
    kind = vae_class(config)
    if kind not in PACKED_VAES:
        raise ModelError(f"{model.name}: vae/ is a {kind[:80]}, expected {' or '.join(PACKED_VAES)}; name a model that has one")
    downscale, channels = VAES[kind].px_per_latent(config), latent_channels(config)
    if downscale is None or channels is None:
        raise ModelError(
            f"{model.name}: vae/config.json is not that of an {kind}: it lacks its levels or its channels "
            f"({VAES[kind].levels_field or VAES[kind].halvings_field}, latent_channels or z_dim); download it again"
        )
    return kind, downscale, channels


def model_grid(wanted: str | None, model: ModelFolder, downscale: int) -> Grid:
    """Return the requested grid, or the model's own; `downscale` is px per latent pixel, each way."""
    unet, transformer = model.config("unet"), model.config("transformer")
    kind = square_only(transformer, model.index())
    token_px = None if transformer is None else _token_px(transformer, downscale)
    side = _side_px(unet, transformer, downscale)
    if token_px is not None:
        step = max(token_px, side // 16 // token_px * token_px)
    else:
        levels = len((unet or {}).get("block_out_channels", ())) or 4
        step = downscale * 2 ** (levels - 1)  # the UNet can halve this without a remainder
    text = wanted or (f"square:{side}" if kind else f"area:{side}")
    grid = parse_grid(text, step_px=step, align_px=downscale, token_px=token_px)
    if kind:
        sizes = ((str(size), size.height_px, size.width_px) for size in grid.sizes)
        refuse_unsquare(f"--grid {text!r}", kind, sizes, f"use --grid square:{side}, or a list of square sizes")
    return grid


def _token_px(transformer: Mapping[str, Any], downscale: int) -> int:
    family = family_of_model(transformer) or Family
    return downscale * family.positions_per_token(transformer) * family.alignment


def _side_px(unet: Mapping[str, Any] | None, transformer: Mapping[str, Any] | None, downscale: int) -> int:
    """Return the side in px of the square image that the model was made for."""
    usual = 64 if transformer is None else 128  # latent pixels without a sample_size: 512 px for a UNet, else 1024
    size = (unet or transformer or {}).get("sample_size") or usual
    return downscale * int(size if isinstance(size, int) else max(size))
