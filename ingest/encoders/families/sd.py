"""Stable Diffusion 1.x and 2.x: the last hidden state of one CLIP at all 77 positions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bucketline.ingest.encoders.families.family import Encoded, Part, TextFamily, Widths

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bucketline.ingest.encoders.model_folder import ModelFolder


def _prompt(pipeline: Any, captions: list[str], more: dict[str, Any]) -> Encoded:  # noqa: ANN401 - diffusers has no types
    tokens, _ = pipeline.encode_prompt(captions, do_classifier_free_guidance=False, **more)
    return Encoded(tokens=tokens)


def _extras(_: ModelFolder) -> dict[str, Any]:
    return {"requires_safety_checker": False}


def _widths(_: ModelFolder, configs: Mapping[str, Any]) -> Widths:
    return Widths(token=configs["text_encoder"].hidden_size)


FAMILY = TextFamily(
    name="sd",
    pipeline="StableDiffusionPipeline",
    parts=(Part(encoder="text_encoder", tokenizer="tokenizer", layer="last_hidden_state", has_positions=True),),
    prompt=_prompt,
    widths=_widths,
    extras=_extras,
)
