"""The header of a safetensors file, written at a fixed length and read within bounds.

The `safetensors` package reads what is written here; it is not used to write because the order of the tensors and
the length of the header must be ours (a row's address is arithmetic), and not to read because it copies.
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

# As safetensors spells them. numpy has no bfloat16: its bits travel as uint16.
DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
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
    "BOOL": np.dtype("?"),
}

LENGTH_BYTES = 8  # the file begins with the header's length, little-endian
HEADER_ALIGN_BYTES = 64  # so that every 8-byte column of a block stays aligned
MAX_HEADER_BYTES = 1 << 20
MAX_DIMENSIONS = 32  # of a tensor
METADATA = "__metadata__"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """Where one tensor of a file lies; `begin` and `end` count bytes from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


def lay_out(columns: Sequence[tuple[str, str, tuple[int, ...]]]) -> list[Tensor]:
    """Place (name, dtype, shape) one behind the other, in the order given, without holes."""
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
    """Give the length in bytes, length field included, that the header of these tensors is padded to."""
    needed = LENGTH_BYTES + len(_json(tensors, metadata))
    return -(-needed // HEADER_ALIGN_BYTES) * HEADER_ALIGN_BYTES


def write_header(tensors: Sequence[Tensor], metadata: Mapping[str, str], header_bytes: int) -> bytes:
    """Give the file's first `header_bytes` bytes: the length, the JSON, and spaces up to that length."""
    text = _json(tensors, metadata)
    room = header_bytes - LENGTH_BYTES
    if len(text) > room:
        raise AssertionError(f"header of {len(text)} bytes does not fit {room}")
    return room.to_bytes(LENGTH_BYTES, "little") + text.ljust(room, b" ")


def read_header(data: bytes | memoryview, file_bytes: int, item: str) -> tuple[list[Tensor], dict[str, str], int]:
    """Parse a header out of the file's first bytes: its tensors in file order, its metadata, and its length.

    `data` holds at least the whole header; `file_bytes` is the length of the file that it heads.

    Raises:
        CorruptError: where the header is not one, or tensors overlap, leave holes or leave the file; `item` is named.
    """
    if len(data) < LENGTH_BYTES:
        raise CorruptError(f"{item}: {len(data)} bytes are too few for a safetensors header")
    room = int.from_bytes(data[:LENGTH_BYTES], "little")
    if room > min(MAX_HEADER_BYTES, len(data) - LENGTH_BYTES):
        raise CorruptError(f"{item}: its header claims {room} bytes, at most {len(data) - LENGTH_BYTES} are there")
    try:
        entries = json.loads(bytes(data[LENGTH_BYTES : LENGTH_BYTES + room]))
        metadata = {str(key): str(value) for key, value in entries.pop(METADATA, {}).items()}
        tensors = [_read_entry(name, entry) for name, entry in entries.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptError(f"{item}: its header is no safetensors header ({error!r:.200})") from error
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
