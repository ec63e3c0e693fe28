"""Ideogram 4: 13 hidden states of a Qwen3-VL side by side, at all tokens of a chat; a token of latents has its channels last.

One sequence: padding, the caption, the image. The pipeline guides by a second transformer, which is not trained here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from bucketline.families.family import Family, Padding, Part
from bucketline.families.packing import NUM_TRAIN_TIMESTEPS, PATCH, by_pixels, flow, grid_ids, padded_left

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from bucketline.loader import Batch

IS_IMAGE, IS_TEXT, IMAGE_POSITION = 2, 3, 65536  # the model's numbers of a place's role, and of the image's first position


class Ideogram4(Family):
    """Ideogram 4: takes text and image as one sequence, each place's position, segment and role, and the image's share."""

    name = "ideogram4"
    pipelines = ("Ideogram4Pipeline",)
    parts = (Part(kind="Qwen3VL", layer="layers[0, 3, ..., 33, 35]", is_open=True, most_tokens=2048, is_cut=False),)
    padding = Padding.VALID
    results = ("tokens", None, None, "mask")
    num_layers = 13
    prompt_options: ClassVar[Mapping[str, Any]] = {"grid_h": 0, "grid_w": 0}  # of the image: none
    model_class = "Ideogram4Transformer2DModel"
    usual_tokens = 2048
    image_guidance = 1.0
    is_guidable = False
    call_options: ClassVar[Mapping[str, Any]] = {"guidance_schedule": None}
    widths: ClassVar[Mapping[str, str]] = {"llm_features_dim": "tokens"}
    packing = PATCH
    puts_channels_last = True
    points_to_image = True
    other_names: ClassVar[Mapping[str, str]] = {".to_out.0": ".o"}
    noise_levels = by_pixels
    scheduler = flow(1.0)
    lora_targets = (*Family.lora_targets, "w1", "w2", "w3")

    @classmethod
    def cleaned(cls, pipeline: Any, captions: list[str]) -> list[str]:  # noqa: ANN401 - diffusers has no types
        """Return captions in the tokenizer's chat."""
        chats = ([{"role": "user", "content": [{"type": "text", "text": caption}]}] for caption in captions)
        return [pipeline.tokenizer.apply_chat_template(one, tokenize=False, add_generation_prompt=True) for one in chats]

    def arguments(self, noisy: Tensor, timesteps: Tensor, batch: Batch) -> dict[str, Any]:
        """Put the caption before the image, padded on the left, and say of each place what it is."""
        import torch
        from torch.nn.functional import pad

        (height, width), length = (side // PATCH for side in noisy.shape[2:]), batch.tokens.shape[1]
        tokens, is_text = padded_left(batch.tokens.float(), batch.token_mask)
        places = (is_text.cumsum(dim=1) - 1).clamp(min=0)[:, :, None].expand(-1, -1, 3)
        image, size = grid_ids(noisy, (1, height, width, 1))[:, :, :3] + IMAGE_POSITION, (0, height * width)
        return {
            "hidden_states": pad(self.as_tokens(noisy), (0, 0, length, 0)),
            "timestep": 1.0 - timesteps / NUM_TRAIN_TIMESTEPS,
            "encoder_hidden_states": pad(tokens, (0, 0, *size)),
            "position_ids": torch.cat([places, image], dim=1),
            "segment_ids": pad(is_text * 2 - 1, size, value=1),
            "indicator": pad(is_text * IS_TEXT, size, value=IS_IMAGE),
        }

    def draw(self, pipeline: Any, given: Mapping[str, Any], batch: Batch, negative: Batch | None = None) -> None:  # noqa: ANN401
        """Hand the pipeline what its call would make of the captions; without guidance, the second model counts for nothing."""
        assert negative is None
        height, width = (given[side] // pipeline.vae_scale_factor for side in ("height", "width"))
        noisy = self.unpacked(given["latents"], height, width)
        _, _, *conditions = self.arguments(noisy, noisy[:, 0, 0, 0], batch).values()
        pipeline.encode_prompt = lambda **_: conditions
        pipeline.unconditional_transformer = pipeline.transformer
        pipeline(prompt=[""] * len(noisy), max_sequence_length=batch.tokens.shape[1], **given)
