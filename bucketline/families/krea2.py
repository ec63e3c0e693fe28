"""Krea 2: several hidden states of a Qwen3-VL side by side, at the caption's own tokens and those of the chat after it.

The pipeline puts each caption into Qwen-Image's chat, and padding before the chat's end. The model masks padding, and text has
no positions in it: only the tokens that it sees are stored, one after the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from bucketline.families.family import Expected, Family, Padding, Part
from bucketline.families.packing import PATCH, alike_if_distilled, flow, image_ids
from bucketline.families.qwenimage import QwenImage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from bucketline.families.family import Model
    from bucketline.loader import Batch

LAYERS = "text_encoder_select_layers"  # in the pipeline's index
TEXT = ("text_fusion.projector", "txt_in.linear_1", "txt_in.linear_2")  # adapters by diffusers' training script
_OTHERS = (*TEXT, "img_in", "time_embed.linear_1", "time_embed.linear_2", "time_mod_proj", "final_layer.linear")


class Krea2(Family):
    """Krea 2: takes packed latents, the noise as a share, tokens of several layers, their mask, and position ids."""

    name = "krea2"
    pipelines = ("Krea2Pipeline",)
    parts = (Part(kind="Qwen3VL", layer="hidden_states of the index's layers", is_open=True),)
    padding = Padding.VALID
    index_options = (LAYERS,)
    results = ("tokens", "mask")
    model_class = "Krea2Transformer2DModel"
    usual_tokens = 512
    image_guidance = 4.5
    no_guidance = 0.0
    embeds: ClassVar[Mapping[str, str]] = QwenImage.embeds
    packing = PATCH
    is_told_share = True
    noise_levels = alike_if_distilled
    scheduler = flow(1.0, use_dynamic_shifting=True, max_image_seq_len=6400)  # as its pipeline expects
    lora_targets = (*Family.lora_targets, "to_gate", "ff.up", "ff.down", *_OTHERS)

    @classmethod
    def stored_width(cls, model: Model, configs: Mapping[str, Any]) -> int:
        """Return the width of the layers together."""
        layers = model.index().get(LAYERS) or range(12)  # as many as the pipeline takes by default
        return len(layers) * super().stored_width(model, configs)

    @classmethod
    def cleaned(cls, pipeline: Any, captions: list[str]) -> list[str]:  # noqa: ANN401 - diffusers has no types
        """Return captions in the pipeline's chat."""
        start = pipeline.prompt_template_encode_prefix
        return [f"{start}{caption}{pipeline.prompt_template_encode_suffix}" for caption in captions]

    @property
    def token_width(self) -> int:
        """The width of the layers together."""
        return self.number("num_text_layers") * self.number("text_hidden_dim")

    def expects(self) -> Iterator[Expected]:
        """Require the store's sizes, and tokens of as many layers."""
        yield from super().expects()
        yield self.same("num_text_layers by text_hidden_dim", self.token_width, self.store.text["tokens"])

    def arguments(self, noisy: Tensor, timesteps: Tensor, batch: Batch) -> dict[str, Any]:
        """Add position ids of zeros and of the latents."""
        ids = image_ids(noisy, num_text=batch.tokens.shape[1])
        return {**super().arguments(noisy, timesteps, batch), "position_ids": ids}

    def tokens(self, batch: Batch) -> Tensor:
        """Part the layers."""
        return batch.tokens.float().reshape(*batch.tokens.shape[:2], self.number("num_text_layers"), -1)
