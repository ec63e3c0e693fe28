"""How a micro-batch lies in its slab: the large columns first, then all small ones side by side, to be copied as one piece.

Letters: B rows, L tokens (padded).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from bucketline.loader.batch import FIXED_PREFIX
from bucketline.loader.gather import TORCH_DTYPES
from bucketline.loader.ring import Field, lay_out

if TYPE_CHECKING:
    from bucketline.store import Column
    from bucketline.store.text_block import TextSpec

CLASS_LABELS = "class_labels"  # the token column of a class-conditional store: one a caption


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where the tensors of a micro-batch lie."""

    fields: list[Field]
    by_name: dict[str, Field]
    small_begin: int  # of the small fields; they end with the slab
    num_bytes: int

    @property
    def small_bytes(self) -> int:
        return self.num_bytes - self.small_begin


def is_class_conditional(text: TextSpec) -> bool:
    """Say whether a store's captions are classes."""
    return text.tokens[0].name == CLASS_LABELS


def make_layout(latent: Column, text: TextSpec, num_rows: int, length: int) -> Layout:
    """Lay out a micro-batch of B rows and L tokens; the small fields lie the same whatever the latent's shape."""
    tokens = text.tokens[0]
    large = [
        ("latents", TORCH_DTYPES[latent.dtype], (num_rows, *latent.shape)),
        ("tokens", TORCH_DTYPES[tokens.dtype], (num_rows, length, *tokens.shape)),
        *((FIXED_PREFIX + fixed.name, TORCH_DTYPES[fixed.dtype], (num_rows, *fixed.shape)) for fixed in text.fixed),
    ]
    small: list[tuple[str, torch.dtype, tuple[int, ...]]] = [
        ("original_size", torch.int32, (num_rows, 2)),
        ("crop", torch.int32, (num_rows, 2)),
        ("target_size", torch.int32, (num_rows, 2)),
        ("weight", torch.float32, (num_rows,)),
        ("keys", torch.int64, (num_rows,)),
        ("ids", torch.uint8, (num_rows, 16)),
        ("flipped", torch.bool, (num_rows,)),
        ("token_mask", torch.bool, (num_rows, length)),
    ]
    fields, num_bytes = lay_out([*large, *small])
    by_name = {field.name: field for field in fields}
    if is_class_conditional(text):
        own = by_name["tokens"]  # the same bytes, seen as what they are
        label = Field(name=CLASS_LABELS, dtype=own.dtype, shape=(num_rows,), begin=own.begin, num_bytes=own.num_bytes)
        fields = [*fields, label]
    return Layout(fields=fields, by_name=by_name, small_begin=by_name["original_size"].begin, num_bytes=num_bytes)
