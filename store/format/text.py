"""Ragged text: blocks of entries, whose tokens are concatenated, as one safetensors file; and the codec of quantised tokens.

The captions' embeddings are such entries, and so are those of a store's ragged groups, which have names.
Shape letters: N entries in a block, T tokens of all of them together, D a token's width.
All token columns are ragged with the same lengths; entry n has the tokens `starts[n]` to `starts[n + 1]` of the block.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.errors import CorruptError
from bucketline.forks import cached_property
from bucketline.store.format.block import (
    CHECKSUM,
    DIGEST_BYTES,
    MAX_ROWS,
    RAGGED_PREFIX,
    TOKENS,
    TOKENS_SCALE,
    Column,
    EntriesOf,
    Tensor,
    as_row,
    checksum,
    header_bytes_for,
    lay_out,
    read_header,
    write_header,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray


# ------------------------------------------------------------------------------------------------------------------ text codec
# The codec of captions' tokens: stored as I8 or F8_E4M3 with scales, delivered as F16; and the error that this makes.
#
# Shape letters: T tokens, D a token's width, S scales per token, N captions. FORMAT.md has the rules, which give the same bits
# everywhere: all arithmetic is IEEE 754 binary32, rounded half to even.

I8, F8_E4M3 = "I8", "F8_E4M3"
QUANTISED = (I8, F8_E4M3)
DELIVERED = "F16"  # what quantised tokens are delivered as; they have its range
GROUP = 32  # neighbouring values of a token that share a scale in I8
I8_MAX, F8_MAX = 127, 448
_LARGEST_I8_SCALE = np.float16(515.5)  # 127 times the next F16 value rounds to infinity in F16
_SMALLEST_I8_SCALE = np.float32(2.0**-24)  # the smallest F16 value
_LARGEST_F8_SCALE = np.float32(65504 / F8_MAX)  # the largest F16 value stays finite
_SMALLEST_F8_SCALE = np.float32(2.0**-126)  # the smallest normal F32 value


def quantised_columns(dtype: str, width: int) -> tuple[Column, ...]:
    """Return the token columns of quantised tokens: `tokens` [D], and `tokens_scale` [S].

    >>> [(column.name, column.dtype, column.shape) for column in quantised_columns("I8", 4096)]
    [('tokens', 'I8', (4096,)), ('tokens_scale', 'F16', (128,))]
    """
    scale = ("F16", -(-width // GROUP)) if dtype == I8 else ("F32", 1)
    return (
        Column(name=TOKENS, dtype=dtype, shape=(width,)),
        Column(name=TOKENS_SCALE, dtype=scale[0], shape=(scale[1],)),
    )


def refuse_strange_form(token_columns: Sequence[Column]) -> None:
    """Check that the token columns of quantised text are those that the dtype of its tokens needs."""
    tokens = next((column for column in token_columns if column.name == TOKENS), None)
    is_known = tokens is not None and tokens.dtype in QUANTISED and len(tokens.shape) == 1
    expected = quantised_columns(tokens.dtype, tokens.shape[0]) if tokens is not None and is_known else ()
    if tuple(token_columns) != expected:
        raise ValueError(
            f"{TOKENS_SCALE} takes {TOKENS} of {' or '.join(QUANTISED)} [D], with a scale for every {GROUP} values (F16) or "
            "for each token (F32), and no other token column"
        )


def quantise(tokens: NDArray[np.float32], dtype: str) -> dict[str, NDArray[Any]]:
    """Return tokens, `[T, D]`, in their stored columns: `tokens` [T, D] int8, or uint8 for F8_E4M3, and `tokens_scale` [T, S].

    I8: the scale of 32 values is their largest magnitude / 127, rounded up to F16 and at most 515.5; a value is stored as
    value / scale, rounded half to even. F8_E4M3: the scale of a token is its largest magnitude / 448.
    """
    tokens = np.ascontiguousarray(tokens, dtype=np.float32)
    num_tokens, width = tokens.shape
    group = GROUP if dtype == I8 else width
    num_scales = -(-width // group)
    padded = tokens
    if width % group:
        padded = np.zeros((num_tokens, num_scales * group), dtype=np.float32)
        padded[:, :width] = tokens
    values = padded.reshape(num_tokens, num_scales, group)
    largest = np.abs(values).max(axis=2)  # [T, S]; NaN if a value is
    if not bool((largest < 65520).all()):  # what rounds to infinity in F16
        raise ValueError(f"a token is NaN, infinite or beyond ±65504, which {dtype} does not hold")
    scale: NDArray[Any]
    if dtype == I8:
        scale = np.minimum(_rounded_up(_at_least(_SMALLEST_I8_SCALE, largest, I8_MAX)), _LARGEST_I8_SCALE)
    else:
        scale = np.minimum(_at_least(_SMALLEST_F8_SCALE, largest, F8_MAX), _LARGEST_F8_SCALE)
    # values of a group of zeros are zeros, whatever they are divided by
    quotients = values / np.where(scale > 0, scale, 1).astype(np.float32)[:, :, None]
    stored = np.rint(quotients).astype(np.int8) if dtype == I8 else as_e4m3(quotients)
    return {TOKENS: np.ascontiguousarray(stored.reshape(padded.shape)[:, :width]), TOKENS_SCALE: scale}


def dequantise(columns: Mapping[str, NDArray[Any]]) -> NDArray[np.float16]:
    """Return tokens as they are delivered, `[T, D]`: stored times scale, rounded to F16. `columns` as `quantise` returns."""
    stored, scale = columns[TOKENS], columns[TOKENS_SCALE].astype(np.float32)
    num_tokens, width = stored.shape
    values: NDArray[np.float32]
    if stored.dtype != np.int8:
        values = e4m3_values()[stored] * scale
    elif width % GROUP:
        values = stored * np.repeat(scale, GROUP, axis=1)[:, :width]
    else:
        values = (stored.reshape(num_tokens, width // GROUP, GROUP) * scale[:, :, None]).reshape(num_tokens, width)
    return values.astype(np.float16)


def is_storable(tokens: NDArray[Any], scale: NDArray[np.floating[Any]]) -> NDArray[np.bool_]:
    """Return which stored tokens, `[T, D]` with the scales `[T, S]`, are such as `quantise` returns: `[T]`."""
    is_i8 = tokens.dtype == np.int8
    largest = _LARGEST_I8_SCALE if is_i8 else _LARGEST_F8_SCALE
    is_value = tokens.min(axis=1, initial=0) >= -I8_MAX if is_i8 else ((tokens & 0x7F) != 0x7F).all(axis=1)
    found: NDArray[np.bool_] = is_value & ((scale >= 0) & (scale <= largest)).all(axis=1)  # of NaN, neither holds
    return found


def _at_least(smallest: np.float32, largest: NDArray[np.float32], steps: int) -> NDArray[np.float32]:
    """Return the largest magnitudes over `steps`, at least `smallest`, and 0 where all values are 0."""
    scale: NDArray[np.float32] = np.maximum(largest / np.float32(steps), smallest)
    scale[largest == 0] = 0
    return scale


def _rounded_up(values: NDArray[np.float32]) -> NDArray[np.float16]:
    """Return the smallest F16 values that are not below these, which are 0 or more and at most 60,000."""
    rounded = values.astype(np.float16)
    return (rounded.view(np.uint16) + (rounded < values)).astype(np.uint16).view(np.float16)


def as_e4m3(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return finite values as the bits of F8_E4M3 (the kind without infinities), rounded half to even; beyond 448 it is 448.

    >>> as_e4m3(np.array([0, 1, -448, 1e9, 2.0**-9], dtype=np.float32)).tolist()
    [0, 56, 254, 126, 1]
    """
    magnitude = np.minimum(np.abs(values), np.float32(F8_MAX))
    bits = magnitude.view(np.uint32)
    # from 2⁻⁶ on: keep three bits of the mantissa, and change the exponent's bias from 127 to 7
    normal = ((bits + ((bits >> 20) & 1) + 0x7FFFF) >> 20) - ((127 - 7) << 3)
    small = np.rint(magnitude * np.float32(2.0**9))  # below: multiples of 2⁻⁹
    code = np.where(magnitude < np.float32(2.0**-6), small.astype(np.uint32), normal)
    return (code | np.where(np.signbit(values) & (code > 0), 0x80, 0)).astype(np.uint8)


@functools.cache
def e4m3_values() -> NDArray[np.float32]:
    """Return the value of each of the 256 codes of F8_E4M3; the two NaN codes are NaN."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    normal = np.ldexp(1.0 + mantissa / 8, exponent - 7)
    values = np.where(exponent == 0, mantissa * 2.0**-9, normal) * np.where(code & 0x80, -1.0, 1.0)
    values[(code & 0x7F) == 0x7F] = np.nan
    return values.astype(np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextError:
    """The error of the quantised tokens of a shard's captions, or of a store's, measured when they were quantised."""

    captions: int
    relative_mean: float
    relative_max: float
    cosine_mean: float
    cosine_min: float
    channel_mean: float
    channel_max: float

    def __post_init__(self) -> None:
        cosines = [self.cosine_mean, self.cosine_min]
        errors = [self.relative_mean, self.relative_max, self.channel_mean, self.channel_max]
        is_possible = all(-1.0 <= cosine <= 1.0 + 1e-6 for cosine in cosines) and all(0.0 <= error < np.inf for error in errors)
        if not is_possible or self.captions < 1:
            raise ValueError(f"the tokens of {self.captions} captions have the cosines {cosines} and errors {errors}")

    def __str__(self) -> str:
        return (
            f"relative {self.relative_mean:.2%} (at most {self.relative_max:.2%}), "
            f"cosine {self.cosine_mean:.5f} (at least {self.cosine_min:.5f}), "
            f"worst channel {self.channel_mean:.2%} (at most {self.channel_max:.2%})"
        )

    @classmethod
    def of(cls, errors: NDArray[np.float32]) -> TextError:
        """Return the error of captions from what `measured_error` returned of each, `[N, 3]`."""
        relative, cosine, channel = errors.astype(np.float64).T
        return cls(
            captions=len(errors),
            relative_mean=_short(relative.mean()),
            relative_max=_short(relative.max()),
            cosine_mean=_short(cosine.mean()),
            cosine_min=_short(cosine.min()),
            channel_mean=_short(channel.mean()),
            channel_max=_short(channel.max()),
        )

    @classmethod
    def joined(cls, errors: Iterable[TextError | None]) -> TextError | None:
        """Return the error of all captions of which it is known; None if it is known of none."""
        parts = [error for error in errors if error is not None]
        if not parts:
            return None
        count = sum(part.captions for part in parts)

        def mean(name: str) -> float:
            return _short(sum(part.captions * getattr(part, name) for part in parts) / count)

        return cls(
            captions=count,
            relative_mean=mean("relative_mean"),
            relative_max=max(part.relative_max for part in parts),
            cosine_mean=mean("cosine_mean"),
            cosine_min=min(part.cosine_min for part in parts),
            channel_mean=mean("channel_mean"),
            channel_max=max(part.channel_max for part in parts),
        )


def _short(value: float) -> float:
    return float(f"{value:.7g}")


def measured_error(tokens: NDArray[np.float32], delivered: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
    """Return the error of a caption's tokens, `[T, D]`, as three numbers.

    Relative: root mean square of the error over that of the tokens. Cosine: the smallest similarity of a token and what is
    delivered for it. Worst channel: the largest error of one of the D channels, relative to the channel's own values or to the
    median channel's, whichever are larger, so that a channel of nearly nothing does not count. Where all values are zero, the
    errors are 0 and the similarity is 1.
    """
    error = delivered.astype(np.float32) - tokens

    def by_token(one: NDArray[np.float32], two: NDArray[np.float32]) -> NDArray[np.float64]:
        sums: NDArray[np.float64] = np.einsum("td,td->t", one, two).astype(np.float64)
        return sums

    given, change, shared = by_token(tokens, tokens), by_token(error, error), by_token(tokens, error)
    found = np.maximum(given + 2 * shared + change, 0)  # of what is delivered
    lengths, product = np.sqrt(given) + np.sqrt(found), np.sqrt(given * found)
    longer = np.divide(2 * shared + change, lengths, out=np.zeros_like(given), where=lengths > 0)
    # 1 - cosine, of which the difference of two numbers near 1 would leave nothing
    distance = np.divide(change - np.square(longer), 2 * product, out=(given > 0).astype(np.float64), where=product > 0)
    power = np.einsum("td,td->d", tokens, tokens)
    by_channel = _share(np.einsum("td,td->d", error, error), np.maximum(power, np.median(power)))
    relative = _share(change.sum(), given.sum())
    cosine = 1 - distance.clip(0, 2).max(initial=0.0)
    return np.array([relative, cosine, by_channel.max(initial=0.0)], dtype=np.float32)


def _share(error: Any, power: Any) -> NDArray[np.float64]:  # noqa: ANN401 - arrays or numbers
    error, power = np.asarray(error, dtype=np.float64), np.asarray(power, dtype=np.float64)
    share: NDArray[np.float64] = np.sqrt(np.divide(error, power, out=np.zeros_like(error), where=power > 0))
    return share


# ------------------------------------------------------------------------------------------------------------------ text block

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
