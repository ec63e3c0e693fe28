"""A block is a safetensors file that anyone reads, of a length that is arithmetic, with a checksum to every row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from bucketline.errors import CorruptError
from bucketline.store import BlockSpec, Column
from bucketline.store.format.block import MAX_ROWS, Row, bad_rows, decode_block, encode_block, fixed_columns, make_row
from bucketline.store.format.safetensors_header import DTYPES, read_header
from tests.kit import read_with_safetensors

BUCKET = "train/64x64"


def spec_of(*own: Column, max_captions: int = 3) -> BlockSpec:
    return BlockSpec(bucket=BUCKET, columns=(*fixed_columns(max_captions), *own))


LATENT = Column(name="latent", dtype="F16", shape=(2, 3, 5))
SPEC = spec_of(LATENT)


def random_values(spec: BlockSpec, seed: int) -> dict[str, NDArray[Any]]:
    random = np.random.default_rng(seed)
    return {
        column.name: np.frombuffer(random.bytes(column.row_bytes), "u1" if column.dtype == "BOOL" else column.numpy_dtype)
        .reshape(column.shape)
        .astype(column.numpy_dtype)
        for column in spec.columns
        if column.name != "checksum"
    }


def rows_of(spec: BlockSpec, count: int) -> list[Row]:
    return [make_row(spec, random_values(spec, seed)) for seed in range(count)]


@pytest.mark.parametrize("count", [1, 2, 7, 300])
def test_the_safetensors_package_reads_what_was_written(count: int) -> None:
    block = encode_block(SPEC, rows_of(SPEC, count), 11)
    found = read_with_safetensors(block)
    assert set(found) == {column.name for column in SPEC.columns}
    for column in SPEC.columns:
        assert (found[column.name]["dtype"], found[column.name]["shape"]) == (column.dtype, [count, *column.shape])
        if column.name != "checksum":
            written = b"".join(random_values(SPEC, seed)[column.name].tobytes() for seed in range(count))
            assert bytes(found[column.name]["data"]) == written


@pytest.mark.parametrize("count", [1, 9, 10, 99, 100, 4096])
def test_the_header_has_the_same_length_for_any_number_of_rows(count: int) -> None:
    block = encode_block(SPEC, rows_of(SPEC, count), 0)
    tensors, metadata, header_bytes = read_header(block, len(block), "x")
    assert header_bytes == SPEC.header_bytes
    assert header_bytes % 64 == 0
    assert len(block) == SPEC.header_bytes + count * SPEC.row_bytes
    assert metadata == {"format": "bucketline.block/1", "bucket": BUCKET, "first_row": "0"}
    assert [tensor.begin for tensor in tensors] == [count * SPEC.prefix_bytes[tensor.name] for tensor in tensors]


def test_the_header_has_room_for_the_largest_block_and_the_last_row() -> None:
    assert len(encode_block(SPEC, rows_of(SPEC, 1), MAX_ROWS)) == SPEC.block_bytes(1)


@given(
    shapes=st.lists(
        st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 5), max_size=3)), min_size=1, max_size=5
    ),
    count=st.integers(1, 20),
    max_captions=st.integers(1, 9),
)
@settings(max_examples=60)
def test_any_columns_come_back_aligned_and_in_descending_item_size(
    shapes: list[tuple[str, list[int]]], count: int, max_captions: int
) -> None:
    own = [Column(name=f"own_{n}", dtype=dtype, shape=tuple(shape)) for n, (dtype, shape) in enumerate(shapes)]
    spec = spec_of(*own, max_captions=max_captions)
    items = [column.item_bytes for column in spec.columns]
    assert items == sorted(items, reverse=True)
    block = encode_block(spec, rows_of(spec, count), 5)
    tensors, _, header_bytes = read_header(block, len(block), "x")
    for tensor in tensors:
        assert (header_bytes + tensor.begin) % DTYPES[tensor.dtype].itemsize == 0
    first_row, columns = decode_block(spec, block, "x")
    assert first_row == 5
    assert bad_rows(spec, columns) == []
    for k in range(count):
        for name, value in random_values(spec, k).items():
            assert columns[name][k].tobytes() == value.tobytes()


def test_a_damaged_row_is_found_whichever_byte_it_is() -> None:
    block = encode_block(SPEC, rows_of(SPEC, 3), 0)
    for at in range(SPEC.header_bytes, len(block)):
        damaged = bytearray(block)
        damaged[at] ^= 0x10
        _, columns = decode_block(SPEC, bytes(damaged), "x")
        (row,) = bad_rows(SPEC, columns)
        column = next(c for c in reversed(SPEC.columns) if SPEC.header_bytes + 3 * SPEC.prefix_bytes[c.name] <= at)
        assert row == (at - SPEC.header_bytes - 3 * SPEC.prefix_bytes[column.name]) // column.row_bytes


def test_no_damage_to_a_header_is_taken_for_another_block() -> None:
    """Flipped bits in a header either change nothing that is read, or are refused; never a wrong tensor."""
    block = encode_block(SPEC, rows_of(SPEC, 2), 3)
    _, expected = decode_block(SPEC, block, "x")
    for bit in range(SPEC.header_bytes * 8):
        damaged = bytearray(block)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            first_row, columns = decode_block(SPEC, bytes(damaged), "x")
        except CorruptError:
            continue
        assert all(np.array_equal(columns[name], value, equal_nan=True) for name, value in expected.items())
        assert first_row < MAX_ROWS  # the number itself is held against the extents


@pytest.mark.parametrize("length", [0, 7, 8, 100, -1, -1000])
def test_a_block_cut_short_is_refused(length: int) -> None:
    block = encode_block(SPEC, rows_of(SPEC, 4), 0)
    with pytest.raises(CorruptError, match=r"^block 7: "):
        decode_block(SPEC, block[:length], "block 7")


OTHER_COLUMNS = spec_of(Column(name="latent", dtype="F16", shape=(2, 5, 3)))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (BlockSpec(bucket="train/96x64", columns=SPEC.columns), "says it belongs to 'train/96x64', expected 'train/64x64'"),
        (OTHER_COLUMNS, "not that of a block of bucket train/64x64"),
    ],
)
def test_a_block_of_another_bucket_or_with_other_columns_is_refused(other: BlockSpec, words: str) -> None:
    with pytest.raises(CorruptError, match=f"^block 7: .*{words}"):
        decode_block(SPEC, encode_block(other, rows_of(other, 2), 0), "block 7")


@pytest.mark.parametrize(
    ("shape", "dtype"), [((2, 3, 5), "<f4"), ((2, 5, 3), "<f2"), ((1, 2, 3, 5), "<f2"), ((2, 3, 5), ">f2")]
)
def test_a_value_of_another_shape_dtype_or_byte_order_is_refused(shape: tuple[int, ...], dtype: str) -> None:
    with pytest.raises(ValueError, match=r"takes F16 \[2, 3, 5\]"):
        make_row(SPEC, {**random_values(SPEC, 0), "latent": np.zeros(shape, dtype)})


@pytest.mark.parametrize(("dtype", "shape"), [("F8", (2,)), ("F16", (-1,)), ("F64", (1 << 38,))])
def test_an_impossible_column_is_refused_by_name(dtype: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"column 'odd' has the"):
        Column(name="odd", dtype=dtype, shape=shape)


def test_blocks_take_about_a_mebibyte_of_rows_and_at_least_one() -> None:
    rows = spec_of(Column(name="latent", dtype="F16", shape=(4, 32, 32))).rows_per_block
    assert 120 <= rows <= 130
    assert spec_of(Column(name="latent", dtype="F32", shape=(16, 256, 256))).rows_per_block == 1
