"""Given arrays: numpy arrays or torch tensors of exactly the expected columns, and finite."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.errors import UsageError
from bucketline.option_types import unlike
from bucketline.store.format.safetensors_header import DTYPES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    Arrays = Mapping[str, Any]  # column name → numpy array or torch tensor

# Bits of NaN and infinite values, as (mask, value): a value is one if its bits under the mask are all of `value`.
_NOT_FINITE = {
    "F16": (0x7C00, 0x7C00),
    "BF16": (0x7F80, 0x7F80),
    "F8_E4M3": (0x7F, 0x7F),
    "F8_E5M2": (0x7C, 0x7C),
    "F8_E8M0": (0xFF, 0xFF),
    "F8_E4M3FNUZ": (0xFF, 0x80),
    "F8_E5M2FNUZ": (0xFF, 0x80),
}
# Names that torch and ml_dtypes have for the dtypes that numpy lacks.
_BITS = {
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}


def checked_arrays(item: str, columns: Sequence[tuple[str, str]], values: Arrays, finite: set[str]) -> dict[str, NDArray[Any]]:
    """Return the values of exactly these columns, (name, dtype) each, as arrays. Shapes are compared where they are stored."""
    expected = sorted(name for name, _ in columns)
    if sorted(values) != expected:
        raise UsageError(f"{item} has the columns {sorted(values)}, expected {expected}; give each of them, and no other")
    arrays = {}
    for name, dtype in columns:
        try:
            arrays[name] = as_array(values[name], dtype)
        except (ValueError, TypeError, RuntimeError) as error:
            raise UsageError(
                f"{item}: a column is not an array ({error}); give numpy arrays or tensors, and BF16 as its bits, uint16"
            ) from error
        if np.ma.is_masked(values[name]):
            raise UsageError(f"{item}: column {name!r} has masked values; give what is to be stored, such as its `filled(0)`")
        if arrays[name].dtype.kind in "OUS":
            raise unlike(f"{item}: column {name!r}", values[name], "an array of numbers; give a numpy array or a tensor")
        if name in finite and not is_finite(arrays[name], dtype):
            raise UsageError(
                f"{item}: column {name!r} is NaN or infinite, or beyond the range of {dtype}; "
                "leave the sample out, or store a wider dtype"
            )
    return arrays


def as_array(value: Any, dtype: str) -> NDArray[Any]:  # noqa: ANN401 - anything that numpy takes, or a tensor
    """Return a value as a numpy array; of a dtype that numpy lacks, from torch or ml_dtypes, its bits if it is `dtype`."""
    bits = DTYPES[dtype]
    if hasattr(value, "detach"):  # a torch tensor, so that torch is there
        value = value.detach().cpu().contiguous()
        if _BITS.get(str(value.dtype).removeprefix("torch.")) == dtype:
            value = value.view(getattr(sys.modules["torch"], bits.name))
    array: NDArray[Any] = np.asarray(value)
    if array.dtype == bits:
        return array
    return array.view(bits) if _BITS.get(array.dtype.name) == dtype else array


def dtype_of(value: Any) -> str | None:  # noqa: ANN401 - as `as_array`
    """Return the name of the dtype in which `as_array` takes a value unchanged; None if there is none."""
    dtype = value.dtype if hasattr(value, "dtype") else np.asarray(value).dtype
    name = _BITS.get(str(dtype).removeprefix("torch."))
    if name is None and hasattr(value, "detach"):
        dtype = as_array(value, "U8").dtype
    own = (own for own, known in DTYPES.items() if known == dtype and own not in _BITS.values())
    return name or next(own, None)


def is_finite(values: NDArray[Any], dtype: str) -> bool:
    """Return False if a value is NaN or infinite. Short floats are compared as integers, which is several times faster."""
    bits = DTYPES[dtype]
    if values.dtype != bits:
        return True  # not what is stored: refused for its dtype
    if dtype in _NOT_FINITE:
        unsigned = np.dtype(f"<u{bits.itemsize}")
        mask, value = (unsigned.type(number) for number in _NOT_FINITE[dtype])
        return not bool(((values.view(unsigned) & mask) == value).any())
    return values.dtype.kind not in "fc" or bool(np.isfinite(values).all())
