"""`UNet2DConditionModel` with only text conditioning: Stable Diffusion 1.x and 2.x."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from bucketline.train.models.model import Expected, ModelFamily

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from bucketline.typed_json import Json

OTHER_INPUTS = ("class_embed_type", "encoder_hid_dim", "encoder_hid_dim_type", "num_class_embeds", "time_cond_proj_dim")
"""Configuration fields for inputs that no store has."""


class StableDiffusion(ModelFamily):
    """Stable Diffusion: takes noisy latents, timesteps and the caption's tokens."""

    model_class = "UNet2DConditionModel"
    folder = "unet"
    pipeline = "StableDiffusionPipeline"
    image_guidance = 7.5
    widths: ClassVar[Mapping[str, str]] = {"cross_attention_dim": "tokens"}
    out_channels = (1,)
    added: ClassVar[str | None] = None  # the kind of added conditions

    @classmethod
    def takes(cls, kind: str, config: Mapping[str, Json]) -> bool:
        """Return whether this is a UNet with these added conditions; of others, Stable Diffusion's check names the field."""
        return kind == cls.model_class and cls.added in (None, config.get("addition_embed_type"))

    def expects(self) -> Iterator[Expected]:
        """Require the store's sizes, and no inputs that it lacks."""
        yield from super().expects()
        yield self.one_of("addition_embed_type", (self.added,), "only SDXL's text_time is also supported")
        for field in OTHER_INPUTS:
            yield self.one_of(field, (None,), "no store has this UNet input")
