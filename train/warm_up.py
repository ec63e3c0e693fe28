"""Before the clock starts: compiled blocks, every bucket once forward and backward, and each bucket's FLOPs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.utils.flop_counter import FlopCounterMode

from bucketline.loader.batch import LatentKind, as_fields
from bucketline.loader.config import LATENT
from bucketline.train.sharding import plain_class, repeated_blocks
from bucketline.train.step import loss_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import nn

    from bucketline.loader import Batch, Loader
    from bucketline.store.reader import OpenShards
    from bucketline.train.families import Family
    from bucketline.train.step import Training

COUNTED_SIZES = 3
GRAPHS_PER_BUCKET = 64  # a UNet's blocks have one code and many shapes


def compile_blocks(model: nn.Module, *, num_buckets: int, backend: str = "inductor") -> None:
    """Compile a model's blocks in place (the whole of a model without any), one graph a shape.

    A shape that is new past dynamo's limit is an error then, where dynamo would go on eagerly and say nothing.
    """
    import torch._dynamo.config as dynamo

    dynamo.automatic_dynamic_shapes = False  # else the second bucket compiles a graph of dynamic shapes, slower for all
    dynamo.recompile_limit = max(dynamo.recompile_limit, GRAPHS_PER_BUCKET * num_buckets)
    dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, 4 * dynamo.recompile_limit)
    dynamo.fail_on_recompile_limit_hit = True
    for part in repeated_blocks(model) or [model]:
        part.compile(dynamic=False, backend=backend)


def example_batches(loader: Loader, rows: OpenShards) -> dict[str, Batch]:
    """Give a batch of each of the loader's buckets as it will come, by name: one batch's values in every bucket's shapes."""
    first = next(iter(loader))
    examples = {}
    for bucket in rows.buckets(loader.config.split):
        shape = bucket.spec.column(LATENT).shape
        num_rows = loader.config.rows_of(bucket)
        values = torch.arange(num_rows * math.prod(shape), device=first.device) % first.latents.numel()
        latents = first.latents.flatten()[values].view(num_rows, *shape)
        size = first.target_size.new_tensor([bucket.height_px, bucket.width_px])
        fitted = {
            name: tensor[torch.arange(num_rows, device=first.device) % len(tensor)] for name, tensor in first.by_name().items()
        }
        fitted |= {"latents": latents, "target_size": size.repeat(num_rows, 1)}
        examples[bucket.name] = replace(first, bucket=bucket.name, **as_fields(fitted))
    return examples


def warm_up(training: Training, batches: Iterable[Batch]) -> None:
    """Go forward and backward with each batch; weights, optimizer and averages are as before, gradients none."""
    for batch in batches:
        loss_of(training, batch).backward()  # type: ignore[no-untyped-call]
        training.optimizer.zero_grad(set_to_none=True)


def count_flops(model: nn.Module, family: Family, batch: Batch) -> float:
    """Count the FLOPs that training on a batch takes of a model: a multiplication and an addition are two.

    The forward pass is counted on the meta device, on a model without memory. The backward pass costs as much again for the
    gradient of the inputs, and again for that of the weights, in so far as they are trained.
    Source: Hoffmann et al. 2022, "Training Compute-Optimal Large Language Models" (arXiv 2203.15556), appendix F.
    """
    with torch.device("meta"):
        empty = plain_class(model).from_config(dict(model.config))  # type: ignore[arg-type]
    fitted = {name: tensor.to("meta") for name, tensor in batch.by_name().items()}
    on_meta = replace(batch, **as_fields(fitted))
    rows, channels, *size = batch.latents.shape
    if batch.latent_kind is LatentKind.MOMENTS:
        channels //= 2
    noisy = torch.empty(rows, channels, *size, device="meta")
    timesteps = torch.empty(rows, dtype=torch.int64, device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        family.predict(empty, noisy, timesteps, on_meta)
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    trained = sum(size for size, is_trained in sizes if is_trained) / sum(size for size, _ in sizes)
    return float(counter.get_total_flops()) * (2.0 + trained)


def flops_of_buckets(model: nn.Module, family: Family, batches: Mapping[str, Batch]) -> dict[str, float]:
    """Count the FLOPs that training on each batch takes.

    A row's are constant, in proportion to the latent's positions, and, of self-attention, to their square: so three sizes
    are counted, and the others lie on the parabola through them.
    """
    by_size = {_positions(batch): batch for batch in batches.values()}
    sizes = sorted(by_size)
    counted = sizes if len(sizes) <= COUNTED_SIZES else [sizes[0], sizes[len(sizes) // 2], sizes[-1]]
    per_row = {size: count_flops(model, family, by_size[size]) / len(by_size[size].latents) for size in counted}
    return {name: len(batch.latents) * _through(per_row, _positions(batch)) for name, batch in batches.items()}


def _positions(batch: Batch) -> int:
    return batch.latents.shape[-2] * batch.latents.shape[-1]


def _through(points: Mapping[int, float], at: int) -> float:
    """Give the value of the polynomial through some points. Source: Lagrange's formula.

    >>> _through({0: 1.0, 1: 2.0, 2: 5.0}, 3)
    10.0
    """
    return sum(
        value * math.prod((at - other) / (own - other) for other in points if other != own) for own, value in points.items()
    )
