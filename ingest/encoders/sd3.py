"""Stable Diffusion 3: two CLIPs side by side, padded to the T5's width, then the T5; both CLIPs' pooled embeddings.

A model without its T5 sees zeros in its place, as many and as wide, and these are stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bucketline.errors import ModelError
from bucketline.ingest.encoders.captions import POOLED
from bucketline.ingest.encoders.prompt_family import Encoded, Family, Part

if TYPE_CHECKING:
    from bucketline.ingest.encoders.model_folder import ModelFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    joint_attention_dim: int
    sample_size: int | None = None
    patch_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Transformer:
    """Stands for the transformer, of which the pipeline's text half reads the sizes alone."""

    config: _Sizes


def _prompt(pipeline: Any, captions: list[str], more: dict[str, Any]) -> Encoded:  # noqa: ANN401 - diffusers has no types
    tokens, _, pooled, _ = pipeline.encode_prompt(captions, None, None, do_classifier_free_guidance=False, **more)
    return Encoded(tokens=tokens, fixed={POOLED: pooled})


def _extras(model: ModelFolder) -> dict[str, Any]:
    """Give what stands for the absent T5: the one number that the pipeline asks its transformer for."""
    if model.has("text_encoder_3"):
        return {}
    width = (model.config("transformer") or {}).get("joint_attention_dim")
    if not isinstance(width, int):
        raise ModelError(
            f"{model.name} has no text_encoder_3/, and no transformer/config.json with a joint_attention_dim, "
            "which says how wide the zeros in its place are; add one of them"
        )
    return {"transformer": _Transformer(config=_Sizes(joint_attention_dim=width))}


_CLIP_LAYER = "hidden_states[-2], text_embeds"
FAMILY = Family(
    name="sd3",
    pipeline="StableDiffusion3Pipeline",
    parts=(
        Part(encoder="text_encoder", tokenizer="tokenizer", layer=_CLIP_LAYER),
        Part(encoder="text_encoder_2", tokenizer="tokenizer_2", layer=_CLIP_LAYER),
        Part(encoder="text_encoder_3", tokenizer="tokenizer_3", layer="last_hidden_state", is_open=True, is_optional=True),
    ),
    prompt=_prompt,
    extras=_extras,
)
