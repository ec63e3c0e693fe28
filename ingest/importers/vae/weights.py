"""The weights of a VAE whose latents are imported, if the model has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bucketline.errors import ModelError
from bucketline.families import vaes
from bucketline.ingest.encoders.vae import load_vae

if TYPE_CHECKING:
    from bucketline.ingest.encoders.model_folder import ModelFolder
    from bucketline.typed_json import Json

PATCH_PX = 2  # a patch's height and width


def has_weights(model: ModelFolder) -> bool:
    """Return True if the model has the weights of its VAE, not only its configuration.

    Raises:
        ModelError: if they are on a hub that cannot be reached, and not in its cache.
    """
    return model.file is not None or model.has_weights("vae")


def saved_batch_norm(model: ModelFolder) -> Json:
    """Return mean and standard deviation by which a Flux.2 VAE's packed latents are normalised, 4 C numbers each.

    Raises:
        ModelError: if the model does not have its VAE's weights, among which they are.
    """
    if not has_weights(model):
        raise ModelError(
            f"{model.name} has only the configuration of its VAE; the statistics that scale Flux.2's latents are among its "
            "weights: download vae/ completely"
        )
    return vaes.batch_norm(load_vae(model))
