"""Qwen-Image-Edit: Qwen-Image with one reference behind the target's tokens, which the text encoder sees before the caption."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bucketline.families.family import Part
from bucketline.families.packing import PATCH
from bucketline.families.qwenimage import QwenImage
from bucketline.families.references import References
from bucketline.families.seen import SeenText

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bucketline.loader import Batch


class QwenImageEdit(SeenText, QwenImage):
    """Qwen-Image-Edit: takes what Qwen-Image does, and the references' latents and shapes, in order."""

    name = "qwenimage_edit"
    pipelines = ("QwenImageEditPipeline",)
    # its pipeline cuts no captions, whatever `max_sequence_length` is; that may be 1024 at most
    parts = (Part(tokenizer="processor", kind="Qwen2_5_VL", layer="hidden_states[-1]", most_tokens=1024, is_cut=False),)
    processor_class = "Qwen2VLProcessor"
    references = References(most=1, least=1, text_sees=True)

    @classmethod
    def num_dropped(cls, pipeline: Any, caption: str) -> int:  # noqa: ANN401 - diffusers has no types
        """Return the number of the chat's tokens before the caption: also of the three that stand for the image."""
        return super().num_dropped(pipeline, caption) + 3

    def with_references(self, given: Mapping[str, Any], batch: Batch) -> dict[str, Any]:
        """Put the references behind the target; of a pipeline's call, only the target's shape is kept."""
        import torch

        scaled = batch.scaled_references()
        shapes = [(1, one.shape[2] // PATCH, one.shape[3] // PATCH) for one in scaled]
        return {
            **given,
            "hidden_states": torch.cat([given["hidden_states"], *map(self.as_tokens, scaled)], dim=1),
            "img_shapes": [[target, *shapes] for target, *_ in given["img_shapes"]],
        }

    def draw(self, pipeline: Any, given: Mapping[str, Any], batch: Batch, negative: Batch | None = None) -> None:  # noqa: ANN401
        """Call the pipeline with an image that is not used: it takes none as latents, and `with_references` has them."""
        from PIL import Image

        pipeline.prepare_latents = lambda *arguments: (arguments[-1], None)  # the noise, and no latents of images
        super().draw(pipeline, {**given, "image": Image.new("RGB", (32, 32))}, batch, negative)
