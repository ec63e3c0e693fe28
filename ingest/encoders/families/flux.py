"""Flux: the last hidden state of a T5 at all positions, and the pooled embedding of a CLIP.

The pipeline's `text_ids` are zeros for every caption and are not stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bucketline.ingest.encoders.families.family import Encoded, Part, TextFamily, Widths
from bucketline.store.format.columns import POOLED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bucketline.ingest.encoders.model_folder import ModelFolder


def _prompt(pipeline: Any, captions: list[str], more: dict[str, Any]) -> Encoded:  # noqa: ANN401 - diffusers has no types
    tokens, pooled, _ = pipeline.encode_prompt(captions, **more)
    return Encoded(tokens=tokens, fixed={POOLED: pooled})


def _widths(_: ModelFolder, configs: Mapping[str, Any]) -> Widths:
    return Widths(token=configs["text_encoder_2"].hidden_size, fixed={POOLED: configs["text_encoder"].hidden_size})


FAMILY = TextFamily(
    name="flux",
    pipeline="FluxPipeline",
    parts=(
        Part(encoder="text_encoder", tokenizer="tokenizer", layer="pooler_output"),
        Part(encoder="text_encoder_2", tokenizer="tokenizer_2", layer="last_hidden_state", has_positions=True, is_open=True),
    ),
    prompt=_prompt,
    widths=_widths,
)
