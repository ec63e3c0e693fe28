"""Blocks of rows: K rows of one bucket, stacked column by column, as one safetensors file.

Shape letters: K rows in a block, V captions a sample at most, C latent channels, h and w the latent's height and width.
All functions are pure; FORMAT.md has the byte layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.errors import CorruptError
from bucketline.store.digests import checksum
from bucketline.store.tensor_file import DTYPES, MAX_DIMENSIONS, header_bytes_for, lay_out, read_header, write_header

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

CHECKSUM, CAPTIONS, ORIGINAL_SIZE, CROP, ID = "checksum", "captions", "original_size", "crop", "id"
BLOCK_FORMAT = "bucketline.block/1"
_SMALL_BYTES = 256  # of a column whose rows are copied beside its neighbour's rather than hashed alone
TARGET_BLOCK_BYTES = 1 << 20
MAX_ROWS = (1 << 32) - 1  # of one bucket in one shard: index and dropped lists hold row numbers in 32 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One tensor of fixed shape per row; `shape` is a row's, without K, and `dtype` is spelt as safetensors spells it."""

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
    """Give the columns that every bucket has beside its latents."""
    return (
        Column(name=CHECKSUM, dtype="U64", shape=()),
        Column(name=CAPTIONS, dtype="I32", shape=(max_captions,)),
        Column(name=ORIGINAL_SIZE, dtype="I32", shape=(2,)),  # height, width of the source picture, upright, in px
        Column(name=CROP, dtype="I32", shape=(2,)),  # top, left of the crop in the resized picture, in px
        Column(name=ID, dtype="U64", shape=(2,)),  # a digest; 8-byte items, so that it lies beside the other small columns
    )


@dataclass(frozen=True, kw_only=True)
class BlockSpec:
    """What a bucket's blocks hold: its columns, in file order (descending item size, then name)."""

    bucket: str
    columns: tuple[Column, ...]

    def __post_init__(self) -> None:
        ordered = tuple(sorted(self.columns, key=lambda column: (-column.item_bytes, column.name)))
        object.__setattr__(self, "columns", ordered)

    @cached_property
    def prefix_bytes(self) -> dict[str, int]:
        """For each column, the row bytes of the columns before it: in a block of K rows it begins at K times that."""
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
        """The fixed length of every header of this bucket: what the largest possible block would need."""
        return header_bytes_for(lay_out(self._shapes(MAX_ROWS)), self._metadata(MAX_ROWS))

    @cached_property
    def rows_per_block(self) -> int:
        return max(1, round(TARGET_BLOCK_BYTES / self.row_bytes))

    def column(self, name: str) -> Column:
        return next(column for column in self.columns if column.name == name)

    def block_bytes(self, num_rows: int) -> int:
        return self.header_bytes + num_rows * self.row_bytes

    def _shapes(self, num_rows: int) -> list[tuple[str, str, tuple[int, ...]]]:
        return [(column.name, column.dtype, (num_rows, *column.shape)) for column in self.columns]

    def _metadata(self, first_row: int) -> dict[str, str]:
        return {"format": BLOCK_FORMAT, "bucket": self.bucket, "first_row": str(first_row)}


Row = dict[str, bytes]  # column name → the row's bytes, a copy of its own; without the checksum


def make_row(spec: BlockSpec, values: Mapping[str, NDArray[Any]]) -> Row:
    """Clone one sample's values out of whatever they are views of, checked against the bucket's columns.

    Raises:
        ValueError: where a value's shape or dtype is not the column's.
    """
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
    """Stack rows into one block; its length is checked against the sum of its rows before it is given back."""
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
    """Give the checksum of a row: of its columns' bytes in file order, the checksum itself left out."""
    return checksum(*(row[column.name] for column in spec.columns if column.name != CHECKSUM))


def decode_block(spec: BlockSpec, block: bytes | memoryview, item: str) -> tuple[int, dict[str, NDArray[Any]]]:
    """Give a block's first row number and its columns `[K, …]` as views of `block`.

    Raises:
        CorruptError: where the header does not describe a block of this bucket of this length; `item` is named.
    """
    tensors, metadata, header_bytes = read_header(block, len(block), item)
    num_rows = (len(block) - spec.header_bytes) // spec.row_bytes
    first_row = metadata.get("first_row", "")
    found = [(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors]
    if header_bytes != spec.header_bytes or found != spec._shapes(num_rows) or as_row(first_row) < 0:
        raise CorruptError(f"{item}: its header is not that of a block of bucket {spec.bucket}")
    if metadata != spec._metadata(int(first_row)):
        raise CorruptError(f"{item}: says it belongs to {metadata.get('bucket')!r}, expected {spec.bucket!r}")
    data = memoryview(block)[header_bytes:]
    columns = {
        tensor.name: np.frombuffer(data[tensor.begin : tensor.end], dtype=DTYPES[tensor.dtype]).reshape(tensor.shape)
        for tensor in tensors
    }
    return int(first_row), columns


def as_row(text: str) -> int:
    """Read the row number out of a header; -1 where it is none."""
    return int(text) if text.isdecimal() and len(text) <= 20 else -1


def bad_rows(spec: BlockSpec, columns: Mapping[str, NDArray[Any]]) -> list[int]:
    """Give the rows of a decoded block whose bytes are not those that were written."""
    stored = columns[CHECKSUM].tolist()
    parts = [(part.reshape(-1).data, part.shape[1]) for part in _joined(spec, columns)]
    return [
        k
        for k, expected in enumerate(stored)
        if checksum(*(part[k * row_bytes : (k + 1) * row_bytes] for part, row_bytes in parts)) != expected
    ]


def _joined(spec: BlockSpec, columns: Mapping[str, NDArray[Any]]) -> list[NDArray[np.uint8]]:
    """Give a block's columns without the checksum as bytes, `[K, …]`, small neighbours in one: a call a row costs more."""
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
