"""Compile blocks, warm up every bucket, and count FLOPs; the peak FLOP/s of GPUs."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import re
from collections import Counter
from dataclasses import replace
from operator import attrgetter
from types import FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch._dynamo import maybe_mark_dynamic
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch._subclasses import DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from bucketline.errors import TrainError
from bucketline.loader.batch import as_fields
from bucketline.store.format.columns import LATENT, LatentKind
from bucketline.train.config import Compile
from bucketline.train.parallel import plain_class, repeated_blocks, without_sync
from bucketline.train.step import loss_of, takes_found_inf

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from bucketline.families.family import Family
    from bucketline.loader import Batch, Loader
    from bucketline.store import Bucket
    from bucketline.train.config import TrainConfig
    from bucketline.train.step import Training

log = logging.getLogger(__name__)

COUNTED_SIZES = 3
MOST_GRAPHS = 4096  # of one function: the noising has one for each bucket
MOST_OF_BLOCK = 100  # graphs of one class and shape: a UNet's have about 20, and a graph takes seconds


def compiles(config: TrainConfig, device: torch.device) -> bool:
    """Return whether a run's blocks are compiled on a device."""
    return config.compile is Compile.ON or (config.compile is Compile.AUTO and device.type == "cuda")


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


def recompute(model: nn.Module, config: TrainConfig, *, is_compiled: bool) -> None:
    """Have a model recompute the share of its activations that `--recompute` says in the backward pass, not store them."""
    share = config.recompute or 0.0
    run = functools.partial(recomputed, draws=True) if config.lora_dropout else recomputed
    if share == 1:
        model.enable_gradient_checkpointing(run)  # type: ignore[operator]
    elif is_compiled:
        import torch._functorch.config as functorch

        # For each block's graph: torch chooses the operations whose recomputation costs least.
        functorch.activation_memory_budget = 1 - share
    elif share:
        places: dict[nn.Module, int] = {}

        def some(block: nn.Module, *args: Any) -> Any:  # noqa: ANN401 - any block's
            """Recompute a share of the blocks, evenly spaced in the order in which they run first."""
            place = places.setdefault(block, len(places))
            return run(block, *args) if round((place + 1) * share) > round(place * share) else block(*args)

        model.enable_gradient_checkpointing(some)  # type: ignore[operator]


def recomputed(block: nn.Module, *args: Any, draws: bool = False) -> Any:  # noqa: ANN401 - any block's
    """Run a block, and again in the backward pass; if it `draws` random numbers, as adapters with dropout do, the same ones."""
    return checkpoint(block.__call__, *args, use_reentrant=False, preserve_rng_state=draws, determinism_check="none")


def share_cores_of_compiler(num_ranks: int) -> None:
    """Share a machine's cores among the compilers of its ranks; by default, each takes all of them."""
    import torch._inductor.config as inductor

    inductor.compile_threads = max(1, (inductor.compile_threads or 1) // num_ranks)


def example_batches(loader: Loader, buckets: Iterable[Bucket]) -> dict[str, Batch]:
    """Return an example batch per bucket, by name: the values of one batch in the shapes of each bucket, of any split."""
    first = next(loader.forever())
    examples = {}
    for bucket in buckets:
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


def warm_up(
    training: Training,
    batches: Sequence[Batch],
    say: Callable[[str], None] | None = None,
    *,
    validated: Sequence[Batch] = (),
    turn: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> None:
    """Run forward and backward on each batch and drop the gradients; weights, optimizer and averages stay unchanged.

    With DDP, ranks exchange nothing, so that they may take turns, a `turn` for each bucket. `say` is told which is next.
    `validated`: batches of which only the forward pass of a validation is run, with the weights as they are, since exchanging
    them would change no graph.
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
        if say is not None:
            say(f"compiling for bucket {number} of {len(every)}, {batch.bucket}")
        with turn():
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


class LengthsOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Compute integers and masks that depend on no tensor without memory, so that the lengths in them can be read.

    Each number of a tensor without memory is read as 1.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - torch's
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        if any(isinstance(one, FakeTensor) or one.is_meta for one in given):
            return 1.0 if func is torch.ops.aten._local_scalar_dense.default else func(*args, **(kwargs or {}))
        if not given:
            found = func(*args, **(kwargs or {}))
            if not isinstance(found, torch.Tensor) or found.is_floating_point() or found.is_complex():
                return found
        with unset_fake_temporarily():
            return func(*args, **(kwargs or {}))


def count_flops(model: nn.Module, family: Family, batch: Batch) -> float:
    """Return the FLOPs of training a model on a batch; a multiply-add counts as two.

    The forward pass is counted on tensors without memory, but for the lengths of captions. The backward pass costs the same
    again for the gradient of the inputs, and once more for that of the weights, in proportion to the trained share.
    Source: Hoffmann et al. 2022, "Training Compute-Optimal Large Language Models" (arXiv 2203.15556), appendix F.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.device("meta"):
        empty = plain_class(model).from_config(dict(model.config))  # type: ignore[arg-type]
    family.prepare(empty)
    rows, channels, *size = batch.latents.shape
    if batch.latent_kind is LatentKind.MOMENTS:
        channels //= 2
    host = {name: tensor.cpu() for name, tensor in batch.by_name().items()}
    with torch.no_grad(), fake, sdpa_kernel(SDPBackend.MATH), LengthsOnly(), FlopCounterMode(display=False) as counter:  # type: ignore[no-untyped-call]
        empty.to_empty(device="cpu")
        fitted = {name: torch.empty_like(one, device="cpu") if one.is_floating_point() else one for name, one in host.items()}
        noisy, timesteps = torch.empty(rows, channels, *size), torch.ones(rows, dtype=torch.int64)
        family.predict(empty, noisy, timesteps, replace(batch, **as_fields(fitted)))
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    total: int = sum(parameter.numel() for parameter in empty.parameters())
    share = min(1.0, trained / total)
    return float(counter.get_total_flops()) * (2.0 + share)


def flops_of_buckets(model: nn.Module, family: Family, batches: Mapping[str, Batch]) -> dict[str, float]:
    """Return the FLOPs of training on each batch; none, with a warning, if they depend on values.

    FLOPs per row are a quadratic in the number of latent positions (constant, linear, and self-attention's square), so three
    sizes are counted and the others are interpolated by the parabola through them.
    """
    positions = {name: batch.latents.shape[-2] * batch.latents.shape[-1] for name, batch in batches.items()}
    by_size = {positions[name]: batch for name, batch in batches.items()}
    sizes = sorted(by_size)
    counted = sizes if len(sizes) <= COUNTED_SIZES else [sizes[0], sizes[len(sizes) // 2], sizes[-1]]
    try:
        per_row = [count_flops(model, family, by_size[size]) / len(by_size[size].latents) for size in counted]
    except DynamicOutputShapeException:
        log.warning("no MFU: the FLOPs of a %s depend on values, and cannot be counted ahead", family.model_class)
        return {}
    through = np.polynomial.Polynomial.fit(counted, per_row, len(counted) - 1)
    return {name: len(batch.latents) * float(through(positions[name])) for name, batch in batches.items()}


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


def graphs_compiled() -> int:
    """Return the number of graphs that dynamo has compiled in this process."""
    return int(counters["stats"]["unique_graphs"])
