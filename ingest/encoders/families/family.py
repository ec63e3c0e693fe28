"""Description of a text encoder family: its parts, their widths, and how a prompt is encoded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bucketline.ingest.encoders.text_columns import Padding

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from bucketline.ingest.encoders.model_folder import ModelFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """Output of a pipeline for a batch of captions."""

    tokens: Tensor  # [B, T, D]
    mask: Tensor | None = None  # [B, T], True for tokens that the model sees; None if it sees all
    fixed: Mapping[str, Tensor] = field(default_factory=dict)  # by column, [B, D']


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One of a family's text encoders."""

    encoder: str
    tokenizer: str
    layer: str  # which output is stored, as transformers calls it
    has_positions: bool = False  # adds token positions of its own (zeros if the part is absent), not shared with another part
    is_open: bool = False  # its length is an argument of `encode_prompt`, not set by the tokenizer
    is_optional: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """Widths of what a family stores per caption."""

    token: int
    fixed: Mapping[str, int] = field(default_factory=dict)  # by column


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFamily:
    """How a family encodes captions."""

    name: str
    pipeline: str  # the class in diffusers
    parts: tuple[Part, ...]
    prompt: Callable[[Any, list[str], dict[str, Any]], Encoded]  # (pipeline, captions, other arguments of `encode_prompt`)
    widths: Callable[[ModelFolder, Mapping[str, Any]], Widths]  # from the encoders' configurations by name
    padding: Padding = Padding.MAX_LENGTH
    extras: Callable[[ModelFolder], dict[str, Any]] = lambda _: {}  # other arguments of the pipeline
    cleaned: Callable[[Any, list[str]], list[str]] = lambda _, captions: captions  # preprocessing before the tokenizer
