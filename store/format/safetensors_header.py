"""The header of a safetensors file, written at a fixed length and read within bounds.

The `safetensors` package can read these files. It is not used to write, because tensor order and header length must be fixed
(row addresses are arithmetic), and not to read, because it copies.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.errors import CorruptError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# safetensors names, of all dtypes of whole bytes. What numpy lacks is held as unsigned integers of the same size: its bits.
DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "C64": np.dtype("<c8"),
    "I64": np.dtype("<i8"),
    "U64": np.dtype("<u8"),
    "F32": np.dtype("<f4"),
    "I32": np.dtype("<i4"),
    "U32": np.dtype("<u4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "U16": np.dtype("<u2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "F8_E4M3": np.dtype("u1"),
    "F8_E5M2": np.dtype("u1"),
    "F8_E8M0": np.dtype("u1"),
    "F8_E4M3FNUZ": np.dtype("u1"),
    "F8_E5M2FNUZ": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}

LENGTH_BYTES = 8  # the file begins with the header length, little-endian
HEADER_ALIGN_BYTES = 64  # keeps every 8-byte column of a block aligned
MAX_HEADER_BYTES = 1 << 20
MAX_DIMENSIONS = 32  # per tensor
METADATA = "__metadata__"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor's position in a file; `begin` and `end` count bytes from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


def lay_out(columns: Sequence[tuple[str, str, tuple[int, ...]]]) -> list[Tensor]:
    """Return contiguous positions for (name, dtype, shape) entries, in the given order."""
    tensors, begin = [], 0
    for name, dtype, shape in columns:
        end = begin + DTYPES[dtype].itemsize * math.prod(shape)
        tensors.append(Tensor(name=name, dtype=dtype, shape=shape, begin=begin, end=end))
        begin = end
    return tensors


def _json(tensors: Sequence[Tensor], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {METADATA: dict(metadata)}
    for tensor in tensors:
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [tensor.begin, tensor.end],
        }
    return json.dumps(entries, separators=(",", ":"), ensure_ascii=True).encode("ascii")


def header_bytes_for(tensors: Sequence[Tensor], metadata: Mapping[str, str]) -> int:
    """Return the padded header length of these tensors in bytes, including the length field."""
    needed = LENGTH_BYTES + len(_json(tensors, metadata))
    return -(-needed // HEADER_ALIGN_BYTES) * HEADER_ALIGN_BYTES


def write_header(tensors: Sequence[Tensor], metadata: Mapping[str, str], header_bytes: int) -> bytes:
    """Return the file's first `header_bytes` bytes: the length, the JSON, and padding spaces."""
    text = _json(tensors, metadata)
    room = header_bytes - LENGTH_BYTES
    if len(text) > room:
        raise AssertionError(f"header of {len(text)} bytes does not fit {room}")
    return room.to_bytes(LENGTH_BYTES, "little") + text.ljust(room, b" ")


def read_header(data: bytes | memoryview, file_bytes: int, item: str) -> tuple[list[Tensor], dict[str, str], int]:
    """Return the tensors in file order, the metadata and the length of a header, parsed from a file's first bytes.

    `data` holds at least the complete header; `file_bytes` is the file's length.
    """
    if len(data) < LENGTH_BYTES:
        raise CorruptError(f"{item}: {len(data)} bytes are too few for a safetensors header")
    room = int.from_bytes(data[:LENGTH_BYTES], "little")
    if room > min(MAX_HEADER_BYTES, len(data) - LENGTH_BYTES):
        raise CorruptError(f"{item}: its header claims {room} bytes, the file has at most {len(data) - LENGTH_BYTES}")
    try:
        entries = json.loads(bytes(data[LENGTH_BYTES : LENGTH_BYTES + room]))
        metadata = {str(key): str(value) for key, value in entries.pop(METADATA, {}).items()}
        tensors = [_read_entry(name, entry) for name, entry in entries.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptError(f"{item}: its header is not a safetensors header ({error!r:.200})") from error
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
    at = 0
    for tensor in tensors:
        size = DTYPES[tensor.dtype].itemsize * math.prod(tensor.shape)
        if tensor.begin != at or tensor.num_bytes != size:
            raise CorruptError(
                f"{item}: tensor {tensor.name!r} claims bytes {tensor.begin} to {tensor.end}, expected {at} to {at + size}"
            )
        at = tensor.end
    if LENGTH_BYTES + room + at != file_bytes:
        raise CorruptError(f"{item}: its header describes {LENGTH_BYTES + room + at} bytes, it has {file_bytes}")
    return tensors, metadata, LENGTH_BYTES + room


def _read_entry(name: str, entry: dict[str, Any]) -> Tensor:
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    numbers = (begin, end, *shape)
    if (
        len(shape) > MAX_DIMENSIONS
        or entry["dtype"] not in DTYPES
        or not all(type(n) is int and 0 <= n < 1 << 62 for n in numbers)
    ):
        raise ValueError(f"tensor {name!r} has an impossible entry")
    return Tensor(name=name, dtype=entry["dtype"], shape=shape, begin=begin, end=end)
