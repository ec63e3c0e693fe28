"""Numbers in the columns of an MDS sample: raw bytes, or `ndarray` by the dtype and shape that were written.

Letters: C latent channels, h and w the latent's height and width.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from bucketline.ingest.importers import cache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

BYTES, ARRAY = "bytes", "ndarray"
_FLOATS = {"float16": "<f2", "float32": "<f4", "float64": "<f8"}
# Source: `NDArray` in `streaming/base/format/mds/encodings.py`
_DTYPES = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32"}
_DTYPES |= {64: "uint64", 65: "int64", 66: "float64"}
_EXPECTED = "expected bytes of F16 or F32, or an ndarray of float16, float32 or float64"


def why_no_floats(name: str, kind: str) -> str | None:
    """Return why a column of this encoding does not hold floats; None if it does, or if each sample says."""
    if kind in (BYTES, ARRAY):
        return None
    family, _, rest = kind.partition(":")
    if family == ARRAY and rest.partition(":")[0] in _FLOATS:
        return None
    bits = ", perhaps the bits of BF16, which nothing says" if "int16" in rest.partition(":")[0] else ""
    return f"its column {name} is {kind[:40]}{bits}; {_EXPECTED}"


def floats(name: str, kind: str, data: bytes, shape: Sequence[int]) -> Tensor:
    """Return the values of a column. `shape` is that of raw bytes, of which F16 and F32 are told apart by their number.

    A side of -1 in `shape` is as long as it takes; the values are F16 then.

    Raises:
        RejectedError: if they are not floats of the shape.
    """
    if kind == BYTES:
        size = math.prod(shape)
        dtype = "<f4" if size > 0 and len(data) == 4 * size else "<f2"
        if len(data) != np.dtype(dtype).itemsize * size if size > 0 else len(data) % (2 * abs(size)):
            raise cache.damaged(f"its {name} has {len(data)} bytes, expected F16 or F32 of the shape {list(shape)}")
        values = np.frombuffer(data, dtype=dtype).reshape(tuple(shape))
    else:
        values = _array(name, kind, data)
    return torch.from_numpy(values.astype(np.float32))


def _array(name: str, kind: str, data: bytes) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    """Return an array of Streaming's encoding, whose dtype and shape are the column's, or written before the values."""
    if why := why_no_floats(name, kind):
        raise cache.damaged(why)
    _, dtype, sides = (*kind.split(":"), "", "")[:3]
    try:
        if not dtype:
            dtype, data = _DTYPES[data[0]], data[1:]
        if sides:
            shape = tuple(int(side) for side in sides.split(","))
        else:
            head, data = data[0], data[1:]
            num_sides, width = head >> 2, 1 << (head & 3)
            shape = tuple(np.frombuffer(data[: num_sides * width], dtype=f"<u{width}").tolist())
            data = data[num_sides * width :]
        if dtype in _FLOATS:
            values = np.frombuffer(data, dtype=_FLOATS[dtype])
            if values.size == math.prod(shape):
                return values.reshape(shape)
            raise ValueError(f"{values.size} values for the shape {list(shape)}")
    except (KeyError, IndexError, ValueError) as error:
        raise cache.damaged(f"its {name} is not an array as its column says, {kind[:40]} ({error!s:.80})") from error
    raise cache.damaged(f"its {name} is an ndarray of {dtype}; {_EXPECTED}")
