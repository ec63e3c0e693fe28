"""The pictures at the end: the one moment at which the trainer has a VAE."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

import torch
from diffusers import AutoencoderKL

from bucketline.loader import Batch, Loader, LoaderConfig, Remainder
from bucketline.loader.draws import Purpose, uniform_on_host
from bucketline.train.pictures import DrawnSample
from bucketline.train.prep import sample_noise
from bucketline.train.sampling import sample_latents

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from bucketline.store import Store
    from bucketline.train.assemble import Parts

log = logging.getLogger(__name__)

FOLDER = "vae"


def draw_samples(parts: Parts, split: str) -> list[DrawnSample]:
    """Draw `--num-pictures` from stored caption embeddings in the averaged weights; none, with a word, without a VAE."""
    config = parts.training.config
    device = parts.training.prep.schedule.signal.device
    if config.num_pictures == 0 or (vae := load_vae(config.model, parts.store, device)) is None:
        return []
    loader_config = LoaderConfig(
        batch_size=config.num_pictures, seed=config.seed, split=split, remainder=Remainder.PARTIAL, epochs=1
    )
    drawn: list[DrawnSample] = []
    with Loader(parts.store, loader_config, device=device) as loader:
        for batch in loader:
            drawn += _draw_batch(parts, vae, batch)
            if len(drawn) >= config.num_pictures:
                break
    return drawn[: config.num_pictures]


def _draw_batch(parts: Parts, vae: AutoencoderKL, batch: Batch) -> list[DrawnSample]:
    training = parts.training
    latents = sample_latents(
        batch,
        noise=sample_noise(batch),
        family=training.family,
        model=training.average.model,
        scheduler_config=parts.schedule.config,
        num_steps=training.config.picture_steps,
        autocast=training.autocast,
    )
    generated = decode(vae, parts.latent_scale.invert(latents))
    real = decode(vae, batch.latents.float())
    captions = captions_of(parts.store, batch)
    return [
        DrawnSample(real=real[i], generated=generated[i], caption=captions[i])
        for i, weight in enumerate(batch.weight.tolist())
        if weight > 0
    ]


def load_vae(model_folder: Path, store: Store, device: torch.device) -> AutoencoderKL | None:
    """Load the VAE that decodes the store's latents; None, with a word, where the model folder has none that can."""
    path = model_folder / FOLDER / "config.json"
    stored = store.manifest.encoders["vae"]
    assert isinstance(stored, dict)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        for field, default in (("latent_channels", 4), ("scaling_factor", 0.18215)):
            if config.get(field, default) != stored[field]:
                log.warning(
                    "no pictures: %s is not the VAE that the store was packed with: %s is %s, the store's is %s",
                    path.parent, field, config.get(field, default), stored[field],
                )  # fmt: skip
                return None
        vae: AutoencoderKL = AutoencoderKL.from_pretrained(str(path.parent), torch_dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError, RuntimeError, AttributeError) as error:
        log.warning("no pictures: %s holds no VAE that can be loaded (%s)", path.parent, error)
        return None
    return vae.to(device).requires_grad_(requires_grad=False).eval()  # type: ignore[no-any-return, unused-ignore]


@torch.no_grad()
def decode(vae: AutoencoderKL, latents: Tensor) -> NDArray[np.uint8]:
    """Decode unscaled latents, [B, C, h, w] float32, to pictures, [B, H, W, 3]."""
    pixels: Tensor = vae.decode(latents, return_dict=False)[0]
    return ((pixels.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).cpu().numpy()


def captions_of(store: Store, batch: Batch) -> list[str]:
    """Give the caption that each sample of a batch came with, by the draw by which the loader chose it."""
    captions = []
    chances = uniform_on_host(batch.keys.cpu().numpy(), Purpose.CAPTION)
    for digest, chance in zip(batch.ids.cpu().numpy(), chances, strict=True):
        for shard in store.shards:
            if entry := shard.find(digest.tobytes()):
                stored = shard.record(entry).captions[: store.manifest.max_captions]
                captions.append(stored[int(chance * len(stored))] if stored else "")
                break
        else:
            captions.append(digest.tobytes().hex())
    return captions
