"""The pictures at the end: the one moment at which the trainer has a VAE."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np
import torch

from bucketline.loader import Batch, Loader, LoaderConfig, Remainder
from bucketline.loader.captions import EMPTY, choose_captions
from bucketline.train.encoders import UNREADABLE, VAE_FOLDER, read_vae
from bucketline.train.open_stores import once_each
from bucketline.train.pictures import DrawnSample
from bucketline.train.prep import sample_noise
from bucketline.train.sampling import sample_latents

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import Tensor, nn

    from bucketline.store import Store
    from bucketline.train.assemble import Parts

log = logging.getLogger(__name__)


def draw_samples(parts: Parts, split: str) -> list[DrawnSample]:
    """Draw `--num-pictures` from stored caption embeddings in the averaged weights; none, with a word, without a VAE."""
    config = parts.training.config
    device = next(parts.training.model.parameters()).device
    if config.num_pictures == 0 or (vae := load_vae(config.model, parts.shares[0].store, device)) is None:
        return []
    loader_config = LoaderConfig(
        batch_size=config.num_pictures, seed=config.seed, split=split, remainder=Remainder.PARTIAL, epochs=1
    )
    drawn: list[DrawnSample] = []
    with Loader(once_each(parts.shares), loader_config, device=device) as loader:
        for batch in loader:
            drawn += _draw_batch(parts, vae, batch)
            if len(drawn) >= config.num_pictures:
                break
    return drawn[: config.num_pictures]


def _draw_batch(parts: Parts, vae: nn.Module, batch: Batch) -> list[DrawnSample]:
    training = parts.training
    noise = sample_noise(batch)
    latents = sample_latents(
        batch,
        noise=noise,
        family=training.family,
        model=training.average.model,
        schedule=parts.schedule,
        num_steps=training.config.picture_steps,
        autocast=training.autocast,
    )
    generated = decode(vae, parts.latent_scale.invert(latents))
    real = decode(vae, batch.latents.float()[:, : noise.shape[1]])  # of moments the means
    captions = captions_of([share.store for share in parts.shares], batch)
    return [
        DrawnSample(real=real[i], generated=generated[i], caption=captions[i])
        for i, weight in enumerate(batch.weight.tolist())
        if weight > 0
    ]


def load_vae(model_folder: Path, store: Store, device: torch.device) -> nn.Module | None:
    """Load the VAE that decodes the store's latents; None, with a word, where the model folder has none that can."""
    try:
        vae, other = read_vae(model_folder / VAE_FOLDER, store.manifest.encoders)
    except UNREADABLE as error:
        log.warning("no pictures: %s holds no VAE that can be loaded (%s)", model_folder / VAE_FOLDER, error)
        return None
    if other is not None:
        log.warning("no pictures: %s", other)
        return None
    if hasattr(vae, "enable_slicing"):
        vae.enable_slicing()  # type: ignore[operator] # one picture at a time: training has most of the memory
    return vae.to(device)


@torch.no_grad()
def decode(vae: nn.Module, latents: Tensor) -> NDArray[np.uint8]:
    """Decode unscaled latents, [B, C, h, w] float32, to pictures, [B, H, W, 3]."""
    pixels: Tensor = vae.decode(latents, return_dict=False)[0]  # type: ignore[operator]
    return ((pixels.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).cpu().numpy()


def captions_of(stores: Sequence[Store], batch: Batch) -> list[str]:
    """Give the caption that each sample of a batch came with, by the draw by which the loader chose it."""
    texts = [_stored_captions(stores, digest.tobytes()) for digest in batch.ids.cpu().numpy()]
    chosen = choose_captions(np.array([len(captions) for captions in texts]), batch.keys.cpu().numpy())
    return ["" if n == EMPTY else captions[n] for captions, n in zip(texts, chosen, strict=True)]


def _stored_captions(stores: Sequence[Store], digest: bytes) -> tuple[str, ...]:
    for store in stores:
        for shard in store.shards:
            if entry := shard.find(digest):
                return shard.record(entry).captions[: store.manifest.max_captions]
    raise AssertionError(f"no sample has the digest {digest.hex()}, a batch does")
