"""Encode batches of images into the columns of a store, and put embeddings of captions into their stored form."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bucketline.ingest.encoders.latents import LatentColumns, LatentRow
from bucketline.ingest.images.decode import Decoded
from bucketline.store.format.text_block import Caption, make_caption, quantised_caption
from bucketline.torch_dtypes import as_stored

if TYPE_CHECKING:
    from bucketline.ingest.encoders.text_columns import Embedding
    from bucketline.ingest.encoders.vae import VaeEncoder
    from bucketline.ingest.pipeline.image_reader import ReadImage
    from bucketline.store.format.text_block import TextSpec


class BatchEncoder:
    """Makes the latent columns of batches of images."""

    def __init__(self, vae: VaeEncoder, *, flip: bool) -> None:
        self._latents = LatentColumns(vae, flip=flip)
        self.columns = self._latents.columns

    def latents(self, images: list[ReadImage]) -> list[LatentRow]:
        """Return the latents of images of one bucket; encode those that the store does not have."""
        decoded = [(image.item.id, image.image.pixels) for image in images if isinstance(image.image, Decoded)]
        encoded = iter(self._latents.encode(decoded) if decoded else ())
        return [
            next(encoded) if isinstance(image.image, Decoded) else LatentRow(columns=image.image.latents, problem=None)
            for image in images
        ]


def as_caption(spec: TextSpec, digest: bytes, embedding: Embedding) -> Caption:
    """Return an encoded caption in its stored form; quantises its tokens if its columns are of quantised text."""
    fixed = {name: as_stored(value) for name, value in embedding.fixed.items()}
    if not spec.is_quantised:
        return make_caption(spec, digest, {spec.tokens[0].name: as_stored(embedding.tokens)}, fixed)
    return quantised_caption(spec, digest, as_stored(embedding.tokens), fixed)
