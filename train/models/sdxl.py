"""`UNet2DConditionModel` of SDXL: also takes a pooled embedding, and the image's sizes and crop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from bucketline.train.models.model import Expected
from bucketline.train.models.stable_diffusion import StableDiffusion

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from bucketline.loader import Batch

NUM_SIZES = 6


class Sdxl(StableDiffusion):
    """SDXL: takes the inputs of Stable Diffusion, plus `text_embeds` and `time_ids`."""

    pipeline = "StableDiffusionXLPipeline"
    image_guidance = 5.0
    columns = ("tokens", "pooled")
    added = "text_time"

    def expects(self) -> Iterator[Expected]:
        """Require Stable Diffusion's fields, the combined width of pooled text and sizes, and images of known crops."""
        yield from super().expects()
        yield Expected(
            field="the store's rules.import.crop",
            found="known" if self.store.has_crops else "unknown",
            wanted="known: center or source",
            is_met=self.store.has_crops,
            because="this model is told where each image was cropped; import again with --crop",
        )
        each = self.config.get("addition_time_embed_dim")
        yield self.one_of(
            "projection_class_embeddings_input_dim",
            (self.store.text["pooled"] + NUM_SIZES * (each if isinstance(each, int) else 0),),
            f"the store's pooled embeddings are {self.store.text['pooled']} wide, and {NUM_SIZES} sizes follow "
            f"of addition_time_embed_dim {each} each",
        )

    def arguments(self, noisy: Tensor, timesteps: Tensor, batch: Batch) -> dict[str, Any]:
        """Add the pooled embedding, and the sizes and the crop.

        Source: diffusers' `StableDiffusionXLPipeline._get_add_time_ids`: original size, top left of the crop, target size,
        height and top first.
        """
        assert batch.pooled is not None
        sizes = torch.cat([batch.original_size, batch.crop, batch.target_size], dim=1).float()  # [B, 6]
        added = {"text_embeds": batch.pooled.float(), "time_ids": sizes}
        return {**super().arguments(noisy, timesteps, batch), "added_cond_kwargs": added}
