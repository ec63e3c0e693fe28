"""Predict what a store would hold of captions, from only a model's tokenizers and config.json files, without weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.families.family import Family, Padding
from bucketline.ingest.encoders.text.any_transformer import tokens_taken
from bucketline.ingest.encoders.text.class_labels import ClassLabels, refuse_length
from bucketline.ingest.encoders.text.registry import text_family_of
from bucketline.ingest.encoders.text.token_limits import PromptLengths, make_pipeline
from bucketline.ingest.encoders.text_columns import CaptionLength, TextSettings, text_spec
from bucketline.ingest.encoders.text_model import load_tokenizer_part, token_counts
from bucketline.pack_options import PLAIN_FAMILY
from bucketline.store.format.columns import CLASS_LABELS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bucketline.ingest.encoders.model_folder import ModelFolder
    from bucketline.store.format.text_block import TextSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptionLengths:
    """Sizes of encoded captions, without their values."""

    family: str
    columns: TextSpec  # same as the encoder's
    max_tokens: int  # stored per caption, at most
    padding: Padding
    measure: Callable[[Sequence[str]], list[CaptionLength]]  # of captions, in order
    refusal: Callable[[str], str | None] = lambda _: None  # why a caption cannot be used; None if it can


def open_caption_lengths(model: ModelFolder, settings: TextSettings) -> CaptionLengths:
    """Load a model's tokenizers, or its classes."""
    kind = text_family_of(model, is_plain=settings.is_plain)
    if kind is not None and not kind.parts:
        refuse_length(model, settings.max_tokens)
        return _of_classes(ClassLabels(model))
    if kind is not None:
        return _of_family(kind, model, settings)
    part = load_tokenizer_part(model, "text_encoder", "tokenizer")
    most = tokens_taken(model, part.limit, settings.max_tokens)

    def measure(captions: Sequence[str]) -> list[CaptionLength]:
        return [
            CaptionLength(num_tokens=most if part.is_clip else min(count, most), is_too_long=count > most)
            for count in token_counts(part.tokenizer, captions)
        ]

    return CaptionLengths(
        family=PLAIN_FAMILY,
        columns=text_spec(settings.stored_dtype, int(part.config.get_text_config().hidden_size), {}),
        max_tokens=most,
        padding=Padding.MAX_LENGTH if part.is_clip else Padding.VALID,
        measure=measure,
    )


def _of_classes(labels: ClassLabels) -> CaptionLengths:
    return CaptionLengths(
        family=CLASS_LABELS,
        columns=labels.columns,
        max_tokens=labels.max_tokens,
        padding=labels.padding,
        measure=lambda captions: [CaptionLength(num_tokens=1, is_too_long=False)] * len(captions),
        refusal=lambda caption: labels.encode([caption])[0].refusal,
    )


def _of_family(family: type[Family], model: ModelFolder, settings: TextSettings) -> CaptionLengths:
    parts = {
        part.encoder: load_tokenizer_part(model, part.encoder, part.tokenizer)
        for part in family.parts
        if not part.is_optional or model.has(part.encoder)
    }
    named = {part.tokenizer: parts[part.encoder].tokenizer for part in family.parts if part.encoder in parts}
    tokenizers = {name: part.tokenizer for name, part in parts.items()}
    widths = family.text_widths(model, {name: part.config for name, part in parts.items()})
    lengths = PromptLengths(family, make_pipeline(family, model, named), tokenizers, settings.max_tokens)
    return CaptionLengths(
        family=family.name,
        columns=text_spec(settings.stored_dtype, widths.token, widths.fixed),
        max_tokens=lengths.positions,
        padding=family.padding,
        measure=lengths.measure,
        refusal=lengths.refusal,
    )
