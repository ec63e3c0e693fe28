"""Stable Diffusion 3 and 3.5: two CLIPs concatenated and padded to the T5's width, then the T5; both CLIPs' pooled embeddings.

Without the T5, zeros of the same number and width take its place, and are stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from bucketline.errors import ModelError
from bucketline.families.family import PENULTIMATE_CLIP, Expected, Family, Part, StandIn, variants
from bucketline.families.packing import flow
from bucketline.store.format.block import POOLED

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from bucketline.families.family import Model

T5 = "text_encoder_3"


class Sd3(Family):
    """Stable Diffusion 3: takes latents, timesteps, tokens of all positions and the pooled embedding."""

    name = "sd3"
    pipelines = variants("StableDiffusion3", "Img2Img Inpaint ControlNet ControlNetInpainting")
    parts = (
        Part(kind="CLIPTextModelWithProjection", **PENULTIMATE_CLIP),
        Part(encoder="text_encoder_2", tokenizer="tokenizer_2", kind="CLIPText", has_positions=False, **PENULTIMATE_CLIP),
        Part(encoder=T5, tokenizer="tokenizer_3", kind="T5", is_open=True, is_optional=True, most_tokens=512),
    )
    results = ("tokens", None, POOLED, None)
    prompt_options: ClassVar[Mapping[str, Any]] = {**Family.prompt_options, "prompt_2": None, "prompt_3": None}
    model_class = "SD3Transformer2DModel"
    image_guidance = 7.0
    usual_tokens = 333
    columns = ("tokens", POOLED)
    widths: ClassVar[Mapping[str, str]] = {"joint_attention_dim": "tokens", "pooled_projection_dim": POOLED}
    embeds: ClassVar[Mapping[str, str]] = {"prompt_embeds": "tokens", "pooled_prompt_embeds": POOLED}
    has_mask = False
    scheduler = flow(3.0)  # as published with Stable Diffusion 3 Medium
    lora_targets = tuple(  # as in diffusers' training script: without 3.5's second attention, attn2
        f"attn.{layer}" for layer in (*Family.lora_targets, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
    )

    @classmethod
    def extras(cls, model: Model) -> dict[str, Any]:
        """Return a stand-in for the transformer if the T5 is absent: the pipeline reads the width of the zeros from it."""
        if model.has(T5):
            return {}
        return {"transformer": StandIn(config=StandIn(joint_attention_dim=_width(model), sample_size=None, patch_size=None))}

    @classmethod
    def stored_width(cls, model: Model, configs: Mapping[str, Any]) -> int:
        """Return the T5's width, or that of the zeros in its place."""
        return super().stored_width(model, configs) if T5 in configs else _width(model)

    def expects(self) -> Iterator[Expected]:
        """Require the store's sizes, and enough positions for its largest bucket."""
        yield from super().expects()
        yield from self.enough_positions()


def _width(model: Model) -> int:
    width = (model.config("transformer") or {}).get("joint_attention_dim")
    if not isinstance(width, int):
        raise ModelError(
            f"{model.name} has no {T5}/, and no transformer/config.json with a joint_attention_dim, "
            "which says how wide the zeros in its place are; add one of them"
        )
    return width
