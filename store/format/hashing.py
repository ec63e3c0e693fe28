"""The format's digests, one per purpose.

- `identity`: which item is it? BLAKE2b, 16 bytes; keys samples by id, captions by text, sources by content.
- `checksum`: are these the bytes that were written? XXH3, 64 bits; one per row, per page and per line of a shard's file.
- `file_digest`: the same for a complete file; XXH3, 128 bits, hexadecimal.
- `draw`: which random number belongs to this item? BLAKE2b, 64 bits; for splits, random crops and sampled latents.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import xxhash

from bucketline.files.regular_file import open_regular
from bucketline.option_types import unlike

if TYPE_CHECKING:
    from pathlib import Path

DIGEST_BYTES = 16
READ_BYTES = 1 << 20
LINE_BYTES = 8 << 20  # the pieces of a shard's file that have a checksum each


def text_bytes(text: str) -> bytes:
    """Return the bytes of an id or a caption. Ids are paths, which need not be UTF-8: such bytes are surrogates in the text."""
    return text.encode("utf-8", "surrogateescape")


def draw(key: str, purpose: str, column: str = "") -> int:
    """Return a 64-bit number that depends only on the key (such as a sample id), the purpose and the column."""
    person = f"bucketline.{purpose}".encode()
    return int.from_bytes(
        hashlib.blake2b(text_bytes(key), digest_size=8, key=column.encode(), person=person).digest(), "little"
    )


def identity(data: bytes) -> bytes:
    """Return the 16-byte digest that identifies `data` in keys and columns."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def sample_digest(sample_id: str) -> bytes:
    """Return the 16-byte digest of a sample id (LMDB keys are limited to 511 bytes, ids are not)."""
    if not isinstance(sample_id, str):
        raise unlike("a sample's id", sample_id, "a str, such as 'cats/a.png': give str(…) of it")
    return identity(text_bytes(sample_id))


def caption_digest(caption: str) -> bytes:
    """Return the 16-byte digest of a caption's text."""
    return identity(text_bytes(caption))


def checksum(*parts: bytes | memoryview) -> int:
    """Return the 64-bit checksum of the concatenation of `parts`."""
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.intdigest()


class LineSums:
    """The checksums of a file's lines, 8 MiB each but for the last, while its bytes are passed in order."""

    def __init__(self) -> None:
        self._found: list[int] = []
        self._state, self._room = xxhash.xxh3_64(), LINE_BYTES

    def update(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while rest:
            part, rest = rest[: self._room], rest[self._room :]
            self._state.update(part)
            self._room -= len(part)
            if not self._room:
                self._end_line()

    def finish(self) -> list[int]:
        if self._room < LINE_BYTES:
            self._end_line()
        return self._found

    def _end_line(self) -> None:
        self._found.append(self._state.intdigest())
        self._state, self._room = xxhash.xxh3_64(), LINE_BYTES


def line_sums(path: Path) -> LineSums:
    """Read a file once, unmapped, and return the checksums of its lines."""
    sums = LineSums()
    with open(open_regular(path), "rb", buffering=0) as file:  # noqa: PTH123 - opens a descriptor
        while chunk := file.read(READ_BYTES):
            sums.update(chunk)
    return sums


def bytes_digest(data: bytes | memoryview) -> str:
    """Return the digest that `file_digest` returns for a file with this content."""
    return xxhash.xxh3_128_hexdigest(data)


def file_digest(path: Path) -> tuple[int, str]:
    """Read a file once, unmapped, and return its length in bytes and its digest."""
    state = xxhash.xxh3_128()
    num_bytes = 0
    with open(open_regular(path), "rb", buffering=0) as file:  # noqa: PTH123 - opens a descriptor
        while chunk := file.read(READ_BYTES):
            state.update(chunk)
            num_bytes += len(chunk)
    return num_bytes, state.hexdigest()
