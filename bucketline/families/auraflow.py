"""AuraFlow: the last hidden state of a UMT5 at all positions, zeros at those of padding, which the model does not mask."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from bucketline.families.family import Family, Part
from bucketline.families.packing import flow

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from bucketline.families.family import Expected


class AuraFlow(Family):
    """AuraFlow: takes latents, the noise as a share, and tokens of all positions."""

    name = "auraflow"
    pipelines = ("AuraFlowPipeline",)
    parts = (Part(kind="UMT5", is_open=True),)
    results = ("tokens", None, None, None)  # its mask is as wide as its tokens are, and no one reads it
    model_class = "AuraFlowTransformer2DModel"
    usual_tokens = 256
    image_guidance = 3.5
    embeds: ClassVar[Mapping[str, str]] = {"prompt_embeds": "tokens", "prompt_attention_mask": "mask"}
    widths: ClassVar[Mapping[str, str]] = {"joint_attention_dim": "tokens"}
    has_mask = False
    is_told_share = True
    scheduler = flow(1.73)  # as published with AuraFlow
    lora_targets = (*Family.lora_targets, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")

    def expects(self) -> Iterator[Expected]:
        """Require the store's sizes, and a square of positions for its largest bucket, beyond which they are silently wrong."""
        yield from super().expects()
        yield from self.enough_positions(power=2)
