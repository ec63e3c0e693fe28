"""The grid that a model takes where none is asked for, by its configuration alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bucketline.ingest.grids import Grid, parse_grid

if TYPE_CHECKING:
    from bucketline.ingest.encoders.model_folder import ModelFolder


def model_grid(model: ModelFolder, downscale: int, wanted: str | None) -> Grid:
    """Give the grid `wanted`, or else one of the model's own area; `downscale` is px per latent pixel.

    Raises:
        UsageError: where the grid does not suit the VAE.
        ModelError: where a configuration is not JSON.
    """
    unet = model.config("unet") or {}
    levels = len(unet.get("block_out_channels", ())) or 4
    step_px = downscale * 2 ** (levels - 1)  # what the UNet halves without a remainder
    sample_size = unet.get("sample_size") or 64
    side = sample_size if isinstance(sample_size, int) else max(sample_size)
    return parse_grid(wanted or f"area:{side * downscale}", step_px=step_px, align_px=downscale)
