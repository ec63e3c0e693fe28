"""Draw images with the averaged weights: of a store's prompts, or of stored captions next to the real images.

Letters: B images of a batch, C latent channels, h and w latent height and width, H and W those of an image.
"""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.distributed.fsdp import FSDPModule

from bucketline.allocator import NoRoom, attempt
from bucketline.errors import TrainError
from bucketline.families import vaes
from bucketline.files.run_marker import IMAGES_FOLDER
from bucketline.loader import Loader, LoaderConfig, Remainder
from bucketline.loader.collate.columns import captions_of
from bucketline.loader.mixture import once_each
from bucketline.train.checkpoint import folder_of_step, way_on
from bucketline.train.images.image_files import PER_ROW, DrawnSample, write_images
from bucketline.train.images.pipeline import draw_latents, guidance_of
from bucketline.train.images.prompts import DrawingBatch, prompt_batches
from bucketline.train.load import UNREADABLE, VAE_FOLDER, locate, read_vae
from bucketline.train.noise import sample_noise

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from bucketline.loader import WeightedStore
    from bucketline.store import Store
    from bucketline.train.config import TrainConfig
    from bucketline.train.images.prompts import StoredPrompt
    from bucketline.train.step import Training

log = logging.getLogger(__name__)


def draw_images(
    training: Training,
    shares: Sequence[WeightedStore],
    prompts: Sequence[StoredPrompt],
    sheet: Path | None,
    *,
    steps_done: int,
    keeps: bool,
) -> bool:
    """Generate images with the averaged weights, write a contact sheet and a file of each; return whether there were any.

    They are of the prompts, or without any `--num-images` of stored captions, held-out ones if there are any. There are none,
    with a warning, without a VAE or enough memory. `sheet` None: only try, in two steps of the sampler, whether there will be.
    With sharding every rank must call this, and only one `keeps` the images.
    """
    if sheet is None:
        training = replace(training, config=replace(training.config, image_steps=2))  # by one, a shift to a last sigma is 0 / 0
    config = training.config
    if (vae := drawing_vae(config, shares[0].store)) is None:
        return False
    batches = _prompt_batches(training, prompts) if prompts else _caption_batches(training, shares)
    drawn = _drawn(training, vae, batches, keeps=keeps)
    torch.cuda.empty_cache()  # for the next step
    if isinstance(drawn, NoRoom):
        log.warning("no images: not enough device memory in addition to training (%.200s); training is not affected", drawn)
        return False
    if not drawn or sheet is None:
        return False
    order = {prompt.id: number for number, prompt in enumerate(prompts)}
    drawn = sorted(drawn, key=lambda one: order[str(one.entry["id"])]) if prompts else drawn[: config.num_images]
    write_images(drawn, sheet, config.output_dir / IMAGES_FOLDER / folder_of_step(steps_done))
    return True


def _drawn(training: Training, vae: nn.Module, batches: Iterable[DrawingBatch], *, keeps: bool) -> list[DrawnSample] | NoRoom:
    """Return the images of all batches, if memory is short decoded in tiles, whose edges may be visible."""
    invert, device = training.prep.scale.invert, next(training.model.parameters()).device
    sampled = attempt(lambda: [(one, invert(draw_latents(training, vae, one))) for one in batches])
    if isinstance(sampled, NoRoom):
        if isinstance(training.model, FSDPModule):
            raise TrainError(
                f"not enough device memory for images in addition to training ({sampled!s:.200}), and no rank can leave a "
                f"sharded model by itself; {way_on(training.config.output_dir)}, with --num-images 0"
            )
        return sampled
    if not keeps:
        return []

    def decode() -> list[DrawnSample]:
        vae.to(device)
        return [image for one, latents in sampled for image in _decode_batch(vae, one, latents)]

    drawn = attempt(decode)
    if isinstance(drawn, NoRoom) and hasattr(vae, "enable_tiling"):
        vae.enable_tiling()  # type: ignore[operator]
        drawn = attempt(decode)
    return drawn


def _prompt_batches(training: Training, prompts: Sequence[StoredPrompt]) -> Iterator[DrawingBatch]:
    device = next(training.model.parameters()).device
    in_training = training.config.sizes().get("batch_size")  # which fits, and is compiled
    at_most = training.family.most_drawn or in_training or PER_ROW
    return prompt_batches(prompts, at_most, guidance_of(training), device, training.family)


def _caption_batches(training: Training, shares: Sequence[WeightedStore]) -> Iterator[DrawingBatch]:
    """Yield the first `--num-images` samples, held-out ones if there are any, each with one of its captions."""
    split = "val" if any(share.store.buckets("val") for share in shares) else "train"
    config, guidance, device = training.config, guidance_of(training), next(training.model.parameters()).device
    at_most = training.family.most_drawn or config.num_images
    asked = LoaderConfig(batch_size=at_most, seed=config.seed, split=split, remainder=Remainder.PARTIAL, epochs=1)
    is_guided = training.family.is_guided(guidance)
    num_samples = 0
    with (
        Loader(once_each(shares), asked, device=device) as loader,
        Loader(once_each(shares), replace(asked, caption_dropout=1.0), device=device) as dropping,
    ):
        for batch, dropped in zip(loader, dropping if is_guided else itertools.repeat(None), strict=False):
            noise = sample_noise(batch)
            chosen = captions_of([share.store for share in shares], batch)
            yield DrawingBatch(
                batch=batch,
                negative=dropped,
                noise=noise,
                guidance=guidance,
                entries=tuple({"id": one.id, "caption": one.text} for one in chosen),
                real=batch.latents.float()[:, : noise.shape[1]],  # for moments, the means
            )
            num_samples += int((batch.weight > 0).sum())
            if num_samples >= config.num_images:
                return


def _decode_batch(vae: nn.Module, one: DrawingBatch, latents: Tensor) -> Iterator[DrawnSample]:
    generated = _decode(vae, latents)
    real = itertools.repeat(None) if one.real is None else _decode(vae, one.real)
    for entry, weight, image, its_real in zip(one.entries, one.batch.weight.tolist(), generated, real, strict=False):
        if weight > 0:
            yield DrawnSample(entry=entry, real=its_real, generated=image)


def drawing_vae(config: TrainConfig, store: Store) -> nn.Module | None:
    """Load the model's VAE that decodes the store's latents, on the CPU; return None, with a warning, if there is none."""
    folder, file = locate(config.model, config.model_config)
    try:
        vae, other = read_vae(folder / VAE_FOLDER, store.manifest.encoders, file)
    except UNREADABLE as error:
        vae, other = None, f"{folder / VAE_FOLDER} has no VAE that can be loaded ({error})"
    if vae is None or other is not None:
        log.warning("no images: %s", other)
        return None
    if hasattr(vae, "enable_slicing"):
        vae.enable_slicing()  # type: ignore[operator] # one image at a time: training uses most of the memory
    return vae


@torch.no_grad()
def _decode(vae: nn.Module, latents: Tensor) -> NDArray[np.uint8]:
    """Decode unscaled latents, [B, C, h, w] float32, to images, [B, H, W, 3]."""
    pixels = vaes.vae_decode(vae, latents)
    return ((pixels.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).cpu().numpy()
