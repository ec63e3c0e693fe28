"""The VAE classes whose latents can be imported, and their weights if the model has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from bucketline.errors import ModelError
from bucketline.ingest.encoders.vae import load_vae

if TYPE_CHECKING:
    from bucketline.ingest.encoders.model_folder import ModelFolder
    from bucketline.typed_json import Json

PACKED = "AutoencoderKLFlux2"  # whose latents a model is fed in patches, normalised by the batch norm among its weights
PATCH = 2  # a patch's height and width


@dataclass(frozen=True, slots=True, kw_only=True)
class VaeKind:
    """The constants of a VAE that its configuration leaves to the defaults of its class."""

    scaling: float = 1.0
    downscale: int = 8
    downscale_field: str | None = None  # of its configuration, if it has one
    frames_field: str | None = None  # None: its latents are of images
    frames_step: int = 4


KINDS = {
    "AutoencoderKL": VaeKind(scaling=0.18215),
    "AutoencoderDC": VaeKind(),
    "AutoencoderKLQwenImage": VaeKind(),
    "AutoencoderKLWan": VaeKind(downscale_field="scale_factor_spatial", frames_field="scale_factor_temporal"),
    "AutoencoderKLHunyuanVideo": VaeKind(
        scaling=0.476986, downscale_field="spatial_compression_ratio", frames_field="temporal_compression_ratio"
    ),
    PACKED: VaeKind(),
}
DOWNSCALED_BY_LEVELS = {  # and the field that lists them
    "AutoencoderKL": "block_out_channels",
    "AutoencoderDC": "encoder_block_out_channels",
    PACKED: "block_out_channels",
}


def has_weights(model: ModelFolder) -> bool:
    """Return True if the model has the weights of its VAE, not only its configuration.

    Raises:
        ModelError: if they are on a hub that cannot be reached, and not in its cache.
    """
    return model.file is not None or model.has_weights("vae")


def batch_norm(model: ModelFolder) -> Json:
    """Return mean and standard deviation by which a Flux.2 VAE's packed latents are normalised, 4 C numbers each.

    Raises:
        ModelError: if the model does not have its VAE's weights, among which they are.
    """
    if not has_weights(model):
        raise ModelError(
            f"{model.name} has only the configuration of its VAE; the statistics that scale Flux.2's latents are among its "
            "weights: download vae/ completely"
        )
    vae = load_vae(model, tuple(KINDS))
    std = torch.sqrt(vae.bn.running_var.double() + float(vae.config.batch_norm_eps))
    return {"mean": vae.bn.running_mean.double().tolist(), "std": std.tolist()}
