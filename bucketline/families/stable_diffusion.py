"""Stable Diffusion 1.x and 2.x: the last hidden state of one CLIP at all 77 positions, and a UNet with text conditioning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from bucketline.families.family import Expected, Family, Part, variants

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import nn

    from bucketline.loader import Batch
    from bucketline.typed_json import Json

OTHER_INPUTS = ("class_embed_type", "encoder_hid_dim", "encoder_hid_dim_type", "num_class_embeds", "time_cond_proj_dim")
"""Configuration fields for inputs that no store has."""
TEXT_TIME = "text_time"


class StableDiffusion(Family):
    """Stable Diffusion: takes noisy latents, timesteps and the caption's tokens."""

    name = "sd"
    pipelines = (
        *variants("StableDiffusion", "Img2Img Inpaint ControlNet ControlNetImg2Img ControlNetInpaint ControlNetXS"),
        *variants("StableDiffusion", "Depth2Img Upscale")[1:],
        *variants("LatentConsistencyModel", "Img2Img"),
    )
    parts: ClassVar[tuple[Part, ...]] = (Part(kind="CLIPText"),)
    model_class = "UNet2DConditionModel"
    folder = "unet"
    image_guidance = 7.5
    widths: ClassVar[Mapping[str, str]] = {"cross_attention_dim": "tokens"}
    out_channels = (1,)
    pipeline_options: ClassVar[Mapping[str, Any]] = {"requires_safety_checker": False}
    added: ClassVar[str | None] = None  # the kind of added conditions

    @classmethod
    def takes(cls, kind: str, config: Mapping[str, Json]) -> bool:
        """Return whether this is a UNet without SDXL's added conditions; of others, the check names the field."""
        return kind == cls.model_class and (config.get("addition_embed_type") == TEXT_TIME) == (cls.added == TEXT_TIME)

    def expects(self) -> Iterator[Expected]:
        """Require the store's sizes, and no inputs that it lacks."""
        yield from super().expects()
        yield self.one_of("addition_embed_type", (self.added,), "only SDXL's text_time is also supported")
        for field in OTHER_INPUTS:
            yield self.one_of(field, (None,), "no store has this UNet input")

    def draw(self, pipeline: Any, given: Mapping[str, Any], batch: Batch, negative: Batch | None = None) -> None:  # noqa: ANN401
        """Hide padding that is not stored from the UNet: the pipeline's call has no argument for it."""
        import torch

        masks = [one.token_mask for one in (negative, batch) if one is not None]
        hidden = {} if self.store.shows_padding else {"encoder_attention_mask": torch.cat(masks)}

        def add(_: nn.Module, args: tuple[Any, ...], own: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return args, {**own, **hidden}

        with pipeline.unet.register_forward_pre_hook(add, with_kwargs=True):
            super().draw(pipeline, given, batch, negative)
