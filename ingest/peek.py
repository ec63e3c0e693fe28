"""Decode the stored latent of one sample to an image, with the VAE that encoded it."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.errors import UsageError
from bucketline.files.atomic_folder import refuse_existing
from bucketline.files.atomic_write import write_or_explain
from bucketline.files.paths import overlap
from bucketline.ingest.pipeline.model.device import chosen_device, refuse_no_cuda
from bucketline.store.format.columns import LATENT
from bucketline.store.read.verified_sample import checked_row

if TYPE_CHECKING:
    from pathlib import Path

    from bucketline.ingest.encoders.model_folder import ModelFolder
    from bucketline.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Peeked:
    """The written image, as `ingest peek --json` prints it."""

    png: str
    id: str
    bucket: str
    height_px: int
    width_px: int
    captions: tuple[str, ...]


def refuse_image(store: Store, png: Path) -> None:
    """Check that an image can be written to `png`."""
    if overlap(png, store.path):
        raise UsageError(f"{png} is inside the store {store.path}; choose a place outside it")
    if png.suffix.lower() != ".png":
        raise UsageError(f"{png} does not end in .png, and the image is written as a PNG; choose another name")
    refuse_existing(png, "file")


def peek(store: Store, sample_id: str, model: ModelFolder, png: Path, device: str) -> Peeked:
    """Decode a sample's latent (the mean of stored moments) and write it as an upright RGB image of its bucket's size."""
    refuse_image(store, png)
    shard, record = store.sample(sample_id)
    row = checked_row(store, store.shards.index(shard), record)
    column = store.manifest.specs[record.bucket].column(LATENT)
    refuse_no_cuda(device)
    model.part("vae")
    import torch  # once what can be refused without it is
    from PIL import Image

    from bucketline.ingest.sheet.decoded import decoding_vae
    from bucketline.torch_dtypes import TORCH_DTYPES

    vae = decoding_vae(store.encoders.get("vae"), model, chosen_device(device, 0), column.dtype)
    latent = torch.frombuffer(bytearray(row[LATENT]), dtype=TORCH_DTYPES[column.dtype]).reshape(column.shape)
    pixels = vae.decode(latent[None, : vae.latent_channels])[0]  # the means are the first half of moments
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "PNG")
    write_or_explain(png, data.getvalue())
    height_px, width_px = pixels.shape[:2]
    return Peeked(
        png=str(png), id=record.id, bucket=record.bucket, height_px=height_px, width_px=width_px, captions=record.captions
    )
