"""SDXL: penultimate hidden states of two CLIPs, concatenated at all 77 positions, and the pooled embedding of the second.

With `force_zeros_for_empty_prompt` in model_index.json (true by default), the model sees zeros for a dropped caption. The
empty caption is then stored as zeros, otherwise as encoded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bucketline.ingest.encoders.families.family import Encoded, Part, TextFamily, Widths
from bucketline.store.format.columns import POOLED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bucketline.ingest.encoders.model_folder import ModelFolder

ZEROS = "force_zeros_for_empty_prompt"


def _prompt(pipeline: Any, captions: list[str], more: dict[str, Any]) -> Encoded:  # noqa: ANN401 - diffusers has no types
    tokens, _, pooled, _ = pipeline.encode_prompt(captions, do_classifier_free_guidance=False, **more)
    return Encoded(tokens=tokens, fixed={POOLED: pooled})


def _extras(model: ModelFolder) -> dict[str, Any]:
    return {ZEROS: bool(model.index().get(ZEROS, True)), "add_watermarker": False}


def _widths(_: ModelFolder, configs: Mapping[str, Any]) -> Widths:
    pooled = configs["text_encoder_2"].projection_dim
    return Widths(token=sum(config.hidden_size for config in configs.values()), fixed={POOLED: pooled})


FAMILY = TextFamily(
    name="sdxl",
    pipeline="StableDiffusionXLPipeline",
    parts=(
        # the refiner has only the second one
        Part(encoder="text_encoder", tokenizer="tokenizer", layer="hidden_states[-2]", is_optional=True),
        Part(
            encoder="text_encoder_2",
            tokenizer="tokenizer_2",
            layer="hidden_states[-2], text_embeds",
            has_positions=True,
        ),
    ),
    prompt=_prompt,
    widths=_widths,
    extras=_extras,
)
