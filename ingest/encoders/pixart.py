"""PixArt-Alpha and PixArt-Sigma: a T5's last hidden state at a caption's own tokens; the model masks the others.

The two differ in how long a caption may be, 120 tokens and 300. Captions are lowered and stripped, as the pipeline does
with `clean_caption` off; its cleaning of web texts is not done, so that a caption is what the source says.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bucketline.ingest.encoders.captions import Padding
from bucketline.ingest.encoders.prompt_family import Encoded, Family, Part, Widths

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


ALPHA = Family(
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
