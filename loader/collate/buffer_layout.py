"""The layout of a micro-batch in its buffer: large columns first, then all small ones contiguously, copied as one piece.

Letters: B rows, L tokens (padded).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from bucketline.loader.batch import BATCH_PRESENT_PREFIX, BATCH_RAGGED_PREFIX, FIXED_PREFIX
from bucketline.loader.collate.buffer_pool import ALIGN_BYTES, Field, buffer_offsets
from bucketline.loader.config import TextForm
from bucketline.store.format.columns import CLASS_LABELS
from bucketline.store.format.text_codec import F8_E4M3
from bucketline.torch_dtypes import TORCH_DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from bucketline.store import Column
    from bucketline.store.format.text_block import RaggedSpec, TextSpec


COPY_ALIGN_BYTES = 16  # where a copy may begin; see `Gather.take`


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedGroup:
    """A ragged group that is delivered."""

    name: str
    spec: RaggedSpec
    number: str | None  # the name of the rows' column with the number of their entry; None if captions have entries
    optional: bool
    longest: int  # tokens of the store's longest entry

    @property
    def prefix(self) -> str:
        """Begin of the names of its fields in a buffer."""
        return f"{BATCH_RAGGED_PREFIX}{self.name}."


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


def is_class_conditional(text: TextSpec) -> bool:
    """Return True if a store's captions are classes."""
    return text.tokens[0].name == CLASS_LABELS


def _token_dtype(text: TextSpec) -> torch.dtype:
    """Return the dtype of tokens as stored: of quantised F8_E4M3 its bits, for which every device has all operations."""
    dtype = text.tokens[0].dtype
    return torch.uint8 if text.is_quantised and dtype == F8_E4M3 else TORCH_DTYPES[dtype]


def make_layout(
    columns: Mapping[str, Column],
    optional: Iterable[str],
    text: TextSpec,
    num_rows: int,
    length: int,
    form: TextForm = TextForm.DEQUANTISED,
    ragged: Sequence[tuple[RequestedGroup, int]] = (),
) -> BufferLayout:
    """Return the layout of a micro-batch of B rows and L tokens. The small fields' layout does not depend on the `columns`.

    `columns` are the rows' by field, `optional` the roles of those that rows may lack, `ragged` the groups that are requested,
    each with its L. Tokens that are to be dequantised are
    copied to the upper half of their field, and their scales to the buffer's end.
    """
    is_stored = form is TextForm.STORED
    shown = text if is_stored else text.delivered
    tokens = shown.tokens[0]
    large = [
        *((field, TORCH_DTYPES[column.dtype], (num_rows, *column.shape)) for field, column in columns.items()),
        ("tokens", _token_dtype(shown), (num_rows, length, *tokens.shape)),
        *((scale.name, TORCH_DTYPES[scale.dtype], (num_rows, length, *scale.shape)) for scale in shown.tokens[1:]),
        *((FIXED_PREFIX + fixed.name, TORCH_DTYPES[fixed.dtype], (num_rows, *fixed.shape)) for fixed in text.delivered.fixed),
    ]
    for group, longest in ragged:
        large += [
            *(
                (f"{group.prefix}columns.{c.name}", TORCH_DTYPES[c.dtype], (num_rows, longest, *c.shape))
                for c in group.spec.tokens
            ),
            *((f"{group.prefix}fixed.{c.name}", TORCH_DTYPES[c.dtype], (num_rows, *c.shape)) for c in group.spec.fixed),
        ]
    small: list[tuple[str, torch.dtype, tuple[int, ...]]] = [
        ("original_size", torch.int32, (num_rows, 2)),
        ("crop", torch.int32, (num_rows, 2)),
        ("target_size", torch.int32, (num_rows, 2)),
        ("weight", torch.float32, (num_rows,)),
        ("keys", torch.int64, (num_rows,)),
        ("ids", torch.uint8, (num_rows, 16)),
        ("flipped", torch.bool, (num_rows,)),
        *((BATCH_PRESENT_PREFIX + role, torch.bool, (num_rows,)) for role in optional),
        ("token_mask", torch.bool, (num_rows, length)),
    ]
    for group, longest in ragged:
        small += [
            (f"{group.prefix}lengths", torch.int32, (num_rows,)),
            (f"{group.prefix}mask", torch.bool, (num_rows, longest)),
            *([(f"{group.prefix}present", torch.bool, (num_rows,))] if group.optional else []),
        ]
    fields, num_bytes = buffer_offsets([*large, *small])
    by_name = {field.name: field for field in fields}
    if is_class_conditional(text):
        own = by_name["tokens"]  # the same bytes, as class labels
        label = Field(name=CLASS_LABELS, dtype=own.dtype, shape=(num_rows,), begin=own.begin, num_bytes=own.num_bytes)
        fields = [*fields, label]
    gathered, buffer_bytes = by_name, num_bytes
    if text.is_quantised and not is_stored:
        places, buffer_bytes = _stored_places(text, by_name["tokens"], num_bytes)
        gathered = {**by_name, **places}
    return BufferLayout(
        fields=fields,
        by_name=by_name,
        small_begin=by_name["original_size"].begin,
        num_bytes=num_bytes,
        gathered=gathered,
        buffer_bytes=buffer_bytes,
    )


def _stored_places(text: TextSpec, out: Field, num_bytes: int) -> tuple[dict[str, Field], int]:
    """Return where the stored form of the tokens of field `out` is copied to, and the bytes of the buffer with it."""
    scale = text.tokens[1]
    num_rows, length, width = out.shape
    half = num_rows * length * width
    begin = -(-(out.begin + half) // COPY_ALIGN_BYTES) * COPY_ALIGN_BYTES  # the field's own alignment leaves room for that
    stored = Field(name="tokens", dtype=_token_dtype(text), shape=out.shape, begin=begin, num_bytes=half)
    (placed,), scale_bytes = buffer_offsets([(scale.name, TORCH_DTYPES[scale.dtype], (num_rows, length, *scale.shape))])
    end = -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
    return {"tokens": stored, scale.name: replace(placed, begin=end)}, end + scale_bytes
