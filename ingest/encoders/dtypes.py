"""Dtypes that encoders compute in, and conversion of tensors to the stored form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}


def as_stored(tensor: torch.Tensor) -> NDArray[Any]:
    """Return a CPU tensor as a numpy array; bfloat16, which numpy lacks, as uint16 bits."""
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    array: NDArray[Any] = tensor.numpy()
    return array
