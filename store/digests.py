"""The three digests of the format, each for one purpose.

- `identity`: who is it? BLAKE2b, 16 bytes; keys samples by id, captions by text, sources by content.
- `checksum`: are these the bytes that were written? XXH3, 64 bits; one per row and per page.
- `file_digest`: the same for a whole file; XXH3, 128 bits, as hexadecimal.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from pathlib import Path

DIGEST_BYTES = 16
READ_BYTES = 1 << 20


def identity(data: bytes) -> bytes:
    """Give the 16-byte digest that stands for `data` in keys and columns."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def sample_digest(sample_id: str) -> bytes:
    """Give the 16-byte digest of a sample's id (an LMDB key ends at 511 bytes, an id need not)."""
    return identity(sample_id.encode("utf-8", "surrogateescape"))


def caption_digest(caption: str) -> bytes:
    """Give the 16-byte digest of a caption's text."""
    return identity(caption.encode("utf-8", "surrogateescape"))


def checksum(*parts: bytes | memoryview) -> int:
    """Give the 64-bit checksum of the concatenation of `parts`."""
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.intdigest()


def bytes_digest(data: bytes) -> str:
    """Give the digest that `file_digest` gives for a file with this content."""
    return xxhash.xxh3_128_hexdigest(data)


def file_digest(path: Path) -> tuple[int, str]:
    """Read a file once, with plain reads, and give its length in bytes and its digest."""
    state = xxhash.xxh3_128()
    num_bytes = 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(READ_BYTES):
            state.update(chunk)
            num_bytes += len(chunk)
    return num_bytes, state.hexdigest()
