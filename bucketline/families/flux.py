"""Flux.1: the last hidden state of a T5 at all positions, and the pooled embedding of a CLIP; latents packed into tokens.

The pipeline's `text_ids` are zeros for every caption and are not stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from bucketline.families.family import Family, Part, variants
from bucketline.families.packing import PATCH, flow, image_ids
from bucketline.store.format.block import POOLED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from bucketline.families.family import StoreFacts
    from bucketline.loader import Batch
    from bucketline.typed_json import Json


class Flux(Family):
    """Flux: takes packed latents, timesteps, tokens of all positions, the pooled embedding, and position ids of both."""

    name = "flux"
    pipelines = variants("Flux", "Img2Img Inpaint Control ControlImg2Img ControlInpaint Fill KontextInpaint")
    parts = (
        Part(layer="pooler_output", kind="CLIPText", has_positions=False, pooled="hidden_size"),
        Part(encoder="text_encoder_2", tokenizer="tokenizer_2", kind="T5", is_open=True, most_tokens=512),
    )
    results = ("tokens", POOLED, None)
    prompt_options: ClassVar[Mapping[str, Any]] = {"prompt_2": None}
    image_guidance = 3.5
    model_class = "FluxTransformer2DModel"
    usual_tokens = 512
    columns = ("tokens", POOLED)
    widths: ClassVar[Mapping[str, str]] = {"joint_attention_dim": "tokens", "pooled_projection_dim": POOLED}
    packing = PATCH
    is_told_share = True
    embeds: ClassVar[Mapping[str, str]] = {"prompt_embeds": "tokens", "pooled_prompt_embeds": POOLED}
    has_mask = False
    scheduler = flow(  # as published with FLUX.1-dev
        3.0, use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15, base_image_seq_len=256, max_image_seq_len=4096
    )
    lora_targets = (  # as in diffusers' training script: the feed-forward layers of the blocks of two streams as well
        *(*Family.lora_targets, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
        *("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"),
    )

    def __init__(self, config: Mapping[str, Json], store: StoreFacts) -> None:
        """FLUX.1-schnell takes no guidance at all; for its pipeline, that of negative prompts has another name."""
        super().__init__(config, store)
        self.guidance_argument = "guidance_scale" if self.is_told_guidance else "true_cfg_scale"  # type: ignore[misc] # of this model
        self.image_guidance = Flux.image_guidance if self.is_told_guidance else 1.0

    def arguments(self, noisy: Tensor, timesteps: Tensor, batch: Batch) -> dict[str, Any]:
        """Pack the latents, give the noise as a share, and add position ids, and guidance if the model takes it."""
        given = {
            **super().arguments(noisy, timesteps, batch),
            "guidance": noisy.new_full((len(noisy),), self.guidance) if self.is_told_guidance else None,
            "txt_ids": noisy.new_zeros(batch.tokens.shape[1], 3),
            "img_ids": image_ids(noisy),
        }
        return self.with_references(given, batch)
