"""Lumina 2: the hidden state before the last of a Gemma 2 at the caption's own tokens; the model masks the others.

A system prompt comes before each caption, and its tokens are stored. The empty caption has none: it is the pipeline's negative
prompt. The model's time is 0 at noise and 1 at the image, and its prediction points from noise to the image.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from bucketline.families.family import Family, Padding, Part
from bucketline.families.packing import NUM_TRAIN_TIMESTEPS, flow

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from bucketline.loader import Batch


class Lumina2(Family):
    """Lumina 2: takes latents, the share of the image, tokens and their mask."""

    name = "lumina2"
    pipelines = ("Lumina2Pipeline",)
    parts = (Part(kind="Gemma2", layer="hidden_states[-2]", is_open=True, most_tokens=512),)
    padding = Padding.VALID
    results = ("tokens", "mask", "empty tokens", "empty mask")
    model_class = "Lumina2Transformer2DModel"
    usual_tokens = 256
    image_guidance = 4.0
    embeds: ClassVar[Mapping[str, str]] = {"prompt_embeds": "tokens", "prompt_attention_mask": "mask"}
    widths: ClassVar[Mapping[str, str]] = {"cap_feat_dim": "tokens"}
    points_to_image = True
    has_own_lengths = True
    other_names: ClassVar[Mapping[str, str]] = {
        ".attn.to_out.0": ".attention.out",
        ".attn.": ".attention.",
        ".feed_forward.linear_": ".feed_forward.w",
        ".norm1.linear": ".adaLN_modulation.1",
    }
    scheduler = flow(6.0)  # as published with Lumina-Image-2.0

    @classmethod
    def cleaned(cls, pipeline: Any, captions: list[str]) -> list[str]:  # noqa: ANN401 - diffusers has no types
        """Return captions with the system prompt; the empty one without it."""
        return [f"{pipeline.system_prompt} <Prompt Start> {caption}" if caption else "" for caption in captions]

    def arguments(self, noisy: Tensor, timesteps: Tensor, batch: Batch) -> dict[str, Any]:
        """Return latents, the share of the image, tokens and their mask."""
        return super().arguments(noisy, 1 - timesteps / NUM_TRAIN_TIMESTEPS, batch)
