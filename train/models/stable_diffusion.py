"""`UNet2DConditionModel` with only text conditioning: Stable Diffusion 1.x and 2.x."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bucketline.train.models.model import SAME_CHANNELS, SAME_WIDTH, Expected, ModelFamily

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from bucketline.loader import Batch
    from bucketline.typed_json import Json

OTHER_INPUTS = ("class_embed_type", "encoder_hid_dim", "encoder_hid_dim_type", "num_class_embeds", "time_cond_proj_dim")
"""Configuration fields for inputs that no store has."""


class StableDiffusion(ModelFamily):
    """Stable Diffusion: takes noisy latents, timesteps and the caption's tokens."""

    model_class = "UNet2DConditionModel"
    folder = "unet"
    pipeline = "StableDiffusionPipeline"
    image_guidance = 7.5

    @classmethod
    def takes(cls, kind: str, config: Mapping[str, Json]) -> bool:
        """Return whether this is a UNet other than SDXL's; unsupported ones fail later with the name of the field."""
        return kind == cls.model_class and config.get("addition_embed_type") != "text_time"

    def expects(self) -> Iterator[Expected]:
        """Require the store's sizes, and no inputs that it lacks."""
        yield self.equal("in_channels", self.store.latent_channels, SAME_CHANNELS)
        yield self.equal("out_channels", self.store.latent_channels, SAME_CHANNELS)
        yield self.equal("cross_attention_dim", self.store.text["tokens"], SAME_WIDTH)
        yield self.equal("addition_embed_type", None, "only SDXL's text_time is also supported")
        for field in OTHER_INPUTS:
            yield self.equal(field, None, "no store has this UNet input")

    def arguments(self, noisy: Tensor, timesteps: Tensor, batch: Batch) -> dict[str, Any]:
        """Return latents, timesteps and tokens, plus the mask if the store has no padding tokens."""
        return {
            "sample": noisy,
            "timestep": timesteps,
            "encoder_hidden_states": batch.tokens.float(),
            "encoder_attention_mask": None if self.store.shows_padding else batch.token_mask,
        }
