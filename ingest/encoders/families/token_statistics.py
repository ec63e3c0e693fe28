"""Predict what a store would hold of captions, from only a model's tokenizers and config.json files, without weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from bucketline.ingest.encoders.families.any_transformer import TRANSFORMERS, tokens_taken
from bucketline.ingest.encoders.families.class_labels import CLASS_LABELS, ClassLabels, refuse_length
from bucketline.ingest.encoders.families.family import TextFamily
from bucketline.ingest.encoders.families.registry import family_of
from bucketline.ingest.encoders.families.token_limits import PromptLengths, make_pipeline
from bucketline.ingest.encoders.text_columns import TOKENS, CaptionLength, Padding, TextSettings
from bucketline.ingest.encoders.text_model import load_tokenizer_part, token_counts
from bucketline.store.format.block import Column
from bucketline.store.format.text_block import TextSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bucketline.ingest.encoders.model_folder import ModelFolder


class Lengths(Protocol):
    """Sizes of encoded captions, without their values."""

    @property
    def family(self) -> str: ...

    @property
    def columns(self) -> TextSpec:
        """The text columns, same as the encoder's."""
        ...

    @property
    def max_tokens(self) -> int:
        """Maximum number of stored tokens per caption."""
        ...

    @property
    def padding(self) -> Padding: ...

    def measure(self, captions: Sequence[str]) -> list[CaptionLength]:
        """Measure captions in order."""
        ...

    def refusal(self, caption: str) -> str | None:
        """Return why a caption cannot be used; None if it can."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyLengths:
    """Caption sizes for the pipeline of a known family."""

    family: str
    columns: TextSpec
    padding: Padding
    lengths: PromptLengths

    @property
    def max_tokens(self) -> int:
        return self.lengths.positions

    def measure(self, captions: Sequence[str]) -> list[CaptionLength]:
        """Measure captions with all of the family's tokenizers."""
        return self.lengths.measure(captions)

    def refusal(self, caption: str) -> str | None:  # noqa: ARG002 - any text can be encoded
        """Return None: any text can be used."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderLengths:
    """Caption sizes for a text encoder of no known family."""

    columns: TextSpec
    max_tokens: int
    padding: Padding
    tokenizer: Any
    family: str = TRANSFORMERS

    def measure(self, captions: Sequence[str]) -> list[CaptionLength]:
        """Measure captions with the tokenizer."""
        most, is_padded = self.max_tokens, self.padding is Padding.MAX_LENGTH
        return [
            CaptionLength(num_tokens=most if is_padded else min(count, most), is_too_long=count > most)
            for count in token_counts(self.tokenizer, captions)
        ]

    def refusal(self, caption: str) -> str | None:  # noqa: ARG002 - any text can be encoded
        """Return None: any text can be used."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassLengths:
    """Caption sizes for a class-conditional model: one number each."""

    labels: ClassLabels
    family: str = CLASS_LABELS
    max_tokens: int = ClassLabels.max_tokens
    padding: Padding = ClassLabels.padding

    @property
    def columns(self) -> TextSpec:
        return self.labels.columns

    def measure(self, captions: Sequence[str]) -> list[CaptionLength]:
        """Return a length of one token for each caption."""
        return [CaptionLength(num_tokens=1, is_too_long=False)] * len(captions)

    def refusal(self, caption: str) -> str | None:
        """Return why a caption is not a class of the model; None if it is one."""
        return self.labels.encode([caption])[0].refusal


def open_caption_lengths(model: ModelFolder, settings: TextSettings) -> Lengths:
    """Load a model's tokenizers, or its classes.

    Raises:
        ModelError: if a part is missing or cannot be loaded, or the model has several text encoders and no known family.
        UsageError: if the model does not support the requested length.
    """
    kind = family_of(model)
    if isinstance(kind, TextFamily):
        return _of_family(kind, model, settings)
    if kind is ClassLabels:
        refuse_length(model, settings.max_tokens)
        return ClassLengths(labels=ClassLabels(model))
    part = load_tokenizer_part(model, "text_encoder", "tokenizer")
    return EncoderLengths(
        columns=_columns(settings, int(part.config.get_text_config().hidden_size)),
        max_tokens=tokens_taken(model, part.limit, settings.max_tokens),
        padding=Padding.MAX_LENGTH if part.is_clip else Padding.VALID,
        tokenizer=part.tokenizer,
    )


def _of_family(family: TextFamily, model: ModelFolder, settings: TextSettings) -> FamilyLengths:
    parts = {
        part.encoder: load_tokenizer_part(model, part.encoder, part.tokenizer)
        for part in family.parts
        if not part.is_optional or model.has(part.encoder)
    }
    named = {part.tokenizer: parts[part.encoder].tokenizer for part in family.parts if part.encoder in parts}
    tokenizers = {name: part.tokenizer for name, part in parts.items()}
    widths = family.widths(model, {name: part.config for name, part in parts.items()})
    return FamilyLengths(
        family=family.name,
        columns=_columns(settings, widths.token, **widths.fixed),
        padding=family.padding,
        lengths=PromptLengths(family, make_pipeline(family, model, named), tokenizers, settings.max_tokens),
    )


def _columns(settings: TextSettings, width: int, **fixed: int) -> TextSpec:
    return TextSpec(
        tokens=(Column(name=TOKENS, dtype=settings.stored_dtype, shape=(width,)),),
        fixed=tuple(Column(name=name, dtype=settings.stored_dtype, shape=(own,)) for name, own in fixed.items()),
    )
