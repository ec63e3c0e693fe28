"""Latents decoded by the VAE that made them, as thumbnails for pages."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch

from bucketline.errors import FingerprintError
from bucketline.ingest.encoders.model_folder import open_model
from bucketline.ingest.encoders.vae import VaeEncoder
from bucketline.ingest.pipeline.model.device import chosen_device
from bucketline.ingest.sheet.source_images import THUMBNAIL_PX
from bucketline.pages.image_files import jpeg
from bucketline.typed_json import first_difference

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from bucketline.ingest.encoders.model_folder import ModelFolder

DECIDING = ("class", "config_hash", "weights_hash")  # fields of a VAE's provenance that determine its decoder's output


def decoding_vae(stored: object, model: ModelFolder, device: torch.device, dtype: str) -> VaeEncoder:
    """Return the model's VAE, checked to be the one that the store records in `encoders.vae`."""
    vae = VaeEncoder(model, device, dtype, encode_dtype="F32")
    before = {name: stored.get(name) for name in DECIDING} if isinstance(stored, dict) else {}
    now = {name: vae.provenance[name] for name in DECIDING}
    if difference := first_difference(before, now, "encoders.vae"):
        field, stored_value, present_value = difference
        raise FingerprintError(
            f"the store was made with {field} = {stored_value!s:.200}, {model.name} has {present_value!s:.200}; "
            "name the model that the store was packed with"
        )
    return vae


def decode_each(vae: VaeEncoder, latents: Sequence[NDArray[Any]]) -> list[NDArray[np.uint8]]:
    """Decode latents as stored, each `[C, h, w]`, one at a time, to images, each `[H, W, 3]`."""
    return [vae.decode(torch.from_numpy(np.ascontiguousarray(latent))[None].float())[0] for latent in latents]


def thumbnails(job: Mapping[str, Any], data: BinaryIO) -> list[str]:
    """Return latents of the job's shapes, F32 in `data`, decoded, as JPEGs in base64: for `store report`."""
    vae = decoding_vae(job["vae"], open_model(job["model"], job["model_config"]), chosen_device(job["device"], 0), "F32")
    found = []
    for shape in job["shapes"]:
        latent = np.frombuffer(bytearray(data.read(4 * int(np.prod(shape)))), dtype="<f4").reshape(shape)
        found.append(base64.b64encode(jpeg(decode_each(vae, [latent])[0], THUMBNAIL_PX)).decode("ascii"))
    return found
