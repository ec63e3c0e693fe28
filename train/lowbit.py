"""Less memory: products in 8-bit floats, a frozen base in 8 or 4 bits, blocks that recompute or wait in host memory."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bucketline.errors import UsageError
from bucketline.quantised_linear import quantise_layers
from bucketline.train.config import Base
from bucketline.train.parallel import repeated_blocks, separate_blocks

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from bucketline.train.config import TrainConfig

PRODUCTS_CAPABILITY = (9, 0)  # Hopper's, the first with products of 8-bit floats at twice the speed of bf16
CONVERSION_CAPABILITY = (8, 9)  # from which compiled code converts 8-bit floats
MULTIPLE = 16  # of a layer's inputs and outputs, as the products take them
PER_SAMPLE = ("norm", "emb")  # in the names of layers that see one vector per sample: too small to gain

# ---------------------------------------------------------------------------------------------- 8-bit floats


def expect_float8(config: TrainConfig, device: torch.device) -> None:
    """Check that a run can train in 8-bit floats."""
    if config.lora_rank is not None:
        raise UsageError(
            f"--precision is fp8 with --lora-rank {config.lora_rank}, expected the full model: it is the trained weights' "
            "products that gain; use --precision bf16"
        )
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < PRODUCTS_CAPABILITY:
        raise UsageError(f"--precision is fp8, and the device is {name}, expected an H100 or later; use --precision bf16")
    import torchao.float8  # noqa: F401 - only whether it is there


def use_float8(model: nn.Module, *, emulates: bool = False) -> int:
    """Replace the blocks' larger linear layers by torchao's, in place; return how many.

    Their products are computed in 8-bit floats, with scales per row at each step. Weights, gradients and checkpoints stay as
    they are. `emulates`: compute in 32 bits, on any device.
    Source: Micikevicius et al. 2022, "FP8 Formats for Deep Learning" (arXiv 2209.05433).
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    found: list[str] = []

    def is_converted(layer: nn.Module, name: str) -> bool:
        sizes = getattr(layer, "in_features", 1), getattr(layer, "out_features", 1)
        gains = not any(part in name for part in PER_SAMPLE) and not any(size % MULTIPLE for size in sizes)
        found.extend([name] * gains)
        return gains

    # captions have any number of tokens, over which the weights' gradient is summed
    settings: Any = replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=emulates, pad_inner_dim=True)
    for block in repeated_blocks(model):
        convert_to_float8_training(block, module_filter_fn=is_converted, config=settings)
    return len(found)


# ---------------------------------------------------------------------------------------------- a frozen base of fewer bits


def quantise_base(model: nn.Module, base: Base, device: torch.device) -> None:
    """Quantise the frozen linear layers of a model's blocks, as `quantise_layers`; what is outside the blocks stays."""
    if base is Base.FP8 and device.type == "cuda" and torch.cuda.get_device_capability(device) < CONVERSION_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise UsageError(f"--base is fp8, and the device is {name}, expected compute capability 8.9 or more; use --base int8")
    for block in repeated_blocks(model):
        quantise_layers(block, base, device)


# ---------------------------------------------------------------------------------------------- gradient checkpointing


def recompute(model: nn.Module, share: float, *, is_compiled: bool) -> None:
    """Have a model recompute a share of its activations in the backward pass, not store them."""
    if share == 1:
        model.enable_gradient_checkpointing(recomputed)  # type: ignore[operator]
    elif is_compiled:
        import torch._functorch.config as functorch

        # For each block's graph: torch chooses the operations whose recomputation costs least.
        functorch.activation_memory_budget = 1 - share
    else:
        places: dict[nn.Module, int] = {}

        def some(block: nn.Module, *args: Any) -> Any:  # noqa: ANN401 - any block's
            """Recompute a share of the blocks, evenly spaced in the order in which they run first."""
            place = places.setdefault(block, len(places))
            return recomputed(block, *args) if round((place + 1) * share) > round(place * share) else block(*args)

        model.enable_gradient_checkpointing(some)  # type: ignore[operator]


def recomputed(block: nn.Module, *args: Any) -> Any:  # noqa: ANN401 - any block's
    """Run a block, and again in the backward pass."""
    return checkpoint(block.__call__, *args, use_reentrant=False, preserve_rng_state=False, determinism_check="none")


# ---------------------------------------------------------------------------------------------- blocks in host memory


def offload_blocks(model: nn.Module, number: int, device: torch.device, layout: torch.memory_format) -> None:
    """Offload so many of a model's blocks, evenly spaced, or all if there are fewer, before the model is moved.

    `layout`: of their convolutions' weights.
    """
    blocks = separate_blocks(model)
    number = min(number, len(blocks))
    Offload([blocks[place * len(blocks) // number] for place in range(number)], device, layout)


class Offload:
    """The frozen tensors of some blocks, which wait in host memory and reach the device ahead of their use.

    At most two of the blocks are on the device, the one that runs and the one that is next. A block gets copies for each run,
    in the forward pass and when the backward pass recomputes it, so autograd never meets a tensor that has moved. The copies
    are freed once nothing refers to them, that is with `--recompute 1`: after the run.
    """

    def __init__(self, blocks: list[nn.Module], device: torch.device, layout: torch.memory_format) -> None:
        """Take the blocks' frozen tensors out of their modules, and wrap the blocks' `forward`."""
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        # Of each block: a module's table of parameters or buffers, a name in it, and the tensor in host memory.
        self._waiting: dict[nn.Module, list[tuple[dict[str, Any], str, Tensor]]] = {
            block: [
                (table, name, _in_host_memory(tensor, device, layout))
                for module in block.modules()
                for table in (module._parameters, module._buffers)
                for name, tensor in table.items()
                if tensor is not None and not tensor.requires_grad
            ]
            for block in blocks
        }
        self._order: list[nn.Module] = []  # in which they run in a forward pass, learned in the first one
        self._last = 0
        self._arriving: dict[nn.Module, tuple[list[Tensor], torch.cuda.Event | None]] = {}
        for block in blocks:
            for table, name, _ in self._waiting[block]:
                table[name] = None  # so that nothing moves, counts or exchanges it
            block.forward = functools.partial(self._run, block, block.forward)

    def _run(self, block: nn.Module, forward: Callable[..., Any], *args: Any, **named: Any) -> Any:  # noqa: ANN401 - any block's
        copies = self._arrived(block)
        waiting = self._waiting[block]
        try:
            for (table, name, host), copy in zip(waiting, copies, strict=True):
                table[name] = nn.Parameter(copy, requires_grad=False) if isinstance(host, nn.Parameter) else copy
            return forward(*args, **named)
        finally:
            for table, name, _ in waiting:
                table[name] = None

    def _arrived(self, block: nn.Module) -> list[Tensor]:
        """Return a block's tensors on the device; start the copy of the next block's."""
        self._fetch(block)
        follower = self._follower(block)
        copies, event = self._arriving[block]
        self._arriving = {one: found for one, found in self._arriving.items() if one in (block, follower)}
        if follower is not None:
            self._fetch(follower)
        if event is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(event)
            for copy in copies:
                copy.record_stream(current)
        return copies

    def _follower(self, block: nn.Module) -> nn.Module | None:
        """Return the block that is likely to run after this one: in a backward pass, the previous one; None if unknown."""
        if block not in self._order:
            self._order.append(block)
            self._last = len(self._order) - 1
            return None
        place, end = self._order.index(block), len(self._order) - 1
        before, self._last = self._last, place
        if not torch.is_grad_enabled():
            return self._order[(place + 1) % len(self._order)]
        if place in (0, end):  # the backward pass begins at the end, the next forward pass at 0
            return self._order[min(1, end) if place == 0 else place - 1]
        return self._order[place + 1 if place > before else place - 1]

    @torch.no_grad()
    def _fetch(self, block: nn.Module) -> None:
        if block in self._arriving:
            return
        hosts = [host for *_, host in self._waiting[block]]
        if self._stream is None:
            self._arriving[block] = [host.to(self._device, copy=True) for host in hosts], None
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            copies = [host.to(self._device, non_blocking=True) for host in hosts]
            self._arriving[block] = copies, self._stream.record_event()


@torch.no_grad()
def _in_host_memory(tensor: Tensor, device: torch.device, layout: torch.memory_format) -> Tensor:
    """Return a tensor in host memory, pinned for a GPU, as a parameter if it is one."""
    keeps = layout if tensor.dim() == 4 else torch.preserve_format
    host = torch.empty_like(tensor, device="cpu", memory_format=keeps, pin_memory=device.type == "cuda").copy_(tensor)
    return nn.Parameter(host, requires_grad=False) if isinstance(tensor, nn.Parameter) else host
