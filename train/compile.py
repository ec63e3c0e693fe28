"""Compile a model's blocks, run every bucket once before timing starts, and count the FLOPs of a step; the peak of GPUs."""

from __future__ import annotations

import functools
import logging
import math
import re
from collections import Counter
from dataclasses import replace
from operator import attrgetter
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo import maybe_mark_dynamic
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import pad
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from bucketline.command_line import torchrun_ranks
from bucketline.errors import TrainError
from bucketline.families.packing import PATCH
from bucketline.loader import Loader
from bucketline.loader.batch import COLUMN_PREFIX, as_fields
from bucketline.store.format.block import LATENT, MASK, SEEN_IMAGES, TARGET
from bucketline.train.config import Precision
from bucketline.train.log import StepWork, graphs_compiled
from bucketline.train.parallel import plain_class, repeated_blocks, without_sync
from bucketline.train.step import loss_of, takes_found_inf

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor, nn

    from bucketline.families.family import Family
    from bucketline.loader import Batch
    from bucketline.store import Bucket
    from bucketline.train.config import TrainConfig
    from bucketline.train.parallel import TrainRanks
    from bucketline.train.step import Training

log = logging.getLogger(__name__)

MOST_GRAPHS = 4096  # of one function: the noising has one for each bucket
MOST_OF_BLOCK = 100  # graphs of one class and shape: a UNet's have about 20, and a graph takes seconds


def compile_blocks(model: nn.Module, family: Family | type[Family], backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile a model's blocks in place (the full model if it has none), one graph per shape.

    Parts whose sizes depend on values stay eager: those that the family names, and with a warning, blocks that keep compiling.
    """
    import torch._dynamo.config as dynamo

    dynamo.automatic_dynamic_shapes = False  # else the second bucket compiles a dynamic-shape graph, slower for all
    dynamo.fail_on_recompile_limit_hit = True  # not silently eager
    dynamo.recompile_limit = dynamo.accumulated_recompile_limit = MOST_GRAPHS
    dynamo.optimize_ddp = False  # else DDP cuts each block's graph at 25 MiB; its hooks overlap blocks with the exchange anyway

    # Dynamo keeps the graphs of a code object in one list, which each call searches from its front. With one list for all
    # blocks and buckets, a block's call would cost more the more buckets there are (`make gpu CHECKS=dispatch`).
    @functools.cache
    def compiled(plain: Any, _shapes: tuple[object, ...]) -> Callable[..., Any]:  # noqa: ANN401 - any block's `forward`
        own = FunctionType(plain.__code__.replace(), plain.__globals__, plain.__name__, plain.__defaults__, plain.__closure__)
        own.__kwdefaults__ = plain.__kwdefaults__
        return torch.compile(own, dynamic=False, backend=backend)

    shape_of = _shape_of_any_length if family.has_own_lengths else attrgetter("shape")
    num_graphs: Counter[tuple[Any, tuple[object, ...]]] = Counter()

    def forward(plain: Any, block: nn.Module, *args: Any, **named: Any) -> Any:  # noqa: ANN401 - likewise
        if family.has_own_lengths:
            args, named = tree_map_only(torch.Tensor, _of_any_length, (args, named))
        shapes = tuple(shape_of(value) for value in (*args, *named.values()) if isinstance(value, torch.Tensor))
        if num_graphs[plain, shapes] > MOST_OF_BLOCK:
            return plain(block, *args, **named)
        before = graphs_compiled()
        found = compiled(plain, shapes)(block, *args, **named)
        num_graphs[plain, shapes] += graphs_compiled() - before
        if num_graphs[plain, shapes] > MOST_OF_BLOCK:
            log.warning(
                "%s was compiled %d times for inputs of the shapes %s, since its sizes depend on values; it runs uncompiled "
                "from now on. --compile off trains the same without a compiler",
                plain_class(block).__name__,
                num_graphs[plain, shapes],
                ", ".join(map(str, shapes)),
            )
        return found

    for part in model.modules():
        if plain_class(part).__name__ in family.eager_parts:
            part.forward = torch.compiler.disable(part.forward)  # type: ignore[no-untyped-call]
    for part in repeated_blocks(model) or [model]:
        part.forward = functools.partial(forward, type(part).forward, part)


def _of_any_length(tensor: Tensor) -> Tensor:
    """Return a tensor of which one graph is compiled for any number of tokens, its second axis.

    Its strides follow from its shape: a graph is for some, and those of a slice depend on what it was cut from.
    """
    if _has_tokens(tensor):
        tensor = tensor.reshape(-1).view(tensor.shape)
        maybe_mark_dynamic(tensor, 1)
    return tensor


def _shape_of_any_length(tensor: Tensor) -> tuple[object, ...]:
    return (tensor.shape[0], *tensor.shape[2:]) if _has_tokens(tensor) else tuple(tensor.shape)


def _has_tokens(tensor: Tensor) -> bool:
    """Return whether an argument of a block has values of each token, or says which are padding."""
    return tensor.ndim > 2 or tensor.dtype is torch.bool


# ---------------------------------------------------------------------------------------------- before the first step


def step_work_of(config: TrainConfig, ranks: TrainRanks, device: torch.device) -> StepWork:
    """Return the work of a run's steps, without buckets yet; the peak of a GPU is known for bf16."""
    knows_peak = device.type == "cuda" and config.precision is Precision.BF16
    peak = peak_flops(torch.cuda.get_device_name(device)) if knows_peak else None
    return StepWork(num_devices=ranks.world_size, peak_flops=peak)


def compile_and_count(
    training: Training, ranks: TrainRanks, loader: Loader, say: Callable[[str], None], work: StepWork
) -> None:
    """Compile for every bucket before timing starts, and tell `say`; on a GPU, also count the FLOPs of a step per bucket.

    Buckets that `work` has, from a generation before, are left out, and the others are added there. The ranks of a machine
    compile at the same time, each with its share of the cores.
    """
    config, compiled, on_gpu = training.config, training.prep.compiled, loader.device.type == "cuda"
    work.samples.update({bucket.name: bucket.global_batch for bucket in loader.plan.buckets})
    shapes = {one.name: (loader.config.rows_of(one), *one.spec.column(LATENT).shape) for one in loader.rows.buckets()}
    trained, validated = (
        [bucket for bucket in loader.rows.buckets(split) if work.shapes.get(bucket.name) != shapes[bucket.name]]
        for split in ("train", "val")
    )
    if not (compiled or on_gpu) or not (trained or validated):
        return
    work.shapes.update(shapes)
    examples = example_batches(ranks, loader, [*trained, *validated])
    if compiled:
        import torch._inductor.config as inductor

        inductor.compile_threads = max(1, inductor.decide_compile_threads() // torchrun_ranks()["local_world_size"])
        own, evaluated = ([examples[bucket.name] for bucket in buckets] for buckets in (trained, validated))
        warm_up(training, own, say, validated=evaluated)
    for bucket in trained if on_gpu else ():
        flops = flops_of(training, examples[bucket.name])
        work.flops[bucket.name] = config.accumulation * ranks.world_size * flops


def example_batches(ranks: TrainRanks, loader: Loader, buckets: Iterable[Bucket]) -> dict[str, Batch]:
    """Return an example batch per bucket, by name: the values of one batch in the shapes of each bucket, of any split.

    They are read by a loader like `loader`, which has the stores open.
    """
    asked, device = replace(loader.config, prefetch_bytes=1 << 20), loader.device
    with Loader(loader.stores, asked, rank=ranks.rank, world_size=ranks.world_size, device=device, like=loader) as one:
        first = next(one.forever())
    examples = {}
    for bucket in buckets:
        num_rows, read = loader.config.rows_of(bucket), {TARGET: bucket.spec.column(LATENT).shape, **bucket.references}
        size = first.target_size.new_tensor([bucket.height_px, bucket.width_px])
        rows = torch.arange(num_rows, device=first.device) % len(first.latents)
        fitted = {name: tensor[rows] for name, tensor in first.by_name().items() if not name.startswith(COLUMN_PREFIX)}
        made = as_fields(fitted | {"target_size": size.repeat(num_rows, 1)})
        made["columns"] = {role: _filled(first.latents, (num_rows, *shape)) for role, shape in read.items()}
        if first.mask is not None:
            made["columns"][MASK] = torch.ones_like(made["columns"][TARGET][:, 0], dtype=torch.float32)
        if first.image_tokens is not None:  # as many as the bucket's references have, which some models expect
            num_seen = sum(height * width for _, height, width in bucket.references.values()) // PATCH**2
            num_seen = min(num_seen, loader.rows.max_entry_tokens[SEEN_IMAGES])
            made |= tokens_of_images(made["tokens"], made["token_mask"], num_seen)
        examples[bucket.name] = replace(first, bucket=bucket.name, **made)
    return examples


def tokens_of_images(tokens: Tensor, mask: Tensor, num_seen: int) -> dict[str, Tensor]:
    """Return fields of a batch: tokens, [B, L, D], made longer if need be, of which the first `num_seen` are images'."""
    more = max(0, num_seen - tokens.shape[1])
    mask = pad(mask, (0, more))
    is_image = torch.zeros_like(mask)
    is_image[:, :num_seen] = mask[:, :num_seen] = True
    return {"tokens": pad(tokens, (0, 0, 0, more)), "token_mask": mask, "image_tokens": is_image}


def _filled(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor of a shape whose values are repeated."""
    places = torch.arange(math.prod(shape), device=values.device) % values.numel()
    return values.flatten()[places].view(shape)


def warm_up(
    training: Training,
    batches: Sequence[Batch],
    say: Callable[[str], None] = lambda _: None,
    *,
    validated: Sequence[Batch] = (),
) -> None:
    """Run forward and backward on each batch and drop the gradients; weights, optimizer and averages stay unchanged.

    With DDP, ranks exchange nothing. `say` is told which bucket is next. `validated`: batches of which only the forward pass
    of a validation is run, with the weights as they are, since exchanging them would change no graph.
    """
    optimizer = training.optimizer
    if not optimizer.state and takes_found_inf(optimizer):  # a step that is skipped makes its state, so that memory ends here
        for parameter in training.trained:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.found_inf = torch.ones((), device=training.trained[0].device)  # type: ignore[attr-defined]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    every = [*((batch, True) for batch in batches), *((batch, False) for batch in validated)]
    for number, (batch, is_trained) in enumerate(every, 1):
        say(f"compiling for bucket {number} of {len(every)}, {batch.bucket}")
        forward_backward(training, batch, is_trained=is_trained)
        for parameter in training.trained:
            parameter.grad = None


def forward_backward(training: Training, batch: Batch, *, is_trained: bool = True) -> None:
    """Run both passes of a batch, or only a validation's forward pass; with DDP, ranks exchange nothing."""
    try:
        for one in with_lengths(batch) if training.family.has_own_lengths else (batch,):
            if not is_trained:
                with torch.no_grad(), training.evaluating():
                    loss_of(training, one)
                continue
            # FSDP would keep whole gradients if it did not reduce them.
            with without_sync(training.model, is_last=isinstance(training.model, FSDPModule)):
                loss_of(training, one).backward()  # type: ignore[no-untyped-call]
    except BackendCompilerFailed as error:
        raise TrainError(
            f"the model's blocks cannot be compiled for {batch.bucket}: {reason_of(error.inner_exception)}; install "
            "a C++ compiler and Python's headers (python3-dev), or use --compile off"
        ) from error


def with_lengths(batch: Batch) -> Iterator[Batch]:
    """Yield a batch with captions of equal lengths, and one with others: the model masks padding only if there is some."""
    mask = torch.ones_like(batch.token_mask)
    yield replace(batch, token_mask=mask)
    if mask[1:, 1:].numel():
        mask = mask.clone()
        mask[0, 1:] = False
        yield replace(batch, token_mask=mask)


def reason_of(error: BaseException) -> str:
    r"""Return the line of a compiler's error that says why; before it are commands, and after it what is left undone.

    >>> reason_of(OSError("C++ compile error\n\nCommand:\ng++ a.cpp\n\nOutput:\na.cpp:1: fatal error: Python.h: none\n1 error"))
    'a.cpp:1: fatal error: Python.h: none'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return next((line for line in lines if re.search(r"\berror: ", line)), lines[-1])[:500]


# ---------------------------------------------------------------------------------------------- FLOPs


def flops_of(training: Training, batch: Batch) -> float:
    """Return the FLOPs of training on a batch; a multiply-add counts as two.

    The forward pass is counted as it runs without a compiler. The backward pass costs the same again for the gradient of the
    inputs, and once more for that of the weights, to which adapters hardly add.
    Source: Hoffmann et al. 2022, "Training Compute-Optimal Large Language Models" (arXiv 2203.15556), appendix F.
    """
    uncompiled, counter = torch.compiler.set_stance("force_eager"), FlopCounterMode(display=False)
    with uncompiled, torch.no_grad(), training.evaluating(), counter:
        loss_of(training, batch)
    return float(counter.get_total_flops()) * (3.0 if training.config.lora_rank is None else 2.0)


# Dense bf16 peaks in TFLOP/s, accumulated in 32 bits, by the words of a device's name.
# Source: NVIDIA's data sheets (half of what they give "with sparsity") and the white papers of GA102, AD102 and GB202.
PEAKS = (
    {"GB300": 2500, "B300": 2250, "GB200": 2500, "B200": 2250}
    | {"GH200": 989, "H200": 989, "H200 NVL": 835, "H100": 989, "H100 NVL": 835, "H100 PCIe": 756, "H800": 989, "H20": 148}
    | {"A100": 312, "A800": 312, "A30": 165, "A40": 150, "A10": 125, "A10G": 70, "A6000": 155}
    | {"L40S": 362, "L40": 181, "L4": 121, "RTX 6000 Ada": 364}
    | {"RTX 5090": 210, "RTX 4090": 165, "RTX 3090": 71, "RTX 3090 Ti": 80}
    | {"RTX PRO 6000 Blackwell Workstation": 504}
)
OTHER_BOARD = re.compile(r" (Laptop|Ti|D|SUPER|Max-Q|MIG)\b")  # as slow as no data sheet of the name before it says


def peak_flops(device_name: str) -> float | None:
    """Return a GPU's dense bf16 peak in FLOP/s; None if its name is unknown. Of two names in it, the longer one counts.

    >>> peak_flops("NVIDIA H100 80GB HBM3"), peak_flops("NVIDIA L40"), peak_flops("NVIDIA GeForce RTX 4090 Laptop GPU")
    (989000000000000.0, 181000000000000.0, None)
    """
    named = [name for name in PEAKS if re.search(rf"\b{name}\b", device_name)]
    name = max(named, key=len, default=None)
    if name is None or OTHER_BOARD.search(device_name.partition(name)[2]):
        return None
    return PEAKS[name] * 1e12
