"""The bounds of a header: each way in which it can lie is refused, with the item named."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from bucketline.errors import CorruptError
from bucketline.store.format.safetensors_header import HEADER_ALIGN_BYTES, header_bytes_for, lay_out, read_header, write_header
from tests.kit import read_with_safetensors


def file_of(entries: object, data: bytes = b"", room: int | None = None) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return (len(text) if room is None else room).to_bytes(8, "little") + text + data


def entry(begin: int, end: int, dtype: str = "U8", shape: tuple[int, ...] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape or (end - begin,)), "data_offsets": [begin, end]}


def refused(data: bytes, *words: str) -> None:
    with pytest.raises(CorruptError) as error:
        read_header(data, len(data), "shard x")
    assert str(error.value).startswith("shard x: ")
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("length", range(8))
def test_a_file_too_short_for_a_length_is_refused(length: int) -> None:
    refused(bytes(length), f"{length} bytes are too few")


@pytest.mark.parametrize("room", [1, 100, 1 << 20, (1 << 20) + 1, 1 << 40, (1 << 64) - 1])
def test_a_header_longer_than_the_file_is_refused(room: int) -> None:
    refused(file_of(b"", room=room), f"claims {room} bytes")


def test_a_header_longer_than_any_of_ours_is_refused_though_the_file_has_it() -> None:
    refused(file_of(b"{}" + b" " * (1 << 20)), "claims 1048578 bytes")


def test_tensors_that_overlap_are_refused() -> None:
    refused(file_of({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)), "tensor 'b' claims bytes 4 to 12, expected 8 to 16")


def test_two_tensors_over_the_same_bytes_are_refused() -> None:
    refused(file_of({"a": entry(0, 8), "b": entry(0, 8)}, bytes(8)), "claims bytes 0 to 8, expected 8 to 16")


def test_a_hole_between_tensors_is_refused() -> None:
    refused(file_of({"a": entry(0, 4), "b": entry(8, 12)}, bytes(12)), "tensor 'b' claims bytes 8 to 12, expected 4 to 8")


def test_a_hole_before_the_first_tensor_is_refused() -> None:
    refused(file_of({"a": entry(4, 8)}, bytes(8)), "tensor 'a' claims bytes 4 to 8, expected 0 to 4")


@pytest.mark.parametrize("data", [b"", bytes(7), bytes(9), bytes(100)])
def test_a_file_longer_or_shorter_than_its_header_says_is_refused(data: bytes) -> None:
    refused(file_of({"a": entry(0, 8)}, data), "describes", f"it has {len(file_of({'a': entry(0, 8)}, data))}")


@pytest.mark.parametrize("shape", [(3,), (5,), (2, 3), (4, 0), (1 << 40, 1 << 20)])
def test_a_shape_that_does_not_fill_its_bytes_is_refused(shape: tuple[int, ...]) -> None:
    refused(file_of({"a": entry(0, 4, shape=shape)}, bytes(4)), "tensor 'a'")


@pytest.mark.parametrize("begin_end", [[-4, 0], [4, 0], [0, 1 << 62], [0.0, 4], ["0", "4"], [True, 4], [0], [0, 4, 8], None, 4])
def test_offsets_that_are_no_offsets_are_refused(begin_end: object) -> None:
    refused(file_of({"a": {"dtype": "U8", "shape": [4], "data_offsets": begin_end}}, bytes(4)))


@pytest.mark.parametrize("shape", [[-4], [4.0], ["4"], [None], [True], 4, None, {"a": 1}, "4"])
def test_shapes_that_are_no_shapes_are_refused(shape: object) -> None:
    refused(file_of({"a": {"dtype": "U8", "shape": shape, "data_offsets": [0, 4]}}, bytes(4)))


@pytest.mark.parametrize("dtype", ["U128", "", None, 8, ["U8"], "u8", "float16"])
def test_dtypes_that_are_no_dtypes_are_refused(dtype: object) -> None:
    refused(file_of({"a": {"dtype": dtype, "shape": [4], "data_offsets": [0, 4]}}, bytes(4)))


@pytest.mark.parametrize("text", [b"", b"{", b"nonsense", b"\xff\xfe", b"[]", b"4", b"null", b'"text"', b"{}{}", b'{"a": 1}'])
def test_a_header_that_is_no_json_object_of_tensors_is_refused(text: bytes) -> None:
    refused(file_of(text))


@pytest.mark.parametrize("metadata", ["text", 4, ["a"]])
def test_metadata_that_is_no_object_is_refused(metadata: object) -> None:
    refused(file_of({"__metadata__": metadata}))


@pytest.mark.parametrize("text", [b"[" * 200_000, b'{"a":' * 100_000, b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"])
def test_json_nested_beyond_reason_is_refused_not_followed(text: bytes) -> None:
    refused(file_of(text), "is not a safetensors header")


def test_numbers_of_thousands_of_digits_are_refused() -> None:
    refused(file_of(b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}'))


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
