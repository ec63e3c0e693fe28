"""Blocks of rows: K rows of one bucket, stacked column by column, as one safetensors file; names, header, digests.

Shape letters: K rows in a block, at most V captions per sample, C latent channels, h and w the latent's height and width.
All functions are pure; FORMAT.md specifies the byte layout.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash

from bucketline.errors import CorruptError, StoreError
from bucketline.files.paths import open_regular
from bucketline.forks import cached_property
from bucketline.option_value import unlike

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray


# --------------------------------------------------------------------------------------------------------------------- columns
# Names and roles of the columns that encoders fill, which writers write and the loader and trainer read.

LATENT = "latent"  # of an image, [C, h, w]
FLIPPED = "latent_flipped"  # of the horizontally mirrored image
TOKENS = "tokens"  # of a caption, [T, D]
TOKENS_SCALE = "tokens_scale"  # of a caption with quantised tokens, [T, S]; see `text_codec`
POOLED = "pooled"  # the pooled embedding of a caption, [D]
PLAIN_FAMILY = "transformers"  # of captions that are stored as the last hidden state of a model's only text encoder
CLASS_LABELS = "class_labels"  # the token column of a class-conditional store: one token per caption, its class

TARGET = "target"  # the role of what a model learns to make; its column is stored as `latent`
AUDIO = "audio"
REFERENCE_PREFIX = "reference/"  # of the role of an image that the target is made from
REFERENCE_AXIS = re.compile(r"ref[0-9]+_(height|width)_px")  # of a bucket: a side of a reference that has its own size
FLIPPED_SUFFIX = "/flipped"  # of a role: the same of the horizontally mirrored image
ROLE = re.compile(r"(target|mask|audio|(control|reference|features)/(?!flipped\b)[A-Za-z0-9_-]{1,64})(/flipped)?")
PRESENT_PREFIX = "present/"  # of an optional column's name: the column that says which rows have a value
RAGGED_PREFIX = "ragged/"  # of a ragged group's name: its blocks, and the column with the entry of each row
SEEN_IMAGES, SEEN_EMPTY = "seen_images", "seen_empty"  # ragged groups of a text encoder that sees a sample's images
IS_IMAGE = "is_image"  # of a token of `seen_images`: 1 at a position of an image, 0 at the text between them
MASK = "mask"  # the role of a loss mask: 255 counts in full
SAME = "same"  # the `mirrored` of a ragged group whose entries hold for a row and for its mirror image
NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")  # of a ragged group, and of its columns
_STORED = {TARGET: LATENT, TARGET + FLIPPED_SUFFIX: FLIPPED}  # the other roles are the names of their columns
_ROLES = {name: role for role, name in _STORED.items()}


def stored_name(role: str) -> str:
    """Return the name of a role's column in the blocks; a column's name is returned unchanged.

    >>> stored_name("target"), stored_name("control/depth")
    ('latent', 'control/depth')
    """
    return _STORED.get(role, role)


def role_of(name: str) -> str:
    """Return a column's role from its name in the blocks; the inverse of `stored_name`."""
    return _ROLES.get(name, name)


def reference_role(number: int) -> str:
    """Return the role of a sample's reference image, counted from 0, which is also its column's name."""
    return f"{REFERENCE_PREFIX}{number}"


def is_reference(role: str) -> bool:
    """Return True if a role, which is also its column's name, is that of a reference, not of its mirror image."""
    return role.startswith(REFERENCE_PREFIX) and not role.endswith(FLIPPED_SUFFIX)


def references_of(roles: Iterable[str]) -> list[str]:
    """Return those roles that are references', in their order.

    >>> references_of(["target", "reference/10", "reference/9", "reference/9/flipped"])
    ['reference/9', 'reference/10']
    """
    return sorted(filter(is_reference, roles), key=lambda role: (len(role), role))


def reference_axes(number: int) -> tuple[str, str]:
    """Return the names of a bucket's axes with a reference's size, height first; both sizes are 0 for rows without it.

    >>> reference_axes(0)
    ('ref0_height_px', 'ref0_width_px')
    """
    return f"ref{number}_height_px", f"ref{number}_width_px"


def flipped_role(role: str) -> str:
    """Return the role of the mirrored counterpart, with which a row's column is replaced if the row is flipped."""
    return role + FLIPPED_SUFFIX


class EntriesOf(StrEnum):
    """The owners of a ragged group's entries."""

    CAPTIONS = "captions"  # entry n belongs to caption n of the shard
    ROWS = "rows"  # a row's column `ragged/NAME` has the number of its entry


class LatentKind(StrEnum):
    """The output of the VAE that a store holds."""

    MODE = "mode"  # the most likely latent, or the latent of a VAE without a distribution
    SAMPLE = "sample"  # one draw, fixed at packing
    MOMENTS = "moments"  # C means, then C log-variances; the trainer draws from them at every step


# ---------------------------------------------------------------------------------------------------------- safetensors header
# The header of a safetensors file, written at a fixed length and read within bounds.
#
# The `safetensors` package can read these files. It is not used to write, because tensor order and header length must be fixed
# (row addresses are arithmetic), and not to read, because it copies.

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


class Tensor(NamedTuple):
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


_as_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=True).encode  # `json.dumps` would make one for each header


def _json(tensors: Sequence[Tensor], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {METADATA: dict(metadata)}
    for tensor in tensors:
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [tensor.begin, tensor.end],
        }
    return _as_json(entries).encode("ascii")


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
        or {*map(type, numbers)} != {int}
        or not 0 <= min(numbers) <= max(numbers) < 1 << 62
    ):
        raise ValueError(f"tensor {name!r} has an impossible entry")
    return Tensor(name=name, dtype=entry["dtype"], shape=shape, begin=begin, end=end)


# --------------------------------------------------------------------------------------------------------------------- hashing
# The format's digests, one per purpose.
#
# - `identity`: which item is it? BLAKE2b, 16 bytes; keys samples by id, captions by text, sources by content.
# - `checksum`: are these the bytes that were written? XXH3, 64 bits; one per row, per page and per line of a shard's file.
# - `file_digest`: the same for a complete file; XXH3, 128 bits, hexadecimal.
# - `draw`: which random number belongs to this item? BLAKE2b, 64 bits; for splits, random crops and sampled latents.

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


def caption_digest(caption: str, sample: bytes = b"") -> bytes:
    """Return the 16-byte digest of a caption's text; with the digest of a sample's id, of that sample's caption only."""
    return identity(text_bytes(caption) + (b"\0" + sample if sample else b""))


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


class FileSums(LineSums):
    """The checksums of a file's lines, and its length and digest, while its bytes are passed in order."""

    def __init__(self) -> None:
        super().__init__()
        self._whole, self.num_bytes = xxhash.xxh3_128(), 0

    def update(self, data: bytes | memoryview) -> None:
        super().update(data)
        self._whole.update(data)
        self.num_bytes += len(data)

    @property
    def digest(self) -> str:
        return self._whole.hexdigest()


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


# ----------------------------------------------------------------------------------------------------------------------- block

CHECKSUM, CAPTIONS, ORIGINAL_SIZE, CROP, ID = "checksum", "captions", "original_size", "crop", "id"
BLOCK_FORMAT = "bucketline.block/1"
IMAGE_AXES = ("height_px", "width_px")
_JOINED_BYTES = 4096  # rows up to this size are joined to be hashed
_SMALL_BYTES = 256  # columns up to this size are concatenated with a small neighbour before hashing
TARGET_BLOCK_BYTES = 1 << 20
MAX_ROWS = (1 << 32) - 1  # per bucket and shard: index and dropped lists hold 32-bit row numbers


@dataclass(frozen=True, kw_only=True)
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

    @cached_property
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


def make_row(spec: BlockSpec, values: Mapping[str, NDArray[Any] | bytes]) -> Row:
    """Return a copy of one sample's values, checked against the bucket's columns: arrays, or what is packed already."""
    row: Row = {}
    for column in spec.columns:
        if column.name == CHECKSUM:
            continue
        value = values[column.name]
        if not isinstance(value, bytes) and (value.shape != column.shape or value.dtype != column.numpy_dtype):
            raise ValueError(
                f"column {column.name!r} of bucket {spec.bucket} takes {column.dtype} {list(column.shape)}, "
                f"got {value.dtype} {list(value.shape)}"
            )
        row[column.name] = value if isinstance(value, bytes) else value.tobytes()
    return row


def encode_block(spec: BlockSpec, rows: Sequence[Row], first_row: int) -> bytes:
    """Return rows stacked into one block, after checking its length."""
    data: list[bytes] = [write_header(lay_out(spec._shapes(len(rows))), spec._metadata(first_row), spec.header_bytes)]
    for column in spec.columns:
        if column.name == CHECKSUM:
            data.append(np.array([row_checksum(spec, row) for row in rows], dtype="<u8").tobytes())
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
    parts = [row[column.name] for column in spec.columns if column.name != CHECKSUM]
    return xxhash.xxh3_64_intdigest(b"".join(parts)) if spec.row_bytes <= _JOINED_BYTES else checksum(*parts)


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
