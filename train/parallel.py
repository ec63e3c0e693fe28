"""Training in several processes: how the model is spread over them (DDP, FSDP2), and what all of them agree on."""

from __future__ import annotations

import contextlib
import re
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_leaves

from bucketline.families.registry import FAMILIES
from bucketline.loader.ranks import fail_together, gathered, host_group

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from torch import Tensor, nn
T = TypeVar("T")
BLOCK = re.compile(r"Block(2D)?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRanks:
    """The rank of this process among the processes of the run, as numbered by torchrun."""

    rank: int
    world_size: int

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return a model's innermost repeated blocks, by class name: diffusers' own, and a UNet's `ResnetBlock2D` for its norms."""
    blocks = [one for one in model.modules() if one is not model and BLOCK.search(plain_class(one).__name__)]
    every = set(blocks)
    return [block for block in blocks if not any(part in every for part in block.modules() if part is not block)]


def separate_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks that only their own `forward` reads: a DiT's forward also calls into its first block."""
    blocks = repeated_blocks(model)
    name = plain_class(model).__name__
    return blocks[1:] if any(one.reads_first_block and one.model_class == name for one in FAMILIES) else blocks


def without_sync(model: nn.Module, *, is_last: bool) -> contextlib.AbstractContextManager[None]:
    """Exchange no gradients in a backward pass that is not the last; shards are, or each rank would hold whole ones."""
    if isinstance(model, torch.nn.parallel.DistributedDataParallel) and not is_last:
        return model.no_sync()  # type: ignore[no-any-return, unused-ignore]
    return contextlib.nullcontext()


def free_gathered(model: nn.Module) -> None:
    """Free gathered weights that only a forward pass has used: the next one would run on them, whatever the shards are then."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole(tensor: Tensor) -> Tensor:
    """Return the full tensor of a sharded one (every process must call this), and any other tensor unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """Return this process's shard of a tensor, which shares its memory; any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def mean_over_ranks(own: Tensor) -> Tensor:
    """Return the mean of each rank's tensor, on its device, where it is awaited; every rank must call this."""
    if not dist.is_initialized():
        return own
    dist.all_reduce(summed := own.clone())
    return summed / dist.get_world_size()


@torch.no_grad()
def fill_from_rank_zero(own: dict[str, Tensor], whole: dict[str, Tensor]) -> None:
    """Fill tensors, sharded or not, with rank 0's in `whole`, which is emptied; others hold one whole tensor at a time."""
    for name, tensor in own.items():
        sent = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        if dist.get_rank() == 0:
            sent.copy_(whole.pop(name))
        dist.broadcast(sent, src=0)
        if isinstance(tensor, DTensor):
            sent = distribute_tensor(sent, tensor.device_mesh, tensor.placements, src_data_rank=None)
        tensor.copy_(sent)


def plain_class(model: nn.Module) -> type[Any]:
    """Return a model's original class, without the FSDP wrapper class."""
    return next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))


def shard(model: nn.Module, device: torch.device, gathered: torch.dtype = torch.float32) -> None:
    """Shard all parameters over all processes (FSDP2), gathered a block at a time in a dtype; shards stay 32-bit."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for part in separate_blocks(model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    # The others belong to the root, gathered for the full forward pass, and first in the backward pass: they stay in between.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's parameters and buffers by name, sharing its memory."""
    return {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def tables_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return a model's attributes that have tensors but are neither parameters nor buffers, by module: tables of positions."""
    registered = {"_parameters", "_buffers"}
    return {
        path: tables
        for path, module in model.named_modules()
        if (
            tables := {
                name: value
                for name, value in vars(module).items()
                if name not in registered and any(isinstance(one, torch.Tensor) for one in tree_leaves(value))
            }
        )
    }


def layout_on(device: torch.device) -> torch.memory_format:
    """Return the memory layout of convolutions' weights on a device."""
    return torch.channels_last if device.type == "cuda" else torch.contiguous_format


def from_rank_zero(ranks: TrainRanks, make: Callable[[], T]) -> T:
    """Run `make` only on rank 0 and return its result on every rank."""
    with fail_together():
        made = make() if ranks.is_main else None
    return gathered(made)[0]  # type: ignore[return-value] # None only if `make` returns None


class StopRequest:
    """Agreement of all ranks on the step at which to stop: a signal (SIGTERM, SIGINT) reaches them at different times.

    An all-reduce over gloo starts after one step and is read after the next: no rank waits, nothing touches the accelerator,
    and all ranks read the same at the same step.
    """

    def __init__(self, ranks: TrainRanks) -> None:
        """Install the signal handlers; every rank must call this at the same point."""
        self._signal = 0
        self._request = torch.zeros((), dtype=torch.int32)  # the signal's number, 0 for none
        self._work: dist.Work | None = None
        self._group = host_group() if ranks.world_size > 1 else None
        self._before = {number: signal.signal(number, self._listen) for number in (signal.SIGTERM, signal.SIGINT)}

    def agreed(self) -> str | None:
        """Return the name of the signal that all ranks stop for, if any; each rank calls this once after each step."""
        number = self._signal
        if self._group is not None:
            if self._work is not None:
                self._work.wait()
            number = int(self._request)
            self._request = torch.tensor(self._signal, dtype=torch.int32)
            self._work = dist.all_reduce(self._request, dist.ReduceOp.MAX, group=self._group, async_op=True)
        return signal.Signals(number).name if number else None

    @property
    def is_asked(self) -> bool:
        """True once this rank has received a signal."""
        return bool(self._signal)

    def close(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _listen(self, number: int, _frame: FrameType | None) -> None:
        self._signal = number
