"""ERNIE-Image: the hidden state before the last of a Mistral 3 at the caption's own tokens; latents in patches of 2 by 2.

Captions have no template. The pipeline rewrites them first if its prompt enhancer is loaded; stores keep them as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from bucketline.families.family import Encoded, Family, Padding, Part, Widths, own_tokens
from bucketline.families.packing import PATCH
from bucketline.families.schedules import flow

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from bucketline.families.family import Model
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
    call_options: ClassVar[Mapping[str, Any]] = {"negative_prompt": None}
    widths: ClassVar[Mapping[str, str]] = {"text_in_dim": "tokens"}
    packing = PATCH
    scheduler = flow(4.0)  # as published

    @classmethod
    def encode_prompt(cls, pipeline: Any, captions: list[str], more: Mapping[str, Any]) -> Encoded:  # noqa: ANN401 - diffusers has no types
        """Encode captions one by one, as the pipeline does, and pad them."""
        import torch

        rows = pipeline.encode_prompt(captions, **more)
        mask = torch.nn.utils.rnn.pad_sequence([row.new_ones(len(row)) for row in rows], batch_first=True).bool()
        return Encoded(tokens=torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), mask=mask)

    @classmethod
    def text_widths(cls, _model: Model, configs: Mapping[str, Any]) -> Widths:
        """Return the width of the language model."""
        return Widths(token=configs["text_encoder"].get_text_config().hidden_size)

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

    def embedded(self, batch: Batch) -> dict[str, Any]:
        """Return each caption's own tokens."""
        return {"prompt_embeds": own_tokens(batch)}

    def packed(self, latents: Tensor) -> Tensor:
        """Return latents, [B, C, h, w], as patches, [B, 4C, h/2, w/2]."""
        import torch

        return torch.nn.functional.pixel_unshuffle(latents, PATCH)

    def unpacked(self, latents: Tensor, _height: int, _width: int) -> Tensor:
        """Return patches, [B, 4C, h/2, w/2], as latents."""
        import torch

        return torch.nn.functional.pixel_shuffle(latents, PATCH)
