"""Dtypes of stored columns in torch, and tensors in their stored form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

# By safetensors name. Unsigned integers are read as signed ones of the same size, for which torch has all operations.
TORCH_DTYPES = {
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.int64,
    "F32": torch.float32,
    "I32": torch.int32,
    "U32": torch.int32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I16": torch.int16,
    "U16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def as_stored(tensor: torch.Tensor) -> NDArray[Any]:
    """Return a CPU tensor as a numpy array over its memory; bfloat16, which numpy lacks, as uint16 bits."""
    array: NDArray[Any] = (tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor).numpy()
    return array
