"""Blocks of rows and captions are safetensors files that anyone reads; headers that lie and wrong values are refused."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray
from safetensors.numpy import save

from bucketline.errors import CorruptError
from bucketline.store import BlockSpec, Column
from bucketline.store.format.block import (
    DTYPES,
    HEADER_ALIGN_BYTES,
    MAX_ROWS,
    Row,
    bad_rows,
    caption_digest,
    decode_block,
    encode_block,
    fixed_columns,
    header_bytes_for,
    lay_out,
    make_row,
    read_header,
    write_header,
)
from bucketline.store.format.text import (
    DIGEST,
    Caption,
    TextError,
    TextSpec,
    as_e4m3,
    delivered,
    dequantise,
    e4m3_values,
    encode_text_block,
    is_storable,
    make_caption,
    measured_error,
    quantise,
    quantised_caption,
    quantised_spec,
    read_text_block,
)
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
def test_any_columns_come_back_aligned_largest_items_first(
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


TEXT_SPEC = TextSpec(
    tokens=(Column(name="tokens", dtype="F32", shape=(3,)), Column(name="second", dtype="F16", shape=(2,))),
    fixed=(Column(name="pooled", dtype="F32", shape=(4,)),),
)


def caption(n: int, length: int) -> Caption:
    random = np.random.default_rng(n)
    tokens = {"tokens": random.normal(size=(length, 3)).astype("<f4"), "second": random.normal(size=(length, 2)).astype("<f2")}
    return make_caption(TEXT_SPEC, caption_digest(str(n)), tokens, {"pooled": random.normal(size=4).astype("<f4")})


@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=12), first_row=st.integers(0, 1 << 32))
@settings(max_examples=80)
def test_ragged_captions_come_back_as_they_were(lengths: list[int], first_row: int) -> None:
    captions = [caption(n, length) for n, length in enumerate(lengths)]
    block = encode_text_block(TEXT_SPEC, captions, first_row)
    assert len(block) == TEXT_SPEC.block_bytes(len(lengths), sum(lengths))
    begin = {tensor.name: tensor.begin for tensor in TEXT_SPEC.tensors(len(lengths), sum(lengths))}
    for column in (*TEXT_SPEC.tokens, *TEXT_SPEC.fixed):
        assert (TEXT_SPEC.header_bytes + begin[column.name]) % column.item_bytes == 0
    read = read_text_block(TEXT_SPEC, block, "x")
    assert (read.first_row, read.bad(), np.diff(read.starts).tolist()) == (first_row, [], lengths)
    for n, own in enumerate(captions):
        assert dict(read.parts(n)) == {**own.fixed, **own.tokens, DIGEST: own.digest}


def test_the_safetensors_package_reads_a_text_block() -> None:
    captions = [caption(n, length) for n, length in enumerate([2, 0, 5])]
    found = read_with_safetensors(encode_text_block(TEXT_SPEC, captions, 0))
    assert np.frombuffer(found["starts"]["data"], "<i8").tolist() == [0, 2, 2, 7]
    assert found["tokens"]["shape"] == [7, 3]
    assert found["second"]["shape"] == [7, 2]
    assert found["pooled"]["shape"] == [3, 4]
    assert bytes(found["tokens"]["data"]) == b"".join(c.tokens["tokens"] for c in captions)
    assert bytes(found["digest"]["data"]) == b"".join(c.digest for c in captions)


def test_damage_to_a_caption_is_found_whichever_byte_it_is() -> None:
    block = encode_text_block(TEXT_SPEC, [caption(n, length) for n, length in enumerate([2, 0, 3])], 0)
    for at in range(TEXT_SPEC.header_bytes, len(block)):
        damaged = bytearray(block)
        damaged[at] ^= 0x20
        try:
            assert len(read_text_block(TEXT_SPEC, bytes(damaged), "x").bad()) == 1
        except CorruptError as error:
            assert "`starts`" in str(error)  # noqa: PT017 - either way of noticing is right


@pytest.mark.parametrize("starts", [[1, 2, 5], [0, 6, 5], [0, 2, 4], [0, -1, 5], [0, 2, 1 << 60]])
def test_starts_that_do_not_run_from_nothing_to_all_tokens_are_refused(starts: list[int]) -> None:
    block = bytearray(encode_text_block(TEXT_SPEC, [caption(0, 2), caption(1, 3)], 0))
    block[TEXT_SPEC.header_bytes : TEXT_SPEC.header_bytes + 24] = np.array(starts, "<i8").tobytes()
    with pytest.raises(CorruptError, match=r"block 7: `starts` does not run from 0 to its 5 tokens"):
        read_text_block(TEXT_SPEC, bytes(block), "block 7")


@pytest.mark.parametrize("length", [0, 8, 64, -1, -64])
def test_a_text_block_cut_short_is_refused(length: int) -> None:
    block = encode_text_block(TEXT_SPEC, [caption(0, 2)], 0)
    with pytest.raises(CorruptError, match=r"^block 7: "):
        read_text_block(TEXT_SPEC, block[:length], "block 7")


def test_a_text_block_of_another_encoder_is_refused() -> None:
    other = TextSpec(tokens=(Column(name="tokens", dtype="F32", shape=(4,)),))
    tokens = {"tokens": np.zeros((2, 4), "<f4")}
    block = encode_text_block(other, [make_caption(other, bytes(16), tokens, {})], 0)
    with pytest.raises(CorruptError, match=r"not that of a text block of this store"):
        read_text_block(TEXT_SPEC, block, "x")


def test_token_columns_of_different_lengths_are_refused() -> None:
    tokens = {"tokens": np.zeros((2, 3), "<f4"), "second": np.zeros((3, 2), "<f2")}
    with pytest.raises(ValueError, match=r"text column 'tokens' takes F32 \[3, 3\], got float32 \[2, 3\]"):
        make_caption(TEXT_SPEC, bytes(16), tokens, {"pooled": np.zeros(4, "<f4")})


def file_of(entries: object, data: bytes = b"", room: int | None = None) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return (len(text) if room is None else room).to_bytes(8, "little") + text + data


def entry(begin: int, end: int) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}


def changed(**one: object) -> bytes:
    return file_of({"a": {**entry(0, 4), **one}}, bytes(4))


OFFSETS = [[-4, 0], [4, 0], [0, 1 << 62], [0.0, 4], ["0", "4"], [True, 4], [0], [0, 4, 8], None, 4]
SHAPES = [[3], [5], [2, 3], [4, 0], [1 << 40, 1 << 20], [-4], [4.0], ["4"], [None], [True], 4, None, {"a": 1}, "4"]
TEXTS = [b"", b"{", b"nonsense", b"\xff\xfe", b"[]", b"4", b"null", b'"text"', b"{}{}", b'{"a": 1}']
DEEP = [b"[" * 200_000, b'{"a":' * 100_000, b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"]
REFUSED: list[tuple[bytes, str]] = [
    *((bytes(length), f"{length} bytes are too few") for length in range(8)),
    *((file_of(b"", room=room), f"claims {room} bytes") for room in (1, 100, 1 << 20, (1 << 20) + 1, 1 << 40, (1 << 64) - 1)),
    (file_of(b"{}" + b" " * (1 << 20)), "claims 1048578 bytes"),  # though the file has them
    (file_of({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)), "'b' claims bytes 4 to 12, expected 8 to 16"),
    (file_of({"a": entry(0, 8), "b": entry(0, 8)}, bytes(8)), "claims bytes 0 to 8, expected 8 to 16"),
    (file_of({"a": entry(0, 4), "b": entry(8, 12)}, bytes(12)), "'b' claims bytes 8 to 12, expected 4 to 8"),
    (file_of({"a": entry(4, 8)}, bytes(8)), "'a' claims bytes 4 to 8, expected 0 to 4"),
    *((data := file_of({"a": entry(0, 8)}, bytes(size)), f"it has {len(data)}") for size in (0, 7, 9, 100)),
    *((changed(data_offsets=one), "") for one in OFFSETS),
    *((changed(shape=one), "tensor 'a'" if n < 5 else "") for n, one in enumerate(SHAPES)),
    *((changed(dtype=one), "") for one in ("U128", "", None, 8, ["U8"], "u8", "float16")),
    *((file_of(text), "") for text in TEXTS),
    *((file_of({"__metadata__": one}), "") for one in ("text", 4, ["a"])),
    *((file_of(text), "is not a safetensors header") for text in DEEP),
    (file_of(b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}'), ""),
]


@pytest.mark.parametrize(("data", "words"), REFUSED, ids=lambda one: repr(one)[:40])
def test_a_header_that_lies_is_refused_with_the_item_named(data: bytes, words: str) -> None:
    with pytest.raises(CorruptError, match=f"^shard x: .*{re.escape(words)}"):
        read_header(data, len(data), "shard x")


def test_a_file_of_the_safetensors_package_is_read() -> None:
    data = save({"b": np.arange(6, dtype="<i4").reshape(2, 3), "a": np.ones(3, "<f2")}, metadata={"k": "v"})
    tensors, metadata, header_bytes = read_header(data, len(data), "x")
    assert metadata == {"k": "v"}
    assert [(t.name, t.dtype, t.shape) for t in tensors] == [("b", "I32", (2, 3)), ("a", "F16", (3,))]
    assert data[header_bytes:][tensors[0].begin : tensors[0].end] == np.arange(6, dtype="<i4").tobytes()


def test_a_header_is_padded_to_the_length_asked_for_and_read_by_the_safetensors_package() -> None:
    tensors = lay_out([("a", "U64", (3,)), ("b", "U8", (2, 5))])
    room = header_bytes_for(tensors, {"format": "x"})
    assert room % HEADER_ALIGN_BYTES == 0
    for header_bytes in (room, room + 64, room + 4096):
        data = write_header(tensors, {"format": "x"}, header_bytes) + bytes(34)
        assert len(data) == header_bytes + 34
        assert {name: value["shape"] for name, value in read_with_safetensors(data).items()} == {"a": [3], "b": [2, 5]}


def test_a_header_that_does_not_fit_its_length_is_never_written() -> None:
    tensors = lay_out([("a", "U64", (3,))])
    with pytest.raises(AssertionError, match="does not fit"):
        write_header(tensors, {"format": "x" * 100}, 64)


def test_only_the_head_of_a_file_is_needed() -> None:
    data = file_of({"a": entry(0, 1 << 30)})
    tensors, _, _ = read_header(data, len(data) + (1 << 30), "x")
    assert tensors[0].num_bytes == 1 << 30


F16_MAX = 65504.0
ANY_VALUE = st.floats(-F16_MAX, F16_MAX, width=32)
TOKENS = arrays.arrays(np.float32, st.tuples(st.integers(0, 5), st.sampled_from([1, 31, 32, 33, 64, 100])), elements=ANY_VALUE)


def random_tokens(num_tokens: int, width: int, scale: float = 1.0) -> NDArray[np.float32]:
    return (np.random.default_rng(width).normal(size=(num_tokens, width)) * scale).astype("<f4")


@settings(max_examples=60)
@given(tokens=TOKENS)
def test_no_value_of_i8_is_off_by_more_than_half_its_groups_scale(tokens: NDArray[np.float32]) -> None:
    stored = quantise(tokens, "I8")
    scale = np.repeat(stored["tokens_scale"].astype(np.float64), 32, axis=1)[:, : tokens.shape[1]]
    exact = stored["tokens"].astype(np.float64) * scale
    assert (np.abs(exact - tokens) <= scale / 2 * (1 + 2.0**-15)).all()
    assert (np.abs(stored["tokens"].astype(int)) <= 127).all()
    found = dequantise(stored)
    assert found.dtype == np.float16
    assert np.isfinite(found).all()
    assert found.tobytes() == exact.astype(np.float32).astype(np.float16).tobytes()
    assert not found[tokens == 0].any()


@given(tokens=TOKENS)
@settings(max_examples=60)
def test_a_scale_of_i8_is_the_smallest_that_reaches_the_largest_value(tokens: NDArray[np.float32]) -> None:
    scales = quantise(tokens, "I8")["tokens_scale"].astype(np.float64)
    for n in range(scales.shape[1]):
        largest = np.abs(tokens[:, 32 * n : 32 * n + 32]).max(axis=1, initial=0.0).astype(np.float64)
        below = np.nextafter(scales[:, n].astype(np.float16), np.float16(0)).astype(np.float64)
        reaches = scales[:, n] * 127 >= largest * (1 - 2.0**-23)
        assert (reaches | (scales[:, n] == 515.5)).all()
        assert ((below * 127 < largest) | (scales[:, n] == 0)).all()


@given(tokens=TOKENS)
@settings(max_examples=60)
def test_no_value_of_f8_is_off_by_more_than_a_sixteenth_or_half_a_step(tokens: NDArray[np.float32]) -> None:
    stored = quantise(tokens, "F8_E4M3")
    scale = stored["tokens_scale"].astype(np.float64)
    exact = e4m3_values()[stored["tokens"]].astype(np.float64) * scale
    assert (np.abs(exact - tokens) <= np.maximum(np.abs(tokens) / 16, scale * 2.0**-10) * (1 + 1e-5) + 1e-38).all()
    found = dequantise(stored)
    assert np.isfinite(found).all()
    assert not found[tokens == 0].any()


@pytest.mark.parametrize("dtype", ["I8", "F8_E4M3"])
def test_no_value_becomes_infinite_between_the_largest_of_f16_and_what_rounds_to_it(dtype: str) -> None:
    values = np.arange(65500, 65520, 2.0**-8, dtype=np.float32)
    tokens = np.repeat(values, 32).reshape(-1, 32)
    tokens.flags.writeable = False
    assert dequantise(quantise(tokens, dtype)).max() <= 65504


@pytest.mark.parametrize("dtype", ["I8", "F8_E4M3"])
@pytest.mark.parametrize("magnitude", [1e-44, 1e-38, 6e-8, 1e-6, 0.007, 1.0, 65504.0])
def test_extreme_magnitudes_are_held_as_well_as_f16_holds_them(dtype: str, magnitude: float) -> None:
    tokens = np.full((1, 64), magnitude, dtype=np.float32)
    tokens[0, ::2] *= -1
    found = dequantise(quantise(tokens, dtype)).astype(np.float64)
    assert np.abs(found - tokens).max() <= max(magnitude * 2.0**-8, 2.0**-24)


@pytest.mark.parametrize("dtype", ["I8", "F8_E4M3"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 65520.0, -1e30])
def test_what_f16_does_not_hold_is_refused(dtype: str, value: float) -> None:
    tokens = np.ones((2, 40), dtype=np.float32)
    tokens[1, 39] = value
    with pytest.raises(ValueError, match=f"NaN, infinite or beyond ±65504, which {dtype} does not hold"):
        quantise(tokens, dtype)


@pytest.mark.parametrize("dtype", ["I8", "F8_E4M3"])
def test_what_is_quantised_can_be_stored_and_what_no_value_becomes_cannot(dtype: str) -> None:
    columns = quantise(np.concatenate([random_tokens(5, 40, 6e4 / 8).clip(-65504, 65504), np.zeros((1, 40), "f4")]), dtype)
    tokens, scale = columns["tokens"], columns["tokens_scale"]
    assert is_storable(tokens, scale).all()
    for value in (np.nan, np.inf, -1, 1.001 * scale.dtype.type(515.5 if dtype == "I8" else 65504 / 448)):
        strange = scale.copy()
        strange[2, 0] = value
        assert is_storable(tokens, strange).tolist() == [True, True, False, True, True, True]
    strange = tokens.copy()
    strange[4, 7] = -128 if dtype == "I8" else 0xFF
    assert is_storable(strange, scale).tolist() == [True, True, True, True, False, True]


def test_e4m3_rounds_as_torch_does() -> None:
    random = np.random.default_rng(0)
    values = np.concatenate(
        [
            e4m3_values()[np.isfinite(e4m3_values())],
            (random.normal(size=4000) * 10.0 ** random.uniform(-4, 2.5, 4000)).astype("<f4"),
            np.arange(-448, 448, 0.25, dtype="<f4"),
            np.ldexp(np.arange(64), -12).astype("<f4"),
        ]
    ).astype("<f4")
    values = values[np.abs(values) <= 448]
    expected = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    found = as_e4m3(values)
    assert np.array_equal(found & 0x7F, expected & 0x7F)
    delivered_by_torch = torch.from_numpy(expected).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(e4m3_values()[found], delivered_by_torch)
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(e4m3_values(), every, equal_nan=True)


def test_a_caption_comes_back_as_it_is_delivered() -> None:
    spec = quantised_spec("I8", 40, (Column(name="pooled", dtype="F16", shape=(3,)),))
    assert [column.name for column in (*spec.fixed, *spec.tokens)] == ["pooled", "tokens", "tokens_scale"]
    shown = [(column.name, column.dtype) for column in (*spec.delivered.fixed, *spec.delivered.tokens)]
    assert shown == [("pooled", "F16"), ("tokens", "F16")]
    tokens, pooled = random_tokens(6, 40), np.arange(3, dtype="<f2")
    caption = quantised_caption(spec, caption_digest("a"), tokens, {"pooled": pooled})
    assert caption.num_bytes == 6 * (40 + 2 * 2) + 6
    found = delivered(spec, caption)
    assert found.fixed == {"pooled": pooled.tobytes()}
    assert found.tokens == {"tokens": dequantise(quantise(tokens, "I8")).tobytes()}
    assert caption.error is not None
    assert 0 < float(caption.error[0]) < 0.01


STRANGE: list[list[tuple[str, str, tuple[int, ...]]]] = [
    [("tokens", "I8", (64,)), ("tokens_scale", "F16", (3,))],
    [("tokens", "I8", (64,)), ("tokens_scale", "F32", (2,))],
    [("tokens", "F16", (64,)), ("tokens_scale", "F16", (2,))],
    [("tokens_scale", "F16", (2,))],
    [("more", "F16", (2,)), ("tokens", "I8", (64,)), ("tokens_scale", "F16", (2,))],
]


@pytest.mark.parametrize("columns", STRANGE)
def test_scales_that_do_not_suit_their_tokens_are_refused(columns: list[Any]) -> None:
    from bucketline.store.format.schema import text_entry

    spec = TextSpec(tokens=tuple(Column(name=n, dtype=d, shape=s) for n, d, s in columns))
    with pytest.raises(ValueError, match="tokens_scale takes tokens of I8 or F8_E4M3"):
        text_entry(spec)


def test_the_error_of_a_caption_is_relative_worst_token_and_worst_channel() -> None:
    tokens = np.zeros((3, 4), dtype="<f4")
    tokens[0], tokens[1, 1] = [3, 0, 0, 4], 5
    found = tokens.astype("<f2")
    assert measured_error(tokens, found).tolist() == [0, 1, 0]
    found[1] = [0, 4, 3, 0]
    relative, cosine, channel = measured_error(tokens, found).tolist()
    assert relative == pytest.approx(np.sqrt((1 + 9) / 50))
    assert cosine == pytest.approx(0.8)
    assert channel == pytest.approx(np.sqrt(9 / 12.5))  # channel 2 has nothing of its own: relative to the median of 9 and 16
    found[1] = [0, 4, 0, 0]
    assert measured_error(tokens, found)[2] == pytest.approx(1 / 5)


def test_errors_of_shards_are_joined_by_their_captions() -> None:
    one = TextError.of(np.array([[0.01, 0.99, 0.1], [0.03, 0.97, 0.3]], dtype="<f4"))
    two = TextError.of(np.array([[0.08, 0.90, 0.2]], dtype="<f4"))
    both = TextError.joined([one, two])
    assert both is not None
    assert (both.captions, both.relative_max, both.cosine_min, both.channel_max) == pytest.approx((3, 0.08, 0.9, 0.3))
    assert both.relative_mean == pytest.approx(0.04)
    assert TextError.joined([None, one, None]) == one
    assert TextError.joined([]) is TextError.joined([None]) is None
