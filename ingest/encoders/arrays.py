"""Tensors as the store takes them, and a module's weights as its digest does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray
    from torch import nn


def as_stored(tensor: torch.Tensor) -> NDArray[Any]:
    """Give a CPU tensor as a numpy array; bfloat16, which numpy lacks, as its bits in uint16."""
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    array: NDArray[Any] = tensor.numpy()
    return array


def weights_of(module: nn.Module) -> Iterator[tuple[str, memoryview]]:
    """Give the names and bytes of a module's weights, as loaded."""
    for name, tensor in module.state_dict().items():
        yield name, tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
