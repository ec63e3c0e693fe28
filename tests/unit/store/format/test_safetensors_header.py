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
    with pytest.raises(CorruptError, match=r"^shard x: ") as error:
        read_header(data, len(data), "shard x")
    assert words in str(error.value)


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
