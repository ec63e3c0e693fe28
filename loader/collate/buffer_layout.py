"""The layout of a micro-batch in its buffer: large columns first, then all small ones contiguously, copied as one piece.

Letters: B rows, L tokens (padded).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from bucketline.loader.batch import BATCH_PRESENT_PREFIX, BATCH_RAGGED_PREFIX, FIXED_PREFIX
from bucketline.loader.collate.buffer_pool import ALIGN_BYTES, Field, buffer_offsets
from bucketline.store.format.columns import CLASS_LABELS, RAGGED_PREFIX, TOKENS
from bucketline.store.format.text_block import TEXT_GROUP
from bucketline.store.format.text_codec import F8_E4M3
from bucketline.torch_dtypes import TORCH_DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from bucketline.store import Column
    from bucketline.store.format.text_block import RaggedSpec


COPY_ALIGN_BYTES = 16  # where a copy may begin; see `Gather.take`


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedGroup:
    """A group of entries that is delivered: the captions, or a ragged group."""

    spec: RaggedSpec
    shown: RaggedSpec  # the columns that are delivered: the same, but for quantised text
    number: str | None  # the name of the rows' column with the number of their entry; None if captions have entries
    optional: bool
    longest: int  # L at most

    @property
    def is_text(self) -> bool:
        return self.spec.group == TEXT_GROUP

    @property
    def prefix(self) -> str:
        """Begin of the names of a ragged group's fields in a buffer."""
        return f"{BATCH_RAGGED_PREFIX}{self.spec.group.removeprefix(RAGGED_PREFIX)}."

    @property
    def mask(self) -> str:
        """Name of the field that says which tokens are an entry's own."""
        return "token_mask" if self.is_text else f"{self.prefix}mask"

    def token_field(self, column: str) -> str:
        """Return the name of a token column's field; that of a caption's first one is `tokens`."""
        if self.is_text:
            return TOKENS if column == self.spec.tokens[0].name else column
        return f"{self.prefix}columns.{column}"

    def fixed_field(self, column: str) -> str:
        """Return the name of a fixed column's field."""
        return FIXED_PREFIX + column if self.is_text else f"{self.prefix}fixed.{column}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferLayout:
    """The positions of a micro-batch's tensors in its buffer."""

    fields: list[Field]
    by_name: dict[str, Field]
    small_begin: int  # start of the small fields, which extend to the end of what is delivered
    num_bytes: int  # that are delivered
    gathered: dict[str, Field]  # where columns are copied to: their fields, or other places if tokens are dequantised then
    buffer_bytes: int  # with these other places

    @property
    def is_dequantised(self) -> bool:
        return self.gathered is not self.by_name

    @property
    def small_bytes(self) -> int:
        return self.num_bytes - self.small_begin


def is_class_conditional(text: RaggedSpec) -> bool:
    """Return True if a store's captions are classes."""
    return text.tokens[0].name == CLASS_LABELS


def _dtype_of(spec: RaggedSpec, column: Column) -> torch.dtype:
    """Return the dtype of a group's column: of quantised F8_E4M3 its bits, for which every device has all operations."""
    return torch.uint8 if spec.is_quantised and column.dtype == F8_E4M3 else TORCH_DTYPES[column.dtype]


def make_layout(
    columns: Mapping[str, Column],
    optional: Iterable[str],
    groups: Sequence[tuple[RequestedGroup, int]],
    num_rows: int,
) -> BufferLayout:
    """Return the layout of a micro-batch of B rows. The small fields' layout does not depend on the `columns`.

    `columns` are the rows' by field, `optional` the roles of those that rows may lack, `groups` the captions and the ragged
    groups that are requested, each with its L. Tokens that are to be dequantised are copied to the upper half of their field,
    and their scales to the buffer's end.
    """
    large = [(field, TORCH_DTYPES[column.dtype], (num_rows, *column.shape)) for field, column in columns.items()]
    small: list[tuple[str, torch.dtype, tuple[int, ...]]] = [
        ("original_size", torch.int32, (num_rows, 2)),
        ("crop", torch.int32, (num_rows, 2)),
        ("target_size", torch.int32, (num_rows, 2)),
        ("weight", torch.float32, (num_rows,)),
        ("keys", torch.int64, (num_rows,)),
        ("ids", torch.uint8, (num_rows, 16)),
        ("flipped", torch.bool, (num_rows,)),
        *((BATCH_PRESENT_PREFIX + role, torch.bool, (num_rows,)) for role in optional),
    ]
    for group, length in groups:
        own = group.shown
        large += [(group.token_field(c.name), _dtype_of(own, c), (num_rows, length, *c.shape)) for c in own.tokens]
        large += [(group.fixed_field(c.name), _dtype_of(own, c), (num_rows, *c.shape)) for c in own.fixed]
        small += [] if group.is_text else [(f"{group.prefix}lengths", torch.int32, (num_rows,))]
        small += [(group.mask, torch.bool, (num_rows, length))]
        small += [(f"{group.prefix}present", torch.bool, (num_rows,))] if group.optional else []
    fields, num_bytes = buffer_offsets([*large, *small])
    by_name = {field.name: field for field in fields}
    text, tokens = groups[0][0], by_name[TOKENS]
    if is_class_conditional(text.spec):  # the same bytes, as class labels
        fields = [*fields, replace(tokens, name=CLASS_LABELS, shape=(num_rows,))]
    gathered, buffer_bytes = by_name, num_bytes
    if text.shown.tokens != text.spec.tokens:
        places, buffer_bytes = _stored_places(text.spec, tokens, num_bytes)
        gathered = {**by_name, **places}
    return BufferLayout(
        fields=fields,
        by_name=by_name,
        small_begin=by_name["original_size"].begin,
        num_bytes=num_bytes,
        gathered=gathered,
        buffer_bytes=buffer_bytes,
    )


def _stored_places(text: RaggedSpec, out: Field, num_bytes: int) -> tuple[dict[str, Field], int]:
    """Return where the stored form of the tokens of field `out` is copied to, and the bytes of the buffer with it."""
    scale = text.tokens[1]
    num_rows, length, width = out.shape
    half = num_rows * length * width
    begin = -(-(out.begin + half) // COPY_ALIGN_BYTES) * COPY_ALIGN_BYTES  # the field's own alignment leaves room for that
    stored = Field(name="tokens", dtype=_dtype_of(text, text.tokens[0]), shape=out.shape, begin=begin, num_bytes=half)
    (placed,), scale_bytes = buffer_offsets([(scale.name, TORCH_DTYPES[scale.dtype], (num_rows, length, *scale.shape))])
    end = -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
    return {"tokens": stored, scale.name: replace(placed, begin=end)}, end + scale_bytes
