"""Training in 8-bit floats by torchao: the products of the blocks' linear layers, with scales per row, computed at each step.

Weights, gradients and checkpoints stay as they are. Source: Micikevicius et al. 2022, "FP8 Formats for Deep Learning"
(arXiv 2209.05433).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from bucketline.errors import UsageError
from bucketline.train.parallel import repeated_blocks

if TYPE_CHECKING:
    from torch import nn

    from bucketline.train.config import TrainConfig

CAPABILITY = (9, 0)  # Hopper's, the first with such products at twice the speed of bf16
MULTIPLE = 16  # of a layer's inputs and outputs, as the products take them
PER_SAMPLE = ("norm", "emb")  # in the names of layers that see one vector per sample: too small to gain


def expect_float8(config: TrainConfig, device: torch.device) -> None:
    """Check that a run can train in 8-bit floats."""
    if config.lora_rank is not None:
        raise UsageError(
            f"--precision is fp8 with --lora-rank {config.lora_rank}, expected the full model: it is the trained weights' "
            "products that gain; use --precision bf16"
        )
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < CAPABILITY:
        raise UsageError(f"--precision is fp8, and the device is {name}, expected an H100 or later; use --precision bf16")
    import torchao.float8  # noqa: F401 - only whether it is there


def use_float8(model: nn.Module, *, emulates: bool = False) -> int:
    """Replace the blocks' larger linear layers in place; return how many. `emulates`: compute in 32 bits, on any device."""
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
