"""The memory of weights, gradients, moments and average, computed from a model's shapes; of a run's choices, a table.

Activations are not in it: they depend on the batch, its size and `--activation-memory`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from bucketline.train.config import Base, Ema, OptimizerName, TrainConfig, WeightDtype
from bucketline.train.memory.frozen_base import NF4_GROUP, NF4_SCALES
from bucketline.train.models import FAMILIES, ModelFamily
from bucketline.train.optimizers.choice import make_optimizer
from bucketline.train.parallel import repeated_blocks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from bucketline.typed_json import Json

FP32 = 4  # bytes
RANKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The choices of a run that decide where its memory goes; the weights outside a quantised base are bf16 with LoRA."""

    label: str
    lora_rank: int | None = None
    base: Base | None = None
    ema: Ema = Ema.DEVICE
    num_shards: int = 1
    offloads: bool = False  # all blocks
    optimizer: OptimizerName = OptimizerName.ADAMW
    weights: WeightDtype = WeightDtype.FP32  # the trained ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on one device."""

    weights: int
    gradients: int
    moments: int
    average: int

    @property
    def total(self) -> int:
        """The bytes together."""
        return self.weights + self.gradients + self.moments + self.average


def choices(rank: int) -> tuple[Choice, ...]:
    """Return the rows of the table; `rank`: of its adapters."""
    lora = f"--lora-rank {rank}"
    return (
        Choice(label="all weights"),
        Choice(label="--ema cpu", ema=Ema.CPU),
        Choice(label="--optimizer adamw-8bit", optimizer=OptimizerName.ADAMW_8BIT),
        Choice(
            label="--weights bf16 --optimizer adamw-8bit --ema off",
            weights=WeightDtype.BF16,
            optimizer=OptimizerName.ADAMW_8BIT,
            ema=Ema.OFF,
        ),
        Choice(label=f"--sharding fsdp on {RANKS} GPUs", num_shards=RANKS),
        Choice(label=lora, lora_rank=rank),
        *(Choice(label=f"{lora} --base {base}", lora_rank=rank, base=base) for base in (Base.INT8, Base.NF4)),
        Choice(label=f"{lora} --offload-blocks all", lora_rank=rank, offloads=True),
        Choice(label=f"{lora} --base nf4 --offload-blocks all", lora_rank=rank, base=Base.NF4, offloads=True),
    )


def on_meta(config: Mapping[str, Json]) -> tuple[type[ModelFamily], nn.Module]:
    """Return the family of a model's configuration, and the model on the meta device."""
    import diffusers

    kind = str(config["_class_name"])
    family = next(one for one in FAMILIES if one.takes(kind, config))
    with torch.device("meta"):
        model: nn.Module = getattr(diffusers, kind).from_config(dict(config))
    return family, model


def memory_of(model: nn.Module, targets: Iterable[str], choice: Choice) -> Memory:
    """Compute a choice's memory from a model's shapes; `targets`: the ends of the names of layers that get adapters."""
    if choice.lora_rank is None:
        trained = sum(parameter.numel() for parameter in model.parameters()) // choice.num_shards
        held = sum(map(_num_bytes, model.buffers()))
    else:
        adapted = [layer for name, layer in model.named_modules() if name.endswith(tuple(f".{target}" for target in targets))]
        trained = sum(choice.lora_rank * sum(_sides(layer)) for layer in adapted)
        blocks = repeated_blocks(model)
        # DiT's first block stays; it is one of 28.
        in_blocks = [_frozen_bytes(block, choice.base) for block in blocks]
        inside = {id(tensor) for block in blocks for tensor in (*block.parameters(), *block.buffers())}
        outside = sum(_bf16_bytes(one) for one in (*model.parameters(), *model.buffers()) if id(one) not in inside)
        held = outside + sum(sorted(in_blocks)[-2:] if choice.offloads else in_blocks)
    each = FP32 if choice.weights is WeightDtype.FP32 else FP32 // 2
    return Memory(
        weights=held + each * trained,
        gradients=each * trained,
        moments=round(state_bytes(choice.optimizer, choice.weights) * trained),
        average=FP32 * trained if choice.ema is Ema.DEVICE else 0,
    )


@functools.cache
def state_bytes(optimizer: OptimizerName, weights: WeightDtype) -> float:
    """Return the bytes of an optimizer's state for each weight, counted from its tensors after a step on a matrix."""
    matrix = nn.Linear(512, 512, bias=False, dtype=torch.float32 if weights is WeightDtype.FP32 else torch.bfloat16)
    config = TrainConfig(
        store=("none",),
        model=Path("none"),
        output_dir=Path("none"),
        batch_size=1,
        max_steps=1,
        learning_rate=0.0,
        optimizer=optimizer,
        weights=weights,
    )
    made = make_optimizer(config, nn.Sequential(matrix), compiled=False)
    matrix.weight.grad = torch.zeros_like(matrix.weight)
    made.step()
    tensors = (value for value in made.state_dict()["state"][0].values() if isinstance(value, torch.Tensor) and value.dim())
    return sum(tensor.nbytes for tensor in tensors) / matrix.weight.numel()


def _sides(layer: Any) -> tuple[int, int]:  # noqa: ANN401 - a linear layer, which is all that the families adapt
    return layer.in_features, layer.out_features


def _frozen_bytes(block: nn.Module, base: Base | None) -> int:
    layers = [layer for layer in block.modules() if type(layer) is nn.Linear] if base is not None else []
    quantised = {id(layer.weight) for layer in layers}
    others = (one for one in (*block.parameters(), *block.buffers()) if id(one) not in quantised)
    return sum(map(_bf16_bytes, others)) + sum(_quantised_bytes(layer.weight, base) for layer in layers if base is not None)


def _quantised_bytes(weight: Tensor, base: Base) -> int:
    rows, size = len(weight), weight.numel()
    if base is not Base.NF4:
        return size + FP32 * rows
    if size % NF4_GROUP:
        return _bf16_bytes(weight)
    groups = size // NF4_GROUP
    return size // 2 + groups + FP32 * (groups // math.gcd(groups, NF4_SCALES) + 1 + 16)


def _bf16_bytes(tensor: Tensor) -> int:
    return 2 * tensor.numel() if tensor.is_floating_point() else _num_bytes(tensor)


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def as_table(configs: Mapping[str, Mapping[str, Json]], rank: int) -> str:
    """Return the table in Markdown: a row for each choice, a column for each model, in GB of 10^9 bytes."""
    models = {name: on_meta(config) for name, config in configs.items()}
    sizes = [sum(parameter.numel() for parameter in model.parameters()) / 1e9 for _, model in models.values()]
    lines = [
        "| GB without activations | " + " | ".join(models) + " |",
        "|---|" + "---:|" * len(models),
        "| 10^9 weights | " + " | ".join(f"{size:.2f}" for size in sizes) + " |",
    ]
    for choice in choices(rank):
        found = (memory_of(model, family.lora_targets, choice).total / 1e9 for family, model in models.values())
        label = choice.label if choice.label.startswith("all") else f"`{choice.label}`"
        lines.append(f"| {label} | " + " | ".join(f"{gb:.1f}" for gb in found) + " |")
    return "\n".join(lines)
