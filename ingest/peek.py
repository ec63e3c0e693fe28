"""Seeing what was stored: one row's latent, decoded to a picture by the VAE that made it."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image

from bucketline.errors import FingerprintError, StoreError, UsageError
from bucketline.ingest.encoders.arrays import DTYPES
from bucketline.ingest.encoders.latents import LATENT
from bucketline.ingest.encoders.vae import VaeEncoder
from bucketline.store.checked_read import checked_row
from bucketline.store.durable import write_durably
from bucketline.store.json_difference import first_difference
from bucketline.store.overlap import overlap
from bucketline.store.staging import refuse_existing

if TYPE_CHECKING:
    from pathlib import Path

    from bucketline.ingest.encoders.model_folder import ModelFolder
    from bucketline.store import Store

DECIDING = ("class", "config_hash", "weights_hash")  # of a VAE's provenance, for what its decoder gives


@dataclass(frozen=True, slots=True, kw_only=True)
class Peeked:
    """The picture that was written; `ingest peek --json` prints it."""

    png: str
    id: str
    bucket: str
    height_px: int
    width_px: int
    captions: tuple[str, ...]


def refuse_picture(store: Store, png: Path) -> None:
    """Refuse a picture that is there already, has no folder to lie in, would lie in the store, or is called no PNG.

    Raises:
        UsageError: naming it.
    """
    if overlap(png, store.path):
        raise UsageError(f"{png} lies in the store {store.path}; choose a place outside it")
    if png.suffix.lower() != ".png":
        raise UsageError(f"{png}: the picture is written as a PNG; name a file that ends in .png")
    refuse_existing(png, "file")


def peek(store: Store, sample_id: str, model: ModelFolder, png: Path, device: torch.device) -> Peeked:
    """Decode a sample's latent, of stored moments its mean, and write it as an RGB picture of its bucket's size, upright.

    Raises:
        UsageError: where the picture exists, has no folder to lie in, would lie in the store, or is called no PNG.
        StoreError: where the store has no such sample, or the picture cannot be written.
        CorruptError: where the row's bytes are not those that were written.
        ModelError: where the model's VAE is missing or cannot be loaded.
        FingerprintError: where it is not the VAE that made the store.
    """
    refuse_picture(store, png)
    shard, record = store.sample(sample_id)
    row = checked_row(store, store.shards.index(shard), record)
    column = store.manifest.specs[record.bucket].column(LATENT)
    vae = VaeEncoder(model, device, column.dtype, encode_dtype="F32")
    _check_vae(store, vae, model)
    latent = torch.frombuffer(bytearray(row[LATENT]), dtype=DTYPES[column.dtype]).reshape(column.shape)
    pixels = vae.decode(latent[None, : vae.latent_channels])[0]  # of moments, the means come first
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "PNG")
    try:
        write_durably(png, data.getvalue())
    except OSError as error:
        raise StoreError(f"{png} cannot be written: {error.strerror}") from error
    height_px, width_px = pixels.shape[:2]
    return Peeked(
        png=str(png), id=record.id, bucket=record.bucket, height_px=height_px, width_px=width_px, captions=record.captions
    )


def _check_vae(store: Store, vae: VaeEncoder, model: ModelFolder) -> None:
    """Refuse a VAE that would make another picture of the latent than the one that was encoded."""
    stored: Any = store.manifest.encoders.get("vae")
    before = {name: stored.get(name) for name in DECIDING} if isinstance(stored, dict) else {}
    now = {name: vae.provenance[name] for name in DECIDING}
    if difference := first_difference(before, now, "encoders.vae"):
        field, stored_value, present_value = difference
        raise FingerprintError(
            f"the store was made with {field} = {stored_value!s:.200}, {model.name} has {present_value!s:.200}; "
            "name the model that the store was packed with"
        )
