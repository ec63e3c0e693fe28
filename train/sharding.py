"""Several processes: each with the whole model (DistributedDataParallel), or with a part of it (FSDP2)."""

from __future__ import annotations

import contextlib
import json
import re
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from bucketline.square_only import DIT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn
    from torch.optim import Optimizer

BLOCK = re.compile(r"Block(2D)?$")


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Give the blocks that a model is built of, by the names of their classes; of nested ones the innermost.

    They are those of diffusers' `compile_repeated_blocks`, with a UNet's `ResnetBlock2D` (else its GroupNorms stay eager),
    and those of models for which diffusers names none.
    """

    def is_block(module: nn.Module) -> bool:
        return BLOCK.search(plain_class(module).__name__) is not None

    return [
        module
        for module in model.modules()
        if module is not model and is_block(module) and not any(is_block(m) for m in module.modules() if m is not module)
    ]


def shard(model: nn.Module, device: torch.device) -> None:
    """Leave each process its part of every parameter, in place; blocks are gathered one at a time when they run."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    blocks = repeated_blocks(model)
    if plain_class(model).__name__ == DIT:  # its forward also calls into the first block from outside
        blocks = blocks[1:]  # so that one stays with the root, gathered for all of the forward
    for block in blocks:
        fully_shard(block, mesh=mesh)
    # Else what lies outside of blocks stays gathered after a validation, and the next one runs on what it was then.
    fully_shard(model, mesh=mesh, reshard_after_forward=True)


def without_sync(model: nn.Module, *, is_last: bool) -> contextlib.AbstractContextManager[None]:
    """Keep processes from exchanging gradients but at the last backward pass of a step."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last)
    elif isinstance(model, torch.nn.parallel.DistributedDataParallel) and not is_last:
        return model.no_sync()  # type: ignore[no-any-return, unused-ignore]
    return contextlib.nullcontext()


def whole(tensor: Tensor) -> Tensor:
    """Give all of a tensor that processes hold parts of; every process calls it. Another tensor is given as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """Give this process's part of a tensor, which shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def load_optimizer(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Fill an optimizer from a whole state, of each tensor with the part that this process has.

    Raises:
        ValueError: where the state is of other parameters.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for number, entry in saved["state"].items():
        parameter = parameters[number]
        if any(value.shape not in ((), parameter.shape) for value in entry.values()):
            raise ValueError(
                f"the optimizer's state {number} has the shapes of another model, expected {tuple(parameter.shape)}"
            )
        state[number] = {
            name: distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None)
            if isinstance(parameter, DTensor) and value.shape == parameter.shape
            else value
            for name, value in entry.items()
        }
    own = optimizer.state_dict()["param_groups"]  # the options are this run's
    if [group["params"] for group in own] != [group["params"] for group in saved["param_groups"]]:
        raise ValueError("the optimizer's state is of another number of parameters")
    optimizer.load_state_dict({"state": state, "param_groups": own})


def plain_class(model: nn.Module) -> type[Any]:
    """Give a model's class as it was before it was sharded."""
    return next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))


def config_text(model: nn.Module) -> str:
    """Give the config.json of a diffusers model, with the name of its own class."""
    config = json.loads(model.to_json_string())  # type: ignore[operator]
    return json.dumps({**config, "_class_name": plain_class(model).__name__}, indent=2, sort_keys=True) + "\n"
