"""Dtypes of stored columns in torch, and tensors in their stored form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from bucketline.dtype_names import choice_of

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
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "BOOL": torch.bool,
}


# Dtypes that numpy lacks, by safetensors name.
BITS_ONLY = {dtype: name for name, dtype in TORCH_DTYPES.items() if name.startswith(("BF16", "F8"))}


def dtype_named(word: str) -> torch.dtype:
    """Return a dtype by any of its names, in any case."""
    return TORCH_DTYPES[choice_of(word, TORCH_DTYPES) or word]


def as_stored(tensor: torch.Tensor) -> NDArray[Any]:
    """Return a CPU tensor as a numpy array over its memory; of a dtype that numpy lacks, its bits in unsigned integers."""
    bits = torch.uint16 if tensor.dtype.itemsize == 2 else torch.uint8
    array: NDArray[Any] = (tensor.view(bits) if tensor.dtype in BITS_ONLY else tensor).numpy()
    return array
