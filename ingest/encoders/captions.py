"""What turns captions into a store's text columns, whatever the family.

Letters: T tokens of a caption, D a token's width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from bucketline.store.text_block import TextSpec
    from bucketline.store.typed_json import Json

TOKENS = "tokens"
POOLED = "pooled"


class Padding(StrEnum):
    """Which tokens are stored: those that the family's model sees."""

    MAX_LENGTH = "max_length"  # all positions, padding included: every caption has as many
    VALID = "valid"  # a caption's own alone: the model masks the others


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """A caption as the model sees it, on the CPU, in the dtypes of the encoder's columns."""

    tokens: torch.Tensor  # [T, D]
    fixed: Mapping[str, torch.Tensor] = field(default_factory=dict)  # by column, such as `pooled` [D]
    is_finite: bool = True
    is_truncated: bool = False  # no part of the encoder saw the whole caption
    refusal: str | None = None  # why the caption cannot be used at all


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptionLength:
    """What is known of a caption before it is encoded."""

    num_tokens: int  # that are stored
    is_too_long: bool  # `Embedding.is_truncated`, foretold


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSettings:
    """What a caption encoder is told."""

    stored_dtype: str = "F16"
    encode_dtype: str = "F32"  # what it computes in
    max_tokens: int | None = None  # of a family that leaves the length open; its pipeline's own where none is given


class CaptionEncoder(Protocol):
    """A loaded encoder of captions."""

    @property
    def columns(self) -> TextSpec:
        """The text columns: one of tokens, and what is stored once a caption."""
        ...

    @property
    def max_tokens(self) -> int:
        """Most tokens that are stored of a caption; all captions have as many where padding is stored."""
        ...

    @property
    def padding(self) -> Padding: ...

    @property
    def provenance(self) -> dict[str, Json]: ...

    def encode(self, captions: Sequence[str]) -> list[Embedding]:
        """Encode captions, in their order."""
        ...
