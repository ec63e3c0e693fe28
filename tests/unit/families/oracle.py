"""Diffusers' own pipelines as the oracle: one step of a pipeline, with all that goes in and out of its model recorded."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bucketline.ingest.encoders.text_columns import Embedding
from bucketline.loader import Batch

UNCHECKED = {"return_dict", "attention_kwargs", "joint_attention_kwargs", "cross_attention_kwargs"}


class _EnoughError(Exception):
    """The pipeline has made its first prediction."""


@dataclass(kw_only=True)
class Recorded:
    """The first step of a pipeline."""

    arguments: dict[str, Any] = field(default_factory=dict)  # of the model's `forward`, by name
    output: Any = None  # the model's first
    prediction: Any = None  # the scheduler's
    timestep: Any = None  # likewise
    sample: Any = None  # likewise
    stepped: Any = None  # what the scheduler returned
    decoded: Any = None  # what the VAE was given


def one_step(pipeline: Any, captions: Sequence[str], *, decodes: bool = False, learns: bool = False, **asked: Any) -> Recorded:
    """Run one step of a pipeline, with gradients if it `learns`; continue to the VAE only if it `decodes`."""
    recorded = Recorded()
    model = pipeline.transformer if getattr(pipeline, "transformer", None) is not None else pipeline.unet
    forward, step, decode = model.forward, pipeline.scheduler.step, pipeline.vae.decode
    names = inspect.signature(forward)

    def record_forward(*args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(learns):  # modular pipelines disable gradients in each step
            output = forward(*args, **kwargs)
        if not recorded.arguments:
            recorded.arguments = dict(names.bind(*args, **kwargs).arguments)
            recorded.output = output
        return output

    def record_step(prediction: Any, timestep: Any, sample: Any, *args: Any, **kwargs: Any) -> Any:
        recorded.prediction, recorded.timestep, recorded.sample = prediction, timestep, sample
        if not decodes:
            raise _EnoughError
        stepped = step(prediction, timestep, sample, *args, **kwargs)
        recorded.stepped = stepped[0] if isinstance(stepped, tuple) else stepped.prev_sample
        return stepped

    def record_decode(latents: Any, *args: Any, **kwargs: Any) -> Any:
        recorded.decoded = latents
        return decode(latents, *args, **kwargs)

    model.forward, pipeline.scheduler.step, pipeline.vae.decode = record_forward, record_step, record_decode
    pipeline.set_progress_bar_config(disable=True)
    call = type(pipeline).__call__
    generator = torch.Generator().manual_seed(7)
    try:
        with torch.set_grad_enabled(learns), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # schedulers make arrays of tensors
            inspect.unwrap(call)(pipeline, prompt=list(captions), generator=generator, **{"num_inference_steps": 1, **asked})
    except _EnoughError:
        pass
    finally:
        del model.forward, pipeline.scheduler.step, pipeline.vae.decode
    return recorded


def batch_of(embeddings: Sequence[Embedding], num_tokens: int, size: tuple[int, int], latents: Tensor) -> Batch:
    """Return a batch of captions as the loader would deliver them, padded to `num_tokens`, of images of `size` px."""
    count = len(embeddings)
    sizes = torch.tensor([size] * count, dtype=torch.int32)
    tokens = torch.zeros(count, num_tokens, embeddings[0].tokens.shape[1])
    mask = torch.zeros(count, num_tokens, dtype=torch.bool)
    for n, one in enumerate(embeddings):
        tokens[n, : len(one.tokens)] = one.tokens
        mask[n, : len(one.tokens)] = True
    return Batch(
        step=0,
        micro_step=0,
        epoch=0,
        bucket="train/oracle",
        columns={"target": latents},
        tokens=tokens,
        token_mask=mask,
        original_size=sizes,
        crop=torch.zeros_like(sizes),
        target_size=sizes,
        weight=torch.ones(count),
        keys=torch.arange(count),
        ids=torch.zeros(count, 16, dtype=torch.uint8),
        flipped=torch.zeros(count, dtype=torch.bool),
        text_fixed={name: torch.stack([one.fixed[name] for one in embeddings]) for name in embeddings[0].fixed},
    )


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Return the names of arguments that differ, with how; none if they are equal to the bit, or a mask says nothing."""
    more = {name for name in set(theirs) - set(ours) - UNCHECKED if _is_set(theirs[name])}
    found = [f"{name}: only the pipeline gives {_shown(theirs[name])}" for name in sorted(more)]
    for name, own in ours.items():
        other = theirs.get(name)
        if "mask" in name and isinstance(own, torch.Tensor) and other is None and bool(own.all()):
            continue
        if name == "padding_mask" and isinstance(other, torch.Tensor) and not own.any() and not other.any():
            continue  # of no borders, at any size
        if not equal(_as(other, own) if "mask" in name or name == "timestep" else own, other):
            found.append(f"{name}: ours {_shown(own)}, the pipeline's {_shown(other)}")
    return found


def _as(other: Any, own: Any) -> Any:
    """Return a mask or a timestep in the dtype of another, a timestep as the one that a pipeline gives for all."""
    if not isinstance(own, torch.Tensor) or not isinstance(other, torch.Tensor):
        return own
    same = own.to(other.dtype)
    return same[0].reshape(other.shape) if other.numel() == 1 else same


def equal(own: Any, other: Any) -> bool:
    if isinstance(own, torch.Tensor) and isinstance(other, torch.Tensor):
        return own.shape == other.shape and own.dtype == other.dtype and torch.equal(own, other)
    if isinstance(own, dict) and isinstance(other, dict):
        return not differences(own, other)
    if isinstance(own, list | tuple) and isinstance(other, list | tuple):
        return len(own) == len(other) and all(equal(one, two) for one, two in zip(own, other, strict=True))
    return type(own) is type(other) and bool(own == other)


def _is_set(value: Any) -> bool:
    return value is not None and value != {}


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {value.dtype} {value.flatten()[:6].tolist()}"
    return f"{type(value).__name__} {value!r:.200}"


def timesteps_of(pipeline: Any, recorded: Recorded, count: int) -> Tensor:
    """Return the recorded noise level as the trainer gives it to a family, [B]."""
    is_flow = hasattr(pipeline.scheduler, "sigmas") and "Flow" in type(pipeline.scheduler).__name__
    level = torch.as_tensor(pipeline.scheduler.sigmas[0] * 1000 if is_flow else recorded.timestep)
    return level.float().expand(count) if is_flow else level.long().expand(count)
