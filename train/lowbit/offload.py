"""Block offload for LoRA: the frozen tensors of some blocks wait in host memory, and reach the device ahead of their use.

A block gets copies for each run, in the forward pass and when the backward pass recomputes it, so autograd never meets a
tensor that has moved. The copies are freed once nothing refers to them, that is with `--recompute 1`: after the run.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from bucketline.train.parallel import separate_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

_Place = tuple[dict[str, Any], str]
"""A module's table of parameters or buffers, and a name in it."""


def offload_blocks(model: nn.Module, number: int, device: torch.device, layout: torch.memory_format) -> Offload:
    """Offload `offloaded` blocks, before the model is moved. `layout`: of their convolutions' weights."""
    return Offload(offloaded(model, number), device, layout)


def offloaded(model: nn.Module, number: int) -> list[nn.Module]:
    """Return so many of a model's blocks, evenly spaced, or all of them if there are fewer."""
    blocks = separate_blocks(model)
    number = min(number, len(blocks))
    return [blocks[place * len(blocks) // number] for place in range(number)]


class Offload:
    """The offloaded blocks of a model: at most two of them are on the device, the one that runs and the one that is next."""

    def __init__(self, blocks: list[nn.Module], device: torch.device, layout: torch.memory_format) -> None:
        """Take the blocks' frozen tensors out of their modules, and wrap the blocks' `forward`."""
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._waiting = {
            block: [(place, _in_host_memory(place, device, layout)) for place in _frozen(block)] for block in blocks
        }
        self._order: list[nn.Module] = []  # in which they run in a forward pass, learned in the first one
        self._last = 0
        self._arriving: dict[nn.Module, tuple[list[Tensor], torch.cuda.Event | None]] = {}
        for block in blocks:
            for (table, name), _ in self._waiting[block]:
                table[name] = None  # so that nothing moves, counts or exchanges it
            block.forward = functools.partial(self._run, block, block.forward)

    def _run(self, block: nn.Module, forward: Callable[..., Any], *args: Any, **named: Any) -> Any:  # noqa: ANN401 - any block's
        copies = self._arrived(block)
        waiting = self._waiting[block]
        try:
            for ((table, name), host), copy in zip(waiting, copies, strict=True):
                table[name] = nn.Parameter(copy, requires_grad=False) if isinstance(host, nn.Parameter) else copy
            return forward(*args, **named)
        finally:
            for (table, name), _ in waiting:
                table[name] = None

    def _arrived(self, block: nn.Module) -> list[Tensor]:
        """Return a block's tensors on the device; start the copy of the next block's."""
        is_known = block in self._order
        if not is_known:
            self._order.append(block)
        place = self._order.index(block)
        self._fetch(block)
        follower = self._order[self._next(place)] if is_known else None
        self._last = place
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

    def _next(self, place: int) -> int:
        """Return the place of the block that is likely to run after this one: in a backward pass, the previous one."""
        end = len(self._order) - 1
        if not torch.is_grad_enabled():
            return (place + 1) % len(self._order)
        if place in (0, end):  # the backward pass begins at the end, the next forward pass at 0
            return min(1, end) if place == 0 else place - 1
        return place + 1 if place > self._last else place - 1

    @torch.no_grad()
    def _fetch(self, block: nn.Module) -> None:
        if block in self._arriving:
            return
        hosts = [host for _, host in self._waiting[block]]
        if self._stream is None:
            self._arriving[block] = [host.to(self._device, copy=True) for host in hosts], None
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            copies = [host.to(self._device, non_blocking=True) for host in hosts]
            self._arriving[block] = copies, self._stream.record_event()


def _frozen(block: nn.Module) -> Iterator[_Place]:
    for module in block.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None and not tensor.requires_grad:
                    yield table, name


@torch.no_grad()
def _in_host_memory(place: _Place, device: torch.device, layout: torch.memory_format) -> Tensor:
    """Return a tensor in host memory, pinned for a GPU, as a parameter if it is one."""
    table, name = place
    tensor = table[name]
    keeps = layout if tensor.dim() == 4 else torch.preserve_format
    host = torch.empty_like(tensor, device="cpu", memory_format=keeps, pin_memory=device.type == "cuda").copy_(tensor)
    return nn.Parameter(host, requires_grad=False) if isinstance(tensor, nn.Parameter) else host
