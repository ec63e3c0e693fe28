"""The bytes of the activations that the backward pass needs."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from bucketline.loader import Batch
from bucketline.train.memory.live import LiveBytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor, nn

    from bucketline.families.family import Family

NORMS = ("layer_norm", "group_norm", "rms_norm")
LATENT_SIZE = 128  # of a model whose configuration says none


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """The sizes of a micro-batch."""

    images: int
    height: int  # of the latents
    width: int
    tokens: int | None = None  # of a caption; None: as many as the model's pipeline makes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBytes:
    """The bytes that a forward and a backward pass take beyond weights and inputs."""

    kept: int  # by the forward pass until the backward pass
    most: int  # at any time, with the gradients that are there by then
    most_without_gradients: int


def step_bytes(
    model: nn.Module, family: Family, sizes: BatchSizes, *, autocasts: bool = True, backward: bool = True
) -> StepBytes:
    """Return what a step on such a batch takes, uncompiled, or without `backward` its forward pass.

    The model's tensors need no memory. The passes are those of a CPU, whose attention keeps no matrix either. `autocasts`: in
    bf16, with the norms of a GPU.
    """
    batch = example_batch(family, sizes)
    noisy, timesteps = torch.zeros_like(batch.latents), torch.zeros(sizes.images)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    norms = norms_in_32_bits() if autocasts else contextlib.nullcontext()
    with LiveBytes(trained) as live, norms:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
            prediction = family.predict(model, noisy, timesteps, batch)
        kept = live.now
        if backward:
            loss = (prediction.float() - noisy).square().mean()
            del prediction
            loss.backward()  # type: ignore[no-untyped-call]
            del loss
    for parameter in trained:
        parameter.grad = None
    return StepBytes(kept=kept, most=live.most, most_without_gradients=live.most_without_gradients)


@contextlib.contextmanager
def norms_in_32_bits() -> Iterator[None]:
    """Cast the inputs of norms as autocast does on a GPU, while the body runs; on a CPU it leaves them as they are.

    The functions are replaced for the whole process, since a backward pass that recomputes runs without modes of torch.
    """
    before = {name: getattr(functional, name) for name in NORMS}

    def cast(norm: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401 - any norm's
        args, kwargs = tree_map_only(torch.Tensor, torch.Tensor.float, (args, kwargs))
        return norm(*args, **kwargs)

    try:
        for name, norm in before.items():
            setattr(functional, name, functools.partial(cast, norm))
        yield
    finally:
        for name, norm in before.items():
            setattr(functional, name, norm)


def latent_size(family: Family) -> int:
    """Return the height and width of a model's own latents."""
    size = family.config.get("sample_size")
    return size if isinstance(size, int) else LATENT_SIZE


def usual_sizes(family: Family, images: int) -> BatchSizes:
    """Return the sizes of a batch of a model's own size."""
    return BatchSizes(images=images, height=latent_size(family), width=latent_size(family))


def example_batch(family: Family, sizes: BatchSizes) -> Batch:
    """Return a batch of zeros for a model."""
    config: Any = family.config
    images, height, width = sizes.images, sizes.height, sizes.width
    channels = config["in_channels"] // family.packing**2
    tokens, pooled = sizes.tokens or family.usual_tokens, family.pooled_width
    number = torch.zeros(images, dtype=torch.int64)
    in_pixels = torch.tensor([[8 * height, 8 * width]] * images, dtype=torch.int32)
    return Batch(
        step=0,
        micro_step=0,
        epoch=0,
        bucket="",
        columns={"target": torch.zeros(images, channels, height, width)},
        tokens=torch.zeros(images, tokens, family.token_width),
        token_mask=torch.ones(images, tokens, dtype=torch.bool),
        original_size=in_pixels,
        crop=in_pixels,
        target_size=in_pixels,
        weight=torch.ones(images),
        keys=number,
        ids=torch.zeros(images, 16, dtype=torch.uint8),
        flipped=torch.zeros(images, dtype=torch.bool),
        text_fixed={"pooled": torch.zeros(images, pooled)} if pooled else {},
        class_labels=number,
    )
