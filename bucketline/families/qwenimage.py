"""Qwen-Image: the last hidden state of a Qwen2.5-VL at the caption's own tokens and those of the chat after it.

The pipeline puts each caption into a chat, and drops the tokens before it. It leaves out a mask of ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from bucketline.families.family import Family, Padding, Part, variants
from bucketline.families.packing import NUM_TRAIN_TIMESTEPS, PATCH, flow, pack

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from bucketline.loader import Batch


class QwenImage(Family):
    """Qwen-Image: takes packed latents and their shape, the noise as a share, tokens and their mask."""

    name = "qwenimage"
    pipelines = variants("QwenImage", "Img2Img Inpaint ControlNet ControlNetInpaint")
    parts = (Part(kind="Qwen2_5_VL", layer="hidden_states[-1]", is_open=True, most_tokens=1024),)
    padding = Padding.VALID
    results = ("tokens", "mask")
    model_class = "QwenImageTransformer2DModel"
    usual_tokens = 512
    image_guidance = 4.0
    embeds: ClassVar[Mapping[str, str]] = {"prompt_embeds": "tokens", "prompt_embeds_mask": "mask"}
    guidance_argument = "true_cfg_scale"
    widths: ClassVar[Mapping[str, str]] = {"joint_attention_dim": "tokens"}
    packing = PATCH
    unused_layers = (".to_add_out.", ".txt_mlp.")  # the last block's text goes nowhere
    packs_answer = False  # its `out_channels` are those of a patch's positions
    scheduler = flow(  # as published with Qwen-Image
        1.0, use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
    )

    @classmethod
    def cleaned(cls, pipeline: Any, captions: list[str]) -> list[str]:  # noqa: ANN401 - diffusers has no types
        """Return captions in the pipeline's chat."""
        return [pipeline.prompt_template_encode.format(caption) for caption in captions]

    @classmethod
    def positions_per_token(cls, _config: Mapping[str, Any]) -> int:
        """Return 2: `patch_size` is what the packing makes, not a further division."""
        return PATCH

    def arguments(self, noisy: Tensor, timesteps: Tensor, batch: Batch) -> dict[str, Any]:
        """Pack the latents, and give the noise as a share, the latents' shape in tokens, and the mask as the pipeline does."""
        shape = (1, noisy.shape[2] // PATCH, noisy.shape[3] // PATCH)
        given = {
            "hidden_states": pack(noisy),
            "timestep": timesteps / NUM_TRAIN_TIMESTEPS,
            "encoder_hidden_states": batch.tokens.float(),
            "encoder_hidden_states_mask": batch.token_mask.long(),
            "img_shapes": [[shape]] * len(noisy),
        }
        return self.with_references(given, batch)
