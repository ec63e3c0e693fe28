"""SDXL: penultimate hidden states of two CLIPs, concatenated, and the pooled embedding of the second; a UNet told the sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from bucketline.families.family import PENULTIMATE_CLIP, Expected, Part, variants
from bucketline.families.stable_diffusion import TEXT_TIME, StableDiffusion
from bucketline.store.format.block import POOLED

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from bucketline.families.family import Model
    from bucketline.loader import Batch

NUM_SIZES = 6


class Sdxl(StableDiffusion):
    """SDXL: takes the inputs of Stable Diffusion, plus `text_embeds` and `time_ids`."""

    name = "sdxl"
    pipelines = variants(
        "StableDiffusionXL", "Img2Img Inpaint ControlNet ControlNetImg2Img ControlNetInpaint ControlNetUnion ControlNetXS"
    )
    parts = (
        Part(layer="hidden_states[-2]", kind="CLIPText", has_positions=False, is_optional=True),  # the refiner lacks it
        Part(encoder="text_encoder_2", tokenizer="tokenizer_2", kind="CLIPText", **PENULTIMATE_CLIP),
    )
    index_options = ("force_zeros_for_empty_prompt",)  # whether the model sees zeros for the empty caption, as by default
    results = ("tokens", None, POOLED, None)
    image_guidance = 5.0
    columns = ("tokens", POOLED)
    added = TEXT_TIME
    embeds: ClassVar[Mapping[str, str]] = {"prompt_embeds": "tokens", "pooled_prompt_embeds": POOLED}
    pipeline_options: ClassVar[Mapping[str, Any]] = {"add_watermarker": False}

    @classmethod
    def stored_width(cls, _model: Model, configs: Mapping[str, Any]) -> int:
        """Return both encoders' width together."""
        return sum(config.hidden_size for config in configs.values())

    @property
    def pooled_width(self) -> int:
        """The width that the sizes leave of the added conditions."""
        return self.number("projection_class_embeddings_input_dim") - NUM_SIZES * self.number("addition_time_embed_dim")

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
        pooled, each = self.store.text[POOLED], self.number("addition_time_embed_dim")
        because = (
            f"the store's pooled embeddings are {pooled} wide, and {NUM_SIZES} sizes of addition_time_embed_dim {each} follow"
        )
        yield self.one_of("projection_class_embeddings_input_dim", (pooled + NUM_SIZES * each,), because)

    def arguments(self, noisy: Tensor, timesteps: Tensor, batch: Batch) -> dict[str, Any]:
        """Add the pooled embedding, the sizes and the crop. Source: `StableDiffusionXLPipeline._get_add_time_ids`."""
        import torch

        assert batch.pooled is not None
        sizes = torch.cat([batch.original_size, batch.crop, batch.target_size], dim=1)  # [B, 6]
        added = {"text_embeds": batch.pooled.float(), "time_ids": sizes.float()}
        return {**super().arguments(noisy, timesteps, batch), "added_cond_kwargs": added}
