"""What sizes a model takes: the grid that it is given where none is asked for, and the sizes that it must not be given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bucketline.errors import ModelError
from bucketline.ingest.grids import Grid, parse_grid
from bucketline.square_only import refuse_unsquare, square_only

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bucketline.ingest.encoders.model_folder import ModelFolder

PACKED = {"FluxTransformer2DModel": 2, "ChromaTransformer2DModel": 2}
"""Transformers whose pipelines lay so many latent pixels side by side, each way, before `patch_size` counts."""

_LEVELS = {"AutoencoderKL": "block_out_channels", "AutoencoderDC": "encoder_block_out_channels"}
"""The VAEs that are taken, and what of their configuration has one entry a halving, and one more."""


def latent_sizes(model: ModelFolder) -> tuple[str, int, int]:
    """Give a VAE's class, what a latent pixel covers, in px each way, and a latent's channels, by `vae/config.json` alone.

    Raises:
        ModelError: where there is none, or it is not that of a VAE that is taken.
    """
    model.part("vae")
    config = model.config("vae") or {}
    kind = str(config.get("_class_name") or "AutoencoderKL")
    levels = config.get(_LEVELS.get(kind, ""))
    channels = config.get("latent_channels")
    if not isinstance(levels, list) or not levels or not isinstance(channels, int):
        raise ModelError(
            f"{model.name}: vae/config.json is not that of an AutoencoderKL (block_out_channels, latent_channels) or of an "
            "AutoencoderDC (encoder_block_out_channels, latent_channels); name a model that has one of these"
        )
    return kind, 2 ** (len(levels) - 1), channels


def model_grid(wanted: str | None, model: ModelFolder, downscale: int) -> Grid:
    """Make the grid that the user wants, or the model's own: `downscale` is what a latent pixel covers, in px each way.

    Raises:
        UsageError: where it is no grid, does not suit the VAE, or has unsquare sizes for a model that takes no other.
    """
    unet, transformer = model.config("unet"), model.config("transformer")
    kind = square_only(transformer, model.index())
    token_px = None if transformer is None else _token_px(transformer, downscale)
    side = _side_px(unet, transformer, downscale)
    if token_px is not None:
        step = max(token_px, side // 16 // token_px * token_px)
    else:
        levels = len((unet or {}).get("block_out_channels", ())) or 4
        step = downscale * 2 ** (levels - 1)  # what the UNet halves without a remainder
    text = wanted or (f"square:{side}" if kind else f"area:{side}")
    grid = parse_grid(text, step_px=step, align_px=downscale, token_px=token_px)
    if kind:
        sizes = ((str(size), size.height_px, size.width_px) for size in grid.sizes)
        refuse_unsquare(f"--grid {text!r}", kind, sizes, f"use --grid square:{side}, or a list of square sizes")
    return grid


def _token_px(transformer: Mapping[str, Any], downscale: int) -> int:
    patch = transformer.get("patch_size") or 1
    if not isinstance(patch, int):  # of a video's: frames, height, width
        patch = patch[-1]
    return downscale * int(patch) * PACKED.get(str(transformer.get("_class_name")), 1)


def _side_px(unet: Mapping[str, Any] | None, transformer: Mapping[str, Any] | None, downscale: int) -> int:
    """Give the side of the square picture that the model was made for."""
    usual = 64 if transformer is None else 128  # latent pixels: 512 px for a UNet, 1024 for the transformers that name no size
    size = (unet or transformer or {}).get("sample_size") or usual
    return downscale * int(size if isinstance(size, int) else max(size))
