"""Qwen-Image 2.1: a Qwen3-VL's last hidden state before its norm, at the caption's tokens and those of the chat after it.

Latents are not packed; the model counts them in groups of 2 by 2. Its sequence is causal: the caption, then the image.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from bucketline.families.chats import NO_PROCESSOR
from bucketline.families.family import Padding, Part
from bucketline.families.packing import NUM_TRAIN_TIMESTEPS, PATCH, place_behind_captions
from bucketline.families.qwenimage import QwenImage
from bucketline.families.references import References
from bucketline.families.seen import SeenText, num_patches

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from bucketline.loader import Batch

SEEN_PX = 32  # of a reference's side, in a token of the text encoder: 2 by 2 of the latents


class QwenImage21(SeenText):
    """Qwen-Image 2.1: takes latents as tokens and their shape, the noise as a share, tokens and two masks."""

    name = "qwenimage21"
    pipelines = ("QwenImage21Pipeline",)
    parts = (
        # the model takes later positions for those before its first one, without an error
        Part(tokenizer="processor", kind="Qwen3VL", layer="hidden_states[-1] before the norm", most_tokens=8191, is_cut=False),
    )
    padding = Padding.VALID
    results = ("tokens", "mask", None)
    processor_class = "Qwen3VLProcessor"
    tokens_beside = 7  # <image1>, a space between two, and two marks
    model_class = "QwenImage21Transformer2DModel"
    usual_tokens = 512
    image_guidance = 1.0
    embeds: ClassVar[Mapping[str, str]] = QwenImage.embeds
    guidance_argument = "true_cfg_scale"
    call_options: ClassVar[Mapping[str, Any]] = {"use_kv_cache": False}  # as in training
    pipeline_options: ClassVar[Mapping[str, Any]] = {"processor": NO_PROCESSOR}
    widths: ClassVar[Mapping[str, str]] = {"context_in_dim": "tokens"}
    alignment = PATCH
    is_sequence = True
    joins_negative = False
    scheduler = QwenImage.scheduler
    references = References(most=8, text_sees=True, come_first=True)

    @classmethod
    def cleaned(cls, pipeline: Any, captions: list[str]) -> list[str]:  # noqa: ANN401 - diffusers has no types
        """Return captions in the pipeline's chat; the empty one is a space."""
        return [pipeline.prompt_template_t2i.format(caption or " ") for caption in captions]

    @classmethod
    def num_dropped(cls, pipeline: Any, _caption: str) -> int:  # noqa: ANN401 - likewise
        """Return the number of the chat's tokens before the caption's turn."""
        return int(pipeline._drop_idx)

    @classmethod
    def refused_image(cls, pixels: Mapping[str, Any], height_px: int, width_px: int) -> str | None:
        """Return why an image cannot be encoded: also if the model has not as many places for it as the text encoder."""
        seen, places = num_patches(pixels, height_px, width_px), height_px * width_px // SEEN_PX**2
        if seen == places and not (height_px % SEEN_PX or width_px % SEEN_PX):
            return super().refused_image(pixels, height_px, width_px)
        return (
            f"an image of {height_px} by {width_px} px, height first, is {seen} tokens to the text encoder and {places} to the "
            f"model; give sides of a multiple of {SEEN_PX} px, and as many pixels as the text encoder takes unchanged"
        )

    @classmethod
    def num_places(cls, sizes: Sequence[tuple[int, int]]) -> int:
        """Return how many positions images take from a caption: each its longer side's latents, and what is beside it."""
        return sum(2 * max(size) // SEEN_PX + cls.tokens_beside for size in sizes)

    def prepare(self, model: Any) -> None:  # noqa: ANN401 - likewise
        """Place each image after its own caption."""
        place_behind_captions(model.transformer_blocks, self.config["axes_dims_rope"][0] // 2)

    def arguments(self, noisy: Tensor, timesteps: Tensor, batch: Batch) -> dict[str, Any]:
        """Lay the latents out as tokens; the image's places in the sequence are one for 2 by 2 of them."""
        (count, _, height, width), length = noisy.shape, batch.token_mask.shape[1]
        is_image = batch.token_mask.new_zeros(count, length + height * width // PATCH**2)
        is_image[:, length:] = True
        given = {
            "hidden_states": self.as_tokens(noisy),
            "timestep": timesteps / NUM_TRAIN_TIMESTEPS,
            "encoder_hidden_states": batch.tokens.float(),
            "encoder_hidden_states_mask": batch.token_mask.long(),
            "img_shapes": [[(1, height, width)]] * count,
            "img_mask": is_image,
        }
        return self.with_references(given, batch)

    def with_references(self, given: Mapping[str, Any], batch: Batch) -> dict[str, Any]:
        """Put the references before the target, each at the text's places of its own image."""
        import torch

        if not (scaled := batch.scaled_references()):
            return dict(given)
        assert batch.image_tokens is not None  # or `expects` has refused the store
        is_image = given["img_mask"].clone()
        num_tokens = min(given["encoder_hidden_states"].shape[1], batch.image_tokens.shape[1])  # negative prompts have others
        is_image[:, :num_tokens] = batch.image_tokens[:, :num_tokens]
        shapes = [(1, *one.shape[2:]) for one in scaled]
        return {
            **given,
            "hidden_states": torch.cat([*map(self.as_tokens, scaled), given["hidden_states"]], dim=1),
            "img_shapes": [[*shapes, target] for target in (own[-1] for own in given["img_shapes"])],
            "img_mask": is_image,
        }
