"""PixArt-Alpha and PixArt-Sigma: the last hidden state of a T5 at the caption's own tokens; the model masks the others.

They differ in the maximum caption length: 120 tokens for Alpha, 300 for Sigma. Captions are lowercased and stripped, as
the pipeline does with `clean_caption` off. Its clean-up of web text is not applied, so that captions match the source.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bucketline.ingest.encoders.families.family import Encoded, Part, TextFamily, Widths
from bucketline.ingest.encoders.text_columns import Padding

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bucketline.ingest.encoders.model_folder import ModelFolder


def _prompt(pipeline: Any, captions: list[str], more: dict[str, Any]) -> Encoded:  # noqa: ANN401 - diffusers has no types
    tokens, mask, _, _ = pipeline.encode_prompt(captions, do_classifier_free_guidance=False, clean_caption=False, **more)
    return Encoded(tokens=tokens, mask=mask)


def _cleaned(pipeline: Any, captions: list[str]) -> list[str]:  # noqa: ANN401 - diffusers has no types
    cleaned: list[str] = pipeline._text_preprocessing(captions, clean_caption=False)
    return cleaned


def _widths(_: ModelFolder, configs: Mapping[str, Any]) -> Widths:
    return Widths(token=configs["text_encoder"].hidden_size)


ALPHA = TextFamily(
    name="pixart_alpha",
    pipeline="PixArtAlphaPipeline",
    parts=(
        Part(
            encoder="text_encoder",
            tokenizer="tokenizer",
            layer="last_hidden_state",
            has_positions=True,
            is_open=True,
        ),
    ),
    prompt=_prompt,
    widths=_widths,
    padding=Padding.VALID,
    cleaned=_cleaned,
)
SIGMA = replace(ALPHA, name="pixart_sigma", pipeline="PixArtSigmaPipeline")
