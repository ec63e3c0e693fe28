"""Place a model on its devices: whole (DDP), sharded by FSDP2, or sharded within groups of ranks that have a copy each (HSDP).

Only rank 0 reads weights. The other ranks build the model on the meta device and hold one whole tensor at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._pytree import tree_leaves

from bucketline.command_line import torchrun_ranks
from bucketline.errors import UsageError
from bucketline.train.checkpoint import load_weights
from bucketline.train.config import Base
from bucketline.train.models.weights import average_folder
from bucketline.train.parallel import fill_from_rank_zero, from_rank_zero, separate_blocks
from bucketline.train.values import ShardBy

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from bucketline.train.config import TrainConfig
    from bucketline.train.ema import Average
    from bucketline.train.models.weights import Weights
    from bucketline.train.parallel import TrainRanks


def shard_ranks_of(config: TrainConfig, ranks: TrainRanks) -> int:
    """Return the number of ranks that share one copy of the model."""
    is_of_machine, number = config.sharding.name is ShardBy.MACHINE, config.sharding.ranks
    if ranks.world_size == 1 or not (is_of_machine or number):
        return ranks.world_size
    number = number or torchrun_ranks()["local_world_size"]
    if number < 2 or ranks.world_size % number:
        raise UsageError(
            f"--sharding is {config.sharding}, over {number} processes, expected a divisor of all {ranks.world_size}, from 2 "
            "on; to have a whole copy on each, use --sharding ddp"
        )
    return number


def shard_mesh(device: torch.device, ranks_of_copy: int) -> DeviceMesh:
    """Return the processes as rows of `ranks_of_copy` that share a model; neighbours, which are on one machine."""
    num_copies = dist.get_world_size() // ranks_of_copy
    if num_copies == 1:
        return init_device_mesh(device.type, (ranks_of_copy,))
    return init_device_mesh(device.type, (num_copies, ranks_of_copy), mesh_dim_names=("replicate", "shard"))


def shard(model: nn.Module, mesh: DeviceMesh, gathered: torch.dtype = torch.float32, *, keeps_gathered: bool = False) -> None:
    """Shard every parameter over a mesh, in place (FSDP2); blocks are gathered one at a time when they run.

    `gathered`: dtype of the gathered weights. Shards, reduced gradients and inputs (among them a flow's timesteps) stay
    32-bit; autocast casts what it needs to. `keeps_gathered`: from the forward to the backward pass. Trained parts that stay
    32-bit in a 16-bit model are gathered by themselves and as they are: FSDP2 gathers weights of one dtype together.
    """
    policy = MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=torch.float32, cast_forward_inputs=False)
    trained = [one for one in model.parameters() if one.requires_grad]
    if len({one.dtype for one in trained}) > 1:
        as_is = MixedPrecisionPolicy(cast_forward_inputs=False)
        for part in model.modules():
            if any(one.requires_grad and one.dtype is torch.float32 for one in part.parameters(recurse=False)):
                fully_shard(part, mesh=mesh, mp_policy=as_is, reshard_after_forward=not keeps_gathered)
    for part in separate_blocks(model):
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=not keeps_gathered)
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


def loads_alone(config: TrainConfig) -> bool:
    """Return True if every rank reads the whole model: quantised and offloaded weights are not sent."""
    return isinstance(config.base, Base) or bool(config.offload_blocks)


def layout_on(device: torch.device) -> torch.memory_format:
    """Return the memory layout of convolutions' weights on a device."""
    return torch.channels_last if device.type == "cuda" else torch.contiguous_format


def keep_layout(model: nn.Module, layout: torch.memory_format) -> None:
    """Let a model compute convolutions in a layout, that of their inputs, though FSDP2 gathers weights without one."""

    def laid_out(_module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return given[0].contiguous(memory_format=layout), *given[1:]

    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_pre_hook(laid_out)


def place_model(
    model: nn.Module,
    config: TrainConfig,
    ranks: TrainRanks,
    device: torch.device,
    weights: Weights,
    folder: Path | None,
    average_of: Callable[[nn.Module], Average],
) -> Average:
    """Place a model on the device, in place, and return its average; both are those of the checkpoint in `folder`, if any.

    `average_of`: begins an average from a placed model's weights. Of several ranks, only rank 0's model has values, in host
    memory, unless each `loads_alone`.
    """
    layout = layout_on(device)
    alone = ranks.world_size == 1 or loads_alone(config)
    if alone:
        model.to(device=device, memory_format=layout)  # type: ignore[call-overload]
    else:
        whole = tensors_of(model)
        torch.nn.Module.to(model, "meta")
        if config.is_sharded(ranks.world_size):  # FSDP2 takes only contiguous parameters
            gathered = torch.bfloat16 if config.autocasts else torch.float32
            shard(model, shard_mesh(device, shard_ranks_of(config, ranks)), gathered, keeps_gathered=config.keep_gathered)
            if layout is torch.channels_last:
                keep_layout(model, layout)
        else:
            torch.nn.Module.to(model, memory_format=layout)  # type: ignore[call-overload]
        model.to_empty(device=device)
        fill_from_rank_zero(tensors_of(model), whole)
        for path, tables in from_rank_zero(ranks, lambda: tables_of(model)).items():
            vars(model.get_submodule(path)).update(tables)
    if folder is None:
        return average_of(model)
    load_weights(folder, weights, model, alone=alone)
    average = average_of(model)
    # without one in the checkpoint, it starts from the weights
    if average.is_kept and from_rank_zero(ranks, (folder / average_folder(weights)).is_dir):
        with average.applied():
            load_weights(folder, weights, model, averaged=True, alone=alone)
    return average
