"""Blocks of ragged entries: N of them, their tokens concatenated, as one safetensors file.

The captions' embeddings are such entries, and so are those of a store's ragged groups, which have names.
Shape letters: N entries in a block, T tokens of all of them together, D a token's width.
All token columns are ragged with the same lengths; entry n has the tokens `starts[n]` to `starts[n + 1]` of the block.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.errors import CorruptError
from bucketline.forks import cached_property
from bucketline.store.format.block import CHECKSUM, MAX_ROWS, Column, as_row
from bucketline.store.format.columns import RAGGED_PREFIX, TOKENS, TOKENS_SCALE, EntriesOf
from bucketline.store.format.hashing import DIGEST_BYTES, checksum
from bucketline.store.format.safetensors_header import Tensor, header_bytes_for, lay_out, read_header, write_header
from bucketline.store.format.text_codec import DELIVERED, dequantise, measured_error, quantise, quantised_columns

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

TEXT_GROUP = "text"  # the captions' group name in manifest, extents and keys
EMPTY_CAPTION_ROW = 0  # the first caption of every shard is the empty one
STARTS, DIGEST = "starts", "digest"
TEXT_FORMAT, RAGGED_FORMAT = "bucketline.text/1", "bucketline.ragged/1"
_MAX_TOKENS = 1 << 40


def is_bucket(group: str) -> bool:
    """Return True if a group of a shard's blocks is a bucket, not the captions or a ragged group."""
    return group != TEXT_GROUP and not group.startswith(RAGGED_PREFIX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One entry of a group, copied from the caller's arrays: a caption's embedding, or what a ragged group has of a row."""

    digest: bytes  # 16 bytes: of the caption's text, or of the entry's own bytes as `content_digest` returns
    num_tokens: int
    tokens: dict[str, bytes]  # per token column, [num_tokens, *shape]
    fixed: dict[str, bytes]  # per fixed column, [*shape]
    error: NDArray[np.float32] | None = field(default=None, compare=False)  # [3]; of tokens that were just quantised

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.tokens.values())) + sum(map(len, self.fixed.values()))


Caption = Entry  # of the captions


@dataclass(frozen=True, kw_only=True)
class RaggedSpec:
    """The columns of a group's blocks: token columns (a token's shape) and fixed columns (an entry's shape).

    The captions' embeddings are the group `text`; of these, the public name is `TextSpec`.
    """

    tokens: tuple[Column, ...]
    fixed: tuple[Column, ...] = ()
    group: str = TEXT_GROUP  # or `ragged/NAME`
    of: EntriesOf = EntriesOf.CAPTIONS
    stored_once: bool = True  # whether equal entries are stored once per shard
    optional: bool = False  # whether rows may lack an entry

    def __post_init__(self) -> None:
        for name in ("tokens", "fixed"):  # in the order in which a manifest lists them
            object.__setattr__(self, name, tuple(sorted(getattr(self, name), key=lambda column: column.name)))

    @property
    def label(self) -> str:
        """How messages call an entry: `caption`, or `audio` of the group `ragged/audio`."""
        return "caption" if self.group == TEXT_GROUP else f"{self.group.removeprefix(RAGGED_PREFIX)} entry"

    @cached_property
    def is_quantised(self) -> bool:
        """Return True if these are captions whose `tokens` are integers or 8-bit floats with scales; see `text_codec`."""
        return self.group == TEXT_GROUP and any(column.name == TOKENS_SCALE for column in self.tokens)

    @cached_property
    def delivered(self) -> RaggedSpec:
        """Return the columns as readers get them: quantised tokens as F16, without scales."""
        if not self.is_quantised:
            return self
        tokens = Column(name=TOKENS, dtype=DELIVERED, shape=self.tokens[0].shape)
        return RaggedSpec(tokens=(tokens,), fixed=self.fixed)

    @cached_property
    def header_bytes(self) -> int:
        return header_bytes_for(lay_out(self._shapes(MAX_ROWS, _MAX_TOKENS)), self._metadata(MAX_ROWS))

    @cached_property
    def token_bytes(self) -> int:
        return sum(column.row_bytes for column in self.tokens)

    @cached_property
    def fixed_bytes(self) -> int:
        """Bytes of an entry's fixed columns."""
        return sum(column.row_bytes for column in self.fixed)

    @cached_property
    def entry_bytes(self) -> int:
        """Bytes per entry, excluding its tokens and the block's one extra `starts`."""
        return 8 + 8 + DIGEST_BYTES + self.fixed_bytes

    def block_bytes(self, num_entries: int, num_tokens: int) -> int:
        return self.header_bytes + 8 + num_entries * self.entry_bytes + num_tokens * self.token_bytes

    def num_tokens(self, num_entries: int, block_bytes: int) -> int:
        """Return T, the number of tokens, from a block's length."""
        return (block_bytes - self.block_bytes(num_entries, 0)) // self.token_bytes

    def tensors(self, num_entries: int, num_tokens: int) -> list[Tensor]:
        """Return a block's tensors; offsets count from the end of the header."""
        return lay_out(self._shapes(num_entries, num_tokens))

    def _shapes(self, num_entries: int, num_tokens: int) -> list[tuple[str, str, tuple[int, ...]]]:
        return [
            (STARTS, "I64", (num_entries + 1,)),
            (CHECKSUM, "U64", (num_entries,)),
            *((column.name, column.dtype, (num_entries, *column.shape)) for column in self.fixed),
            *((column.name, column.dtype, (num_tokens, *column.shape)) for column in self.tokens),
            (DIGEST, "U8", (num_entries, DIGEST_BYTES)),
        ]

    def _metadata(self, first_row: int) -> dict[str, str]:
        if self.group == TEXT_GROUP:
            return {"format": TEXT_FORMAT, "first_row": str(first_row)}
        return {"format": RAGGED_FORMAT, "group": self.group.removeprefix(RAGGED_PREFIX), "first_row": str(first_row)}


TextSpec = RaggedSpec  # of the captions


def quantised_spec(dtype: str, width: int, fixed: Sequence[Column] = ()) -> TextSpec:
    """Return the text columns of a store whose tokens `[width]` are quantised to `dtype`, I8 or F8_E4M3."""
    return TextSpec(tokens=quantised_columns(dtype, width), fixed=tuple(fixed))


def make_caption(
    spec: RaggedSpec, digest: bytes | None, tokens: Mapping[str, NDArray[Any]], fixed: Mapping[str, NDArray[Any]]
) -> Entry:
    """Return a copy of one caption's embedding, or of another group's entry, checked against the group's columns.

    `digest`: None for an entry that is known by its content.
    """
    what = "text column" if spec.group == TEXT_GROUP else f"column of {spec.group.removeprefix(RAGGED_PREFIX)!r},"
    num_tokens = len(tokens[spec.tokens[0].name])
    for column, value, shape in [
        *((column, tokens[column.name], (num_tokens, *column.shape)) for column in spec.tokens),
        *((column, fixed[column.name], column.shape) for column in spec.fixed),
    ]:
        if value.shape != shape or value.dtype != column.numpy_dtype:
            raise ValueError(
                f"{what} {column.name!r} takes {column.dtype} {list(shape)}, got {value.dtype} {list(value.shape)}"
            )
    own_tokens = {column.name: tokens[column.name].tobytes() for column in spec.tokens}
    own_fixed = {column.name: fixed[column.name].tobytes() for column in spec.fixed}
    if digest is None:
        digest = content_digest(num_tokens, *own_fixed.values(), *own_tokens.values())
    return Entry(digest=digest, num_tokens=num_tokens, tokens=own_tokens, fixed=own_fixed)


def quantised_caption(spec: TextSpec, digest: bytes, tokens: NDArray[np.float32], fixed: Mapping[str, NDArray[Any]]) -> Caption:
    """Return a caption with its tokens, `[T, D]`, quantised, and the error that this makes."""
    columns = quantise(tokens, spec.tokens[0].dtype)
    error = measured_error(tokens, dequantise(columns))
    return replace(make_caption(spec, digest, columns, fixed), error=error)


def content_digest(num_tokens: int, *columns: bytes) -> bytes:
    """Return the 16-byte digest of an entry of rows: of its number of tokens, then its columns' bytes in file order."""
    state = hashlib.blake2b(num_tokens.to_bytes(8, "little"), digest_size=DIGEST_BYTES)
    for column in columns:
        state.update(column)
    return state.digest()


def as_arrays(spec: RaggedSpec, entry: Entry) -> dict[str, NDArray[Any]]:
    """Return an entry's columns as arrays: token columns `[T, …]`, fixed columns in their shape."""
    found = {c.name: np.frombuffer(entry.tokens[c.name], dtype=c.numpy_dtype).reshape(-1, *c.shape) for c in spec.tokens}
    for c in spec.fixed:
        found[c.name] = np.frombuffer(entry.fixed[c.name], dtype=c.numpy_dtype).reshape(c.shape)
    return found


def delivered(spec: TextSpec, caption: Caption) -> Caption:
    """Return a stored caption with the columns of `spec.delivered`."""
    if not spec.is_quantised:
        return caption
    stored = {
        column.name: np.frombuffer(caption.tokens[column.name], dtype=column.numpy_dtype).reshape(-1, *column.shape)
        for column in spec.tokens
    }
    return Caption(
        digest=caption.digest,
        num_tokens=caption.num_tokens,
        tokens={TOKENS: dequantise(stored).tobytes()},
        fixed=caption.fixed,
    )


def encode_text_block(spec: RaggedSpec, captions: Sequence[Entry], first_row: int) -> bytes:
    """Return captions, or another group's entries, packed into one block, after checking its length."""
    starts = np.cumsum([0, *(caption.num_tokens for caption in captions)], dtype="<i8")
    shapes = spec._shapes(len(captions), int(starts[-1]))
    block = b"".join(
        [
            write_header(lay_out(shapes), spec._metadata(first_row), spec.header_bytes),
            starts.tobytes(),
            np.array([caption_checksum(spec, caption) for caption in captions], dtype="<u8").tobytes(),
            *(caption.fixed[column.name] for column in spec.fixed for caption in captions),
            *(caption.tokens[column.name] for column in spec.tokens for caption in captions),
            *(caption.digest for caption in captions),
        ]
    )
    expected = spec.block_bytes(len(captions), int(starts[-1]))
    if len(block) != expected:
        raise AssertionError(f"a block of {len(captions)} captions has {len(block)} bytes, expected {expected}")
    return block


def caption_checksum(spec: RaggedSpec, caption: Entry) -> int:
    """Return an entry's checksum: over its fixed columns, its tokens and its digest, in file order."""
    return checksum(
        *(caption.fixed[column.name] for column in spec.fixed),
        *(caption.tokens[column.name] for column in spec.tokens),
        caption.digest,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TextBlock:
    """A block's tensors as views of its bytes, with header and `starts` checked."""

    spec: RaggedSpec
    first_row: int
    starts: NDArray[np.int64]  # [N + 1]
    checksums: NDArray[np.uint64]  # [N]
    columns: dict[str, memoryview]  # bytes by name: the fixed columns, the token columns and the digests

    def __len__(self) -> int:
        return len(self.checksums)

    def parts(self, n: int) -> list[tuple[str, memoryview]]:
        """Return the bytes of caption n by column, in file order."""
        begin, end = self.starts[n : n + 2].tolist()
        return [
            *((c.name, self.columns[c.name][c.row_bytes * n : c.row_bytes * (n + 1)]) for c in self.spec.fixed),
            *((c.name, self.columns[c.name][c.row_bytes * begin : c.row_bytes * end]) for c in self.spec.tokens),
            (DIGEST, self.columns[DIGEST][DIGEST_BYTES * n : DIGEST_BYTES * (n + 1)]),
        ]

    def bad(self) -> list[int]:
        """Return the indices of captions whose bytes do not match their checksum."""
        stored = self.checksums.tolist()
        return [n for n, expected in enumerate(stored) if checksum(*(part for _, part in self.parts(n))) != expected]


def read_text_block(spec: RaggedSpec, block: bytes | memoryview, item: str) -> TextBlock:
    """Return the tensors of a text block, or another group's, as views of its bytes."""
    tensors, metadata, header_bytes = read_header(block, len(block), item)
    by_name = {tensor.name: tensor for tensor in tensors}
    first_row = metadata.get("first_row", "")
    num_captions = by_name[CHECKSUM].num_bytes // 8 if CHECKSUM in by_name else -1
    num_tokens = spec.num_tokens(num_captions, len(block))
    found = [(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors]
    expected = spec._shapes(num_captions, num_tokens) if min(num_captions, num_tokens) >= 0 else None
    if header_bytes != spec.header_bytes or found != expected or metadata != spec._metadata(as_row(first_row)):
        kind = "a text block" if spec.group == TEXT_GROUP else f"a block of {spec.group}"
        raise CorruptError(f"{item}: its header is not that of {kind} of this store")
    data = memoryview(block)[header_bytes:]
    columns = {t.name: data[t.begin : t.end] for t in tensors}
    starts = np.frombuffer(columns.pop(STARTS), dtype="<i8")
    if int(starts[0]) != 0 or int(starts[-1]) != num_tokens or bool((starts[1:] < starts[:-1]).any()):
        raise CorruptError(f"{item}: `starts` does not run from 0 to its {num_tokens} tokens")
    return TextBlock(
        spec=spec,
        first_row=int(first_row),
        starts=starts,
        checksums=np.frombuffer(columns.pop(CHECKSUM), dtype="<u8"),
        columns=columns,
    )
