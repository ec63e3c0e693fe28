"""Protocols and records of caption encoders, independent of the model family.

Letters: T tokens of a caption, D width of a token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from bucketline.store.format.block import TOKENS, Column
from bucketline.store.format.text import QUANTISED, TextSpec, quantised_spec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from PIL.Image import Image

    from bucketline.families.family import Padding
    from bucketline.typed_json import Json


MAX_CUT_CHARS = 200  # captions have no limit of their own


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A caption that one part of the encoder did not see to its end."""

    encoder: str  # the part's folder
    tokens: int  # of the complete caption, with special tokens
    limit: int
    cut: str  # the end of the caption, which the part did not see; at most MAX_CUT_CHARS


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """An encoded caption as the model sees it, on the CPU, in the dtypes of the encoder's columns; not quantised yet."""

    tokens: torch.Tensor  # [T, D]
    fixed: Mapping[str, torch.Tensor] = field(default_factory=dict)  # by column, such as `pooled` [D]
    is_finite: bool = True
    is_truncated: bool = False  # no part of the encoder saw the complete caption
    cuts: tuple[Cut, ...] = ()  # by each part that did not
    refusal: str | None = None  # why the caption cannot be used at all


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What the model sees of a sample's captions with its images, on the CPU; the images' part is as wide as the captions'.

    The whole of a caption is `images`, then its own tokens; if it was dropped, `images`, then those of `empty`.
    """

    images: torch.Tensor  # [T, D]: states of the images and of what is written between them; 0 tokens if there are none
    is_image: torch.Tensor  # [T] bool: those of a patch of an image
    empty: Embedding  # of the empty caption behind the images; not finite if they are not, and refused if they cannot be seen
    captions: tuple[Embedding, ...]  # of each caption behind the images


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSettings:
    """Settings of a caption encoder."""

    stored_dtype: str = "F16"
    encode_dtype: str = "F32"  # dtype of the computation
    max_tokens: int | None = None  # for families with a configurable length; None for the pipeline's default
    sees_images: bool = False  # captions are encoded behind their sample's references
    is_plain: bool = False  # the last hidden state of the only text encoder, whatever the model's pipeline makes of captions

    @property
    def is_quantised(self) -> bool:
        return self.stored_dtype in QUANTISED

    @property
    def token_dtype(self) -> str:
        """Return the dtype of an encoder's tokens: of those that are quantised later, F32."""
        return "F32" if self.is_quantised else self.stored_dtype

    @property
    def fixed_dtype(self) -> str:
        """Return the dtype of what is not quantised: the fixed columns, and the images' part."""
        return "F16" if self.is_quantised else self.stored_dtype

    def are_finite(self, tokens: torch.Tensor) -> bool:
        """Return whether tokens are finite as they will be delivered."""
        return bool((tokens.half() if self.is_quantised else tokens).isfinite().all())


def text_spec(dtype: str, width: int, fixed: Mapping[str, int]) -> TextSpec:
    """Return the text columns of an encoder: tokens `[width]`, and a vector per caption by column, such as `pooled`."""
    own = TextSettings(stored_dtype=dtype)
    once = tuple(Column(name=name, dtype=own.fixed_dtype, shape=(size,)) for name, size in fixed.items())
    if own.is_quantised:
        return quantised_spec(dtype, width, once)
    return TextSpec(tokens=(Column(name=TOKENS, dtype=dtype, shape=(width,)),), fixed=once)


class CaptionEncoder(Protocol):
    """A loaded caption encoder."""

    @property
    def columns(self) -> TextSpec:
        """The text columns: one of tokens, and those with one value per caption."""
        ...

    @property
    def max_tokens(self) -> int:
        """Maximum number of stored tokens per caption; the exact number if padding is stored."""
        ...

    @property
    def padding(self) -> Padding: ...

    @property
    def sees_images(self) -> bool:
        """True for a `SeeingEncoder`, whose captions depend on their sample's images."""
        ...

    @property
    def provenance(self) -> dict[str, Json]: ...

    def padded_lengths(self, captions: Sequence[str]) -> list[int]:
        """Return for each caption the length that it is padded to in a batch of its own."""
        ...

    def encode(self, captions: Sequence[str]) -> list[Embedding]: ...


class SeeingEncoder(CaptionEncoder, Protocol):
    """A loaded caption encoder of a family whose text sees the images."""

    def encode_seen(self, captions: Sequence[str], images: Sequence[Image]) -> Seen:
        """Encode the captions of one sample, and the empty one, with its images as `References.for_text` returns them."""
        ...
