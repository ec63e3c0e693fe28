"""Z-Image: the hidden state before the last of a Qwen3 at the tokens of a chat of the caption; the model sees no padding.

The model's time is 0 at noise and 1 at the image, and its prediction points from noise to the image.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from bucketline.families.chats import user_turn
from bucketline.families.family import Family, Padding, Part, own_tokens, variants
from bucketline.families.packing import NUM_TRAIN_TIMESTEPS, flow

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from bucketline.loader import Batch


class ZImage(Family):
    """Z-Image: takes lists of latents, with a frame axis, and of tokens; and the share of the image."""

    name = "z_image"
    pipelines = variants("ZImage", "Img2Img Inpaint ControlNet ControlNetInpaint")
    parts = (Part(kind="Qwen3", layer="hidden_states[-2]", is_open=True),)
    padding = Padding.VALID
    model_class = "ZImageTransformer2DModel"
    usual_tokens = 512
    image_guidance = 5.0
    no_guidance = 0.0
    points_to_image = True
    has_own_lengths = True
    embeds: ClassVar[Mapping[str, str]] = {"prompt_embeds": "own tokens"}
    widths: ClassVar[Mapping[str, str]] = {"cap_feat_dim": "tokens"}
    scheduler = flow(3.0)  # as published with Z-Image-Turbo

    @classmethod
    def cleaned(cls, pipeline: Any, captions: list[str]) -> list[str]:  # noqa: ANN401 - diffusers has no types
        """Return captions in the pipeline's chat."""
        return [user_turn(pipeline.tokenizer, caption, thinks=True) for caption in captions]

    @classmethod
    def positions_per_token(cls, config: Mapping[str, Any]) -> int:
        """Return the patch size that the pipeline takes."""
        sizes = config.get("all_patch_size")
        return int(sizes[0]) if isinstance(sizes, list | tuple) and sizes else 2

    def arguments(self, noisy: Tensor, timesteps: Tensor, batch: Batch) -> dict[str, Any]:
        """Return latents with a frame axis, the share of the image, and each caption's own tokens."""
        return {
            "x": list(noisy[:, :, None].unbind(dim=0)),
            "t": (NUM_TRAIN_TIMESTEPS - timesteps) / NUM_TRAIN_TIMESTEPS,
            "cap_feats": own_tokens(batch),
        }

    def answer(self, output: Sequence[Tensor], noisy: Tensor) -> Tensor:  # type: ignore[override] # the model's is a list
        """Put the predictions together, and turn them around."""
        import torch

        return super().answer(torch.stack(list(output)), noisy)
