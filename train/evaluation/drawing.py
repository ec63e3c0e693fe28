"""Draw images with the averaged weights: of a store's prompts, or of stored captions next to the real images.

Letters: B images of a batch, C latent channels, h and w latent height and width, H and W those of an image.
"""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from bucketline.command_line import counted
from bucketline.families import vaes
from bucketline.files.run_marker import IMAGES_FOLDER
from bucketline.loader import Loader, LoaderConfig, Remainder
from bucketline.loader.collate.columns import captions_of
from bucketline.loader.mixture import once_each
from bucketline.train.evaluation.image_grid import PER_ROW, DrawnSample, draw_grid, write_each
from bucketline.train.evaluation.joint_pass import NoRoom, attempt, attempt_jointly
from bucketline.train.evaluation.pipeline import draw_latents, guidance_of
from bucketline.train.evaluation.prompts import DrawingBatch, prompt_batches
from bucketline.train.models.encoder_check import UNREADABLE, VAE_FOLDER, read_vae
from bucketline.train.models.load import locate
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
    from bucketline.train.evaluation.prompts import StoredPrompt
    from bucketline.train.noise import ModelSchedule
    from bucketline.train.step import Training

log = logging.getLogger(__name__)


def draw_images(
    training: Training,
    schedule: ModelSchedule,
    shares: Sequence[WeightedStore],
    prompts: Sequence[StoredPrompt],
    path: Path,
    *,
    steps_done: int,
    keeps: bool,
) -> bool:
    """Generate images with the averaged weights, write a grid and a file of each; return whether there were any.

    They are of the prompts, or without any `--num-images` of stored captions, held-out ones if there are any. There are none,
    with a warning, without a VAE or enough memory. With sharding every rank must call this, and only one `keeps` the images.
    """
    config = training.config
    if config.num_images == 0:
        return False
    kind, batches = "prompts", _prompt_batches(training, prompts)
    if not prompts:
        has_val = any(share.store.buckets("val") for share in shares)
        kind = "held-out samples, never trained on" if has_val else "training samples"
        batches = _caption_batches(training, shares, "val" if has_val else "train")
    drawn = _drawn(training, schedule, shares[0].store, batches, keeps=keeps)
    torch.cuda.empty_cache()  # for the next step
    if not drawn:
        return False
    order = {prompt.id: number for number, prompt in enumerate(prompts)}
    drawn = sorted(drawn, key=lambda one: order[str(one.entry["id"])]) if prompts else drawn[: config.num_images]
    path.parent.mkdir(exist_ok=True)
    draw_grid(drawn, path, title=f"After {counted(steps_done, 'step')}: {kind}")
    write_each(drawn, config.output_dir / IMAGES_FOLDER / f"step-{steps_done:08d}")
    return True


def _drawn(
    training: Training, schedule: ModelSchedule, store: Store, batches: Iterable[DrawingBatch], *, keeps: bool
) -> list[DrawnSample]:
    """Return the images of all batches; none, with a warning, without a VAE or enough memory."""
    if (vae := drawing_vae(training.config, store)) is None:
        return []

    def sample(one: DrawingBatch) -> Tensor:
        return training.prep.scale.invert(draw_latents(training, schedule, vae, one))

    sampled = attempt_jointly(training.model, lambda: [(batch, sample(batch)) for batch in batches])
    if isinstance(sampled, NoRoom):
        _say_no_room("the model's pass", sampled)
        return []
    return _decode_all(vae, sampled) if keeps else []


def _prompt_batches(training: Training, prompts: Sequence[StoredPrompt]) -> Iterator[DrawingBatch]:
    device = next(training.model.parameters()).device
    at_most = training.family.most_drawn or training.config.batch_size or PER_ROW  # what fits in training, and may have graphs
    return prompt_batches(prompts, at_most, guidance_of(training), device, training.family)


def _caption_batches(training: Training, shares: Sequence[WeightedStore], split: str) -> Iterator[DrawingBatch]:
    """Yield the first `--num-images` samples of a split, each with one of its captions."""
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


def _decode_all(vae: nn.Module, sampled: Sequence[tuple[DrawingBatch, Tensor]]) -> list[DrawnSample]:
    """Decode full images, or tiles with possibly visible edges if memory is short during training."""

    def decode_all() -> list[DrawnSample]:
        vae.to(sampled[0][1].device)
        return [drawn for batch, latents in sampled for drawn in _decode_batch(vae, batch, latents)]

    drawn = attempt(decode_all)
    if isinstance(drawn, NoRoom) and hasattr(vae, "enable_tiling"):
        vae.enable_tiling()  # type: ignore[operator]
        drawn = attempt(decode_all)
    if isinstance(drawn, NoRoom):
        _say_no_room("the VAE's decoding", drawn)
        return []
    return drawn


def _say_no_room(what: str, why: NoRoom) -> None:
    log.warning(
        "no images: not enough device memory for %s in addition to training (%.200s); training is not affected", what, why
    )


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
