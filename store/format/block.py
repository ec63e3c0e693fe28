"""Blocks of rows: K rows of one bucket, stacked column by column, as one safetensors file.

Shape letters: K rows in a block, at most V captions per sample, C latent channels, h and w the latent's height and width.
All functions are pure; FORMAT.md specifies the byte layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.errors import CorruptError, StoreError
from bucketline.forks import cached_property
from bucketline.store.format.hashing import checksum
from bucketline.store.format.safetensors_header import (
    DTYPES,
    MAX_DIMENSIONS,
    header_bytes_for,
    lay_out,
    read_header,
    write_header,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

CHECKSUM, CAPTIONS, ORIGINAL_SIZE, CROP, ID = "checksum", "captions", "original_size", "crop", "id"
BLOCK_FORMAT = "bucketline.block/1"
IMAGE_AXES = ("height_px", "width_px")
_SMALL_BYTES = 256  # columns up to this size are concatenated with a small neighbour before hashing
TARGET_BLOCK_BYTES = 1 << 20
MAX_ROWS = (1 << 32) - 1  # per bucket and shard: index and dropped lists hold 32-bit row numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One tensor of fixed shape per row; `shape` excludes K, and `dtype` is a safetensors name."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"column {self.name!r} has the dtype {self.dtype!r}, expected one of {', '.join(DTYPES)}")
        if len(self.shape) > MAX_DIMENSIONS or any(length < 0 for length in self.shape) or self.row_bytes >= 1 << 40:
            raise ValueError(f"column {self.name!r} has the impossible shape {list(self.shape)}")

    @property
    def item_bytes(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def row_bytes(self) -> int:
        return self.item_bytes * math.prod(self.shape)

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return DTYPES[self.dtype]


def fixed_columns(max_captions: int) -> tuple[Column, ...]:
    """Return the columns that every bucket has in addition to its own."""
    return (
        Column(name=CHECKSUM, dtype="U64", shape=()),
        Column(name=CAPTIONS, dtype="I32", shape=(max_captions,)),
        Column(name=ORIGINAL_SIZE, dtype="I32", shape=(2,)),  # height, width of the upright source image, in px
        Column(name=CROP, dtype="I32", shape=(2,)),  # top, left of the crop in the resized image, in px
        Column(name=ID, dtype="U64", shape=(2,)),  # a digest; 8-byte items keep it next to the other small columns
    )


@dataclass(frozen=True, kw_only=True)
class BlockSpec:
    """The columns of a bucket's blocks, in file order (descending item size, then name), and the names of its axes."""

    bucket: str
    columns: tuple[Column, ...]
    axes: tuple[str, ...] = IMAGE_AXES  # in the order in which the bucket's name has their sizes

    def __post_init__(self) -> None:
        ordered = tuple(sorted(self.columns, key=lambda column: (-column.item_bytes, column.name)))
        object.__setattr__(self, "columns", ordered)

    @cached_property
    def prefix_bytes(self) -> dict[str, int]:
        """Row bytes of all preceding columns; in a block of K rows, a column begins at K times that."""
        prefix, at = {}, 0
        for column in self.columns:
            prefix[column.name] = at
            at += column.row_bytes
        return prefix

    @cached_property
    def row_bytes(self) -> int:
        return sum(column.row_bytes for column in self.columns)

    @cached_property
    def header_bytes(self) -> int:
        """Return the fixed header length of this bucket's blocks: that of the largest possible block."""
        return header_bytes_for(lay_out(self._shapes(MAX_ROWS)), self._metadata(MAX_ROWS))

    @cached_property
    def rows_per_block(self) -> int:
        return max(1, round(TARGET_BLOCK_BYTES / self.row_bytes))

    def column(self, name: str) -> Column:
        """Return a column by name.

        Raises:
            StoreError: if there is none.
        """
        for column in self.columns:
            if column.name == name:
                return column
        raise StoreError(
            f"{self.bucket} has no column {name!r:.80}; it has {', '.join(column.name for column in self.columns)}"
        )

    def block_bytes(self, num_rows: int) -> int:
        return self.header_bytes + num_rows * self.row_bytes

    def _shapes(self, num_rows: int) -> list[tuple[str, str, tuple[int, ...]]]:
        return [(column.name, column.dtype, (num_rows, *column.shape)) for column in self.columns]

    def _metadata(self, first_row: int) -> dict[str, str]:
        axes = {} if self.axes == IMAGE_AXES else {"axes": ",".join(self.axes)}
        return {"format": BLOCK_FORMAT, "bucket": self.bucket, "first_row": str(first_row), **axes}


Row = dict[str, bytes]  # column name → the row's bytes, copied; without the checksum


def make_row(spec: BlockSpec, values: Mapping[str, NDArray[Any]]) -> Row:
    """Return a copy of one sample's values, checked against the bucket's columns."""
    row: Row = {}
    for column in spec.columns:
        if column.name == CHECKSUM:
            continue
        value = values[column.name]
        if value.shape != column.shape or value.dtype != column.numpy_dtype:
            raise ValueError(
                f"column {column.name!r} of bucket {spec.bucket} takes {column.dtype} {list(column.shape)}, "
                f"got {value.dtype} {list(value.shape)}"
            )
        row[column.name] = value.tobytes()
    return row


def encode_block(spec: BlockSpec, rows: Sequence[Row], first_row: int) -> bytes:
    """Return rows stacked into one block, after checking its length."""
    data: list[bytes] = [write_header(lay_out(spec._shapes(len(rows))), spec._metadata(first_row), spec.header_bytes)]
    for column in spec.columns:
        if column.name == CHECKSUM:
            sums = [row_checksum(spec, row) for row in rows]
            data.append(np.array(sums, dtype="<u8").tobytes())
        else:
            data.extend(row[column.name] for row in rows)
    block = b"".join(data)
    if len(block) != spec.block_bytes(len(rows)):
        raise AssertionError(
            f"a block of {len(rows)} rows of {spec.bucket} has {len(block)} bytes, expected {spec.block_bytes(len(rows))}"
        )
    return block


def row_checksum(spec: BlockSpec, row: Mapping[str, bytes | memoryview]) -> int:
    """Return a row's checksum: over its columns' bytes in file order, except the checksum itself."""
    return checksum(*(row[column.name] for column in spec.columns if column.name != CHECKSUM))


def decode_block(spec: BlockSpec, block: bytes | memoryview, item: str) -> tuple[int, dict[str, NDArray[Any]]]:
    """Return a block's first row number and its columns `[K, …]` as views of `block`."""
    tensors, metadata, header_bytes = read_header(block, len(block), item)
    num_rows = (len(block) - spec.header_bytes) // spec.row_bytes
    first_row = metadata.get("first_row", "")
    found = [(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors]
    if header_bytes != spec.header_bytes or found != spec._shapes(num_rows) or as_row(first_row) < 0:
        raise CorruptError(f"{item}: its header is not that of a block of bucket {spec.bucket}")
    if metadata != (expected := spec._metadata(int(first_row))):
        if metadata.get("bucket") != spec.bucket:
            raise CorruptError(f"{item}: says it belongs to {metadata.get('bucket')!r}, expected {spec.bucket!r}")
        raise CorruptError(f"{item}: its metadata is {metadata!s:.300}, expected {expected}")
    data = memoryview(block)[header_bytes:]
    columns = {
        tensor.name: np.frombuffer(data[tensor.begin : tensor.end], dtype=DTYPES[tensor.dtype]).reshape(tensor.shape)
        for tensor in tensors
    }
    return int(first_row), columns


def as_row(text: str) -> int:
    """Return the row number in a header's text; -1 if it is not one."""
    return int(text) if text.isdecimal() and len(text) <= 20 else -1


def bad_rows(spec: BlockSpec, columns: Mapping[str, NDArray[Any]]) -> list[int]:
    """Return the row indices of a decoded block whose bytes do not match their checksum."""
    stored = columns[CHECKSUM].tolist()
    parts = [(part.reshape(-1).data, part.shape[1]) for part in _joined(spec, columns)]
    return [
        k
        for k, expected in enumerate(stored)
        if checksum(*(part[k * row_bytes : (k + 1) * row_bytes] for part, row_bytes in parts)) != expected
    ]


def _joined(spec: BlockSpec, columns: Mapping[str, NDArray[Any]]) -> list[NDArray[np.uint8]]:
    """Return a block's columns as bytes `[K, …]`, without the checksum; small neighbours are joined to save calls per row."""
    num_rows = len(columns[CHECKSUM])
    runs: list[list[NDArray[np.uint8]]] = []
    for column in spec.columns:
        if column.name != CHECKSUM and column.row_bytes:
            own = columns[column.name].reshape(num_rows, -1).view("u1")
            if runs and max(own.shape[1], runs[-1][-1].shape[1]) <= _SMALL_BYTES:
                runs[-1].append(own)
            else:
                runs.append([own])
    return [np.concatenate(run, axis=1) if len(run) > 1 else run[0] for run in runs]
