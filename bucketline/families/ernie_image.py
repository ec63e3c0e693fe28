"""ERNIE-Image: the hidden state before the last of a Mistral 3 at the caption's own tokens; latents in patches of 2 by 2.

Captions have no template. The pipeline rewrites them first if its prompt enhancer is loaded; stores keep them as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from bucketline.families.family import Family, Padding, Part
from bucketline.families.packing import PATCH, flow

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from bucketline.loader import Batch

EPS = 1e-5  # of the batch norm: the pipeline's own, since the published configuration of the VAE has another


class ErnieImage(Family):
    """ERNIE-Image: takes latents with a patch's positions as channels, timesteps, tokens and how many each caption has."""

    name = "ernie_image"
    pipelines = ("ErnieImagePipeline",)
    parts = (Part(kind="Mistral3", layer="hidden_states[-2]"),)
    padding = Padding.VALID
    model_class = "ErnieImageTransformer2DModel"
    usual_tokens = 256
    image_guidance = 4.0
    embeds: ClassVar[Mapping[str, str]] = {"prompt_embeds": "own tokens"}
    call_options: ClassVar[Mapping[str, Any]] = {"negative_prompt": None}
    widths: ClassVar[Mapping[str, str]] = {"text_in_dim": "tokens"}
    packing = PATCH
    packs_channels = True
    scheduler = flow(4.0)  # as published

    @classmethod
    def scaling(cls, vae: Mapping[str, Any]) -> dict[str, Any]:
        """Return the VAE's statistics with the pipeline's own ε."""
        norm = vae["batch_norm"]
        std = [(one**2 - norm["eps"] + EPS) ** 0.5 for one in norm["std"]]
        return {**vae, "batch_norm": {**norm, "std": std}}

    def arguments(self, noisy: Tensor, timesteps: Tensor, batch: Batch) -> dict[str, Any]:
        """Return latents in patches, timesteps, tokens, and the number of each caption's."""
        return {
            "hidden_states": self.packed(noisy),
            "timestep": timesteps,
            "text_bth": batch.tokens.float(),
            "text_lens": batch.token_mask.sum(dim=1),
        }
