"""The frozen weights of a LoRA run in 8 or 4 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from bucketline.errors import UsageError
from bucketline.quantised_linear import quantise_layers
from bucketline.train.config import Base
from bucketline.train.parallel import repeated_blocks

if TYPE_CHECKING:
    from torch import nn

FP8_CAPABILITY = (8, 9)  # compute capability from which compiled code converts float8


def quantise_base(model: nn.Module, base: Base, device: torch.device) -> None:
    """Quantise the frozen linear layers of a model's blocks, as `quantise_layers`; what is outside the blocks stays."""
    if base is Base.FP8 and device.type == "cuda" and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        raise UsageError(
            f"--base is fp8, and {torch.cuda.get_device_name(device)} has compute capability "
            f"{'.'.join(map(str, torch.cuda.get_device_capability(device)))}, expected 8.9 or more; use --base int8"
        )
    for block in repeated_blocks(model):
        quantise_layers(block, base, device)
