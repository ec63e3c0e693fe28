"""Draw latents by the family's own pipeline of diffusers, made of the model in training, stored embeddings and keyed noise.

The pipeline's class is imported when the first images are drawn: it takes seconds, most of them for text encoders' libraries.
Letters: B images of a batch, C latent channels, h and w latent height and width, L tokens (padded).
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad
from torch.utils._pytree import tree_map_only

from bucketline.families import vaes
from bucketline.train.load import locate, read_index
from bucketline.train.noise import FlowSchedule

if TYPE_CHECKING:
    from torch import Tensor, nn

    from bucketline.loader import Batch
    from bucketline.train.images.prompts import DrawingBatch
    from bucketline.train.step import Training


@torch.no_grad()
def draw_latents(training: Training, vae: nn.Module, one: DrawingBatch) -> Tensor:
    """Return latents of the averaged model for a batch, in the model's scaling, [B, C, h, w] float32.

    With `negative` conditions, by classifier-free guidance (Ho and Salimans 2022, arXiv 2207.12598).
    """
    scheduler = _scheduler(training)
    latents = _keep_latents(scheduler)
    # A batch in the shape of a validation's runs its graphs; nothing is compiled for another.
    with training.averaged() as model, torch.compiler.set_stance("eager_on_recompile"):
        if training.family.embeds:
            _draw_by_pipeline(training, model, scheduler, vae, one)
        else:
            _draw_by_steps(training, model, scheduler, one)
    return training.family.unpacked(latents[-1], *one.noise.shape[2:]).float()


def guidance_of(training: Training) -> float:
    """Return the guidance of a run's images: its option, or what the model's pipeline takes by default."""
    asked = training.config.image_guidance
    return training.family.image_guidance if asked is None else asked


def _draw_by_pipeline(training: Training, model: nn.Module, scheduler: Any, vae: nn.Module, one: DrawingBatch) -> None:  # noqa: ANN401 - diffusers has no types
    family = training.family
    index = read_index(locate(training.config.model, training.config.model_config)[0])
    pipeline = family.pipeline({family.folder: model, "scheduler": scheduler, "vae": vaes.stand_in(vae)}, index)
    pipeline.check_inputs = lambda *_args, **_more: None  # of sizes for a VAE that divides by 8, whatever this one does
    pipeline.set_progress_bar_config(disable=True)
    given, batches = call_of(training, vae, one)
    # In the precision of training; steps, and guidance between predictions, in 32 bits.
    with training.autocast, model.register_forward_hook(_in_32_bits):
        family.draw(pipeline, given, *batches)


def call_of(training: Training, vae: nn.Module, one: DrawingBatch) -> tuple[dict[str, Any], list[Batch]]:
    """Return the arguments of a pipeline's call that draws a batch, and the batches whose embeddings `Family.draw` adds."""
    family = training.family
    height, width = (side * vaes.px_per_latent(vae) for side in one.noise.shape[2:])
    batches = [one.batch]
    if one.negative is not None and family.is_guided(one.guidance):
        batches.append(one.negative)
    if family.joins_negative:
        num_tokens = max(own.tokens.shape[1] for own in batches)
        batches = [_padded(own, num_tokens) for own in batches]
    given = {
        "latents": family.packed(one.noise),
        "height": height,
        "width": width,
        "num_inference_steps": training.config.image_steps,
        "output_type": "latent",
        family.guidance_argument: one.guidance if family.is_told_guidance or len(batches) > 1 else family.no_guidance,
        **family.call_options,
    }
    return given, batches


def _draw_by_steps(training: Training, model: nn.Module, scheduler: Any, one: DrawingBatch) -> None:  # noqa: ANN401 - likewise
    """Draw for a family whose pipeline takes no embeddings, with the steps that the scheduler has by itself."""
    noise = training.prep.schedule
    mu = {"mu": noise.mu(*one.noise.shape[2:])} if isinstance(noise, FlowSchedule) else {}
    scheduler.set_timesteps(training.config.image_steps, device=one.noise.device, **mu)
    told = replace(training, family=training.family.with_guidance(one.guidance))
    latents = one.noise
    for timestep in scheduler.timesteps:
        timesteps = timestep.repeat(len(latents))
        prediction = told.predict(model, latents, timesteps, one.batch).float()
        if one.negative is not None:
            plain = told.predict(model, latents, timesteps, one.negative).float()
            prediction = plain + one.guidance * (prediction - plain)
        latents = scheduler.step(prediction, timestep, latents, return_dict=False)[0]


def _scheduler(training: Training) -> Any:  # noqa: ANN401 - likewise
    """Return diffusers' scheduler with the trained objective.

    Source: Song et al. 2020, "Denoising Diffusion Implicit Models" (arXiv 2010.02502), with trailing timesteps, since only the
    last one is near pure noise: Lin et al. 2023 (arXiv 2305.08891).
    """
    from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler

    if isinstance(training.prep.schedule, FlowSchedule):
        flow: Any = FlowMatchEulerDiscreteScheduler.from_config(training.scheduler)
        # Both are for pipelines of diffusion models, whose UNet may be trained as a flow.
        flow.init_noise_sigma = 1.0
        flow.scale_model_input = lambda sample, _timestep=None: sample
        return flow
    return DDIMScheduler.from_config(
        training.scheduler,
        clip_sample=False,
        thresholding=False,
        set_alpha_to_one=True,
        timestep_spacing="trailing",
        steps_offset=1,  # not used with these timesteps; pipelines warn of another
    )


def _keep_latents(scheduler: Any) -> list[Tensor]:  # noqa: ANN401 - likewise
    """Return a list that has the latents of the scheduler's last step: some pipelines return unscaled ones."""
    latents: list[Tensor] = []
    step = scheduler.step

    @functools.wraps(step)
    def kept(*args: Any, **options: Any) -> Any:  # noqa: ANN401 - likewise
        found = step(*args, **options)
        latents[:] = [found[0]]
        return found

    scheduler.step = kept
    return latents


def _padded(one: Batch, num_tokens: int) -> Batch:
    """Return a batch with padding up to so many tokens."""
    more = num_tokens - one.tokens.shape[1]
    return replace(one, tokens=pad(one.tokens, (0, 0, 0, more)), token_mask=pad(one.token_mask, (0, more)))


def _in_32_bits(_model: nn.Module, _args: object, output: Any) -> Any:  # noqa: ANN401 - a model's
    return tree_map_only(torch.Tensor, torch.Tensor.float, output)
