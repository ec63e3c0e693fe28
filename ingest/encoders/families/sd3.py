"""Stable Diffusion 3: two CLIPs concatenated and padded to the T5's width, then the T5; pooled embeddings of both CLIPs.

Without the T5, zeros of the same number and width take its place, and are stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bucketline.errors import ModelError
from bucketline.ingest.encoders.families.family import Encoded, Part, TextFamily, Widths
from bucketline.store.format.columns import POOLED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bucketline.ingest.encoders.model_folder import ModelFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    joint_attention_dim: int
    sample_size: int | None = None
    patch_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Transformer:
    """Stands in for the transformer, of which the pipeline's text part reads only the sizes."""

    config: _Sizes


def _prompt(pipeline: Any, captions: list[str], more: dict[str, Any]) -> Encoded:  # noqa: ANN401 - diffusers has no types
    tokens, _, pooled, _ = pipeline.encode_prompt(captions, None, None, do_classifier_free_guidance=False, **more)
    return Encoded(tokens=tokens, fixed={POOLED: pooled})


def _extras(model: ModelFolder) -> dict[str, Any]:
    """Return a stand-in for the transformer if the T5 is absent: the pipeline reads the width of the zeros from it."""
    if model.has("text_encoder_3"):
        return {}
    return {"transformer": _Transformer(config=_Sizes(joint_attention_dim=_width_without_t5(model)))}


def _width_without_t5(model: ModelFolder) -> int:
    width = (model.config("transformer") or {}).get("joint_attention_dim")
    if not isinstance(width, int):
        raise ModelError(
            f"{model.name} has no text_encoder_3/, and no transformer/config.json with a joint_attention_dim, "
            "which says how wide the zeros in its place are; add one of them"
        )
    return width


def _widths(model: ModelFolder, configs: Mapping[str, Any]) -> Widths:
    t5 = configs.get("text_encoder_3")
    pooled = sum(configs[name].projection_dim for name in ("text_encoder", "text_encoder_2"))
    return Widths(token=_width_without_t5(model) if t5 is None else t5.hidden_size, fixed={POOLED: pooled})


_CLIP_LAYER = "hidden_states[-2], text_embeds"
FAMILY = TextFamily(
    name="sd3",
    pipeline="StableDiffusion3Pipeline",
    parts=(
        Part(encoder="text_encoder", tokenizer="tokenizer", layer=_CLIP_LAYER, has_positions=True),
        Part(encoder="text_encoder_2", tokenizer="tokenizer_2", layer=_CLIP_LAYER),
        Part(
            encoder="text_encoder_3",
            tokenizer="tokenizer_3",
            layer="last_hidden_state",
            has_positions=True,
            is_open=True,
            is_optional=True,
        ),
    ),
    prompt=_prompt,
    widths=_widths,
    extras=_extras,
)
