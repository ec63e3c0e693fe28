"""Text encoders that see a sample's images: the processor of a Qwen-VL without torchvision, and where the images' part ends.

The language models are causal, and the pipelines put images before the caption: their states do not depend on it.
Letters: T tokens, D a token's width.
"""

from __future__ import annotations

import math
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from bucketline.errors import ModelError
from bucketline.families.family import Family

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from PIL.Image import Image
    from torch import Tensor

# Of a processor's configuration, what changes the pixels or the number of patches.
PIXEL_FIELDS = (
    *("do_resize", "resample", "size", "min_pixels", "max_pixels", "do_rescale", "rescale_factor", "do_normalize"),
    *("image_mean", "image_std", "do_convert_rgb", "patch_size", "temporal_patch_size", "merge_size"),
)

MOST_ASPECT = 200  # of an image. Source: `smart_resize` of transformers' Qwen2-VL


class SeenText(Family):
    """The text half of a family whose text encoder sees the images, encoded by the pipeline's own `encode_prompt`."""

    processor_class: ClassVar[str]  # in transformers
    tokens_beside: ClassVar[int] = 2  # of each image, next to its patches: its marks, and what the pipeline writes before it
    refused_tokens = ("<|image_pad|>", "<|video_pad|>")

    @classmethod
    def pipeline_parts(cls, parts: Mapping[str, Any]) -> dict[str, Any]:
        """Make the processor of its tokenizer, and of `pixels`, the configuration of its processor of images."""
        given = dict(parts)
        pixels = given.pop("pixels", None) or {}
        return {**given, "processor": _processor(cls.processor_class, given["processor"], pixels)}

    @classmethod
    def seen_tokens(cls, pixels: Mapping[str, Any], sizes: Sequence[tuple[int, int]]) -> int:
        """Return about how many tokens images take that the text encoder sees in these sizes, in px and height first.

        `pixels`: the configuration of the model's processor of images. What is written before an image may be a token more.
        """
        return sum(num_patches(pixels, *size) + cls.tokens_beside for size in sizes)

    @classmethod
    def refused_image(cls, _pixels: Mapping[str, Any], height_px: int, width_px: int) -> str | None:
        """Return why an image of the size in which the text encoder sees it cannot be encoded; None if it can."""
        if max(height_px, width_px) > MOST_ASPECT * min(height_px, width_px):
            return f"an image of {height_px} by {width_px} px, height first: a side is more than {MOST_ASPECT} times the other"
        return None

    @classmethod
    def num_places(cls, _sizes: Sequence[tuple[int, int]]) -> int:
        """Return how many of the most tokens of a caption images of these sizes take, in px and height first."""
        return 0

    @classmethod
    def states(
        cls,
        pipeline: Any,  # noqa: ANN401 - diffusers has no types
        caption: str,
        images: Sequence[Image],
        more: Mapping[str, Any],
    ) -> tuple[Tensor, Tensor, int]:
        """Return a caption's states behind its images', [T, D], which of them are of patches, and where the caption's begin."""
        tokens = cls.encode_prompt(pipeline, [caption], {**more, "image": list(images) or None}).tokens[0]
        every = pipeline.processor.last_ids  # the pipeline leaves out those that begin its chat
        ids = every[len(every) - len(tokens) :]
        is_image = ids == pipeline.processor.image_token_id
        ends = (ids == pipeline.processor.tokenizer.convert_tokens_to_ids("<|vision_end|>")).nonzero().flatten()
        if len(ends) < len(images) or is_image.sum() < (every == pipeline.processor.image_token_id).sum():
            raise ModelError(
                f"{cls.pipelines[0]} leaves out the first {len(every) - len(tokens)} tokens of its chat, and with this "
                "tokenizer the images begin before; take the tokenizer that was published with the model"
            )
        return tokens, is_image, int(ends[len(images) - 1]) + 1 if images else 0

    @classmethod
    @contextmanager
    def seeing_once(cls, pipeline: Any) -> Iterator[None]:  # noqa: ANN401 - likewise
        """Within the block, prepare images and compute their features once: all captions are of the same ones."""
        with ExitStack() as stack:
            stack.enter_context(_once(pipeline.processor, "_process_images"))
            stack.enter_context(_once(pipeline.text_encoder.model, "get_image_features"))
            yield


def num_patches(pixels: Mapping[str, Any], height_px: int, width_px: int) -> int:
    """Return how many tokens an image takes. Source: `smart_resize` of transformers' Qwen2-VL.

    >>> num_patches({"patch_size": 14}, 384, 384), num_patches({"patch_size": 16, "max_pixels": 1 << 20}, 4096, 1024)
    (196, 1024)
    """
    factor = int(pixels.get("patch_size", 14)) * int(pixels.get("merge_size", 2))
    edges = pixels.get("size") or {}
    least = int(pixels.get("min_pixels") or edges.get("shortest_edge", 56 * 56))
    most = int(pixels.get("max_pixels") or edges.get("longest_edge", 28 * 28 * 1280))
    height, width = (round(side / factor) * factor for side in (height_px, width_px))
    if height * width > most:
        scale = math.sqrt(height_px * width_px / most)
        height, width = (max(factor, math.floor(side / scale / factor) * factor) for side in (height_px, width_px))
    elif height * width < least:
        scale = math.sqrt(least / (height_px * width_px))
        height, width = (math.ceil(side * scale / factor) * factor for side in (height_px, width_px))
    return height * width // factor**2


def _processor(kind: str, tokenizer: Any, pixels: Mapping[str, Any]) -> Any:  # noqa: ANN401 - transformers has no types
    """Return a processor of a class of transformers, without videos; images are resized by Pillow, whatever is installed.

    `last_ids`: the tokens of the first text that it was called with last.
    """
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    base: Any = getattr(transformers, kind)

    class Processor(base):  # type: ignore[misc] # transformers has no types
        def check_argument_for_proper_class(self, name: str, part: Any) -> Any:  # noqa: ANN401 - as transformers has it
            """Pass the absent processor of videos, whose class needs torchvision."""
            return object if name == "video_processor" else super().check_argument_for_proper_class(name, part)

        def __call__(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - likewise
            found = super().__call__(*args, **options)
            self.last_ids = found["input_ids"][0]
            return found

    images = Qwen2VLImageProcessorPil(**pixels)
    return Processor(images, tokenizer, None, tokenizer.chat_template)


@contextmanager
def _once(owner: Any, name: str) -> Iterator[None]:  # noqa: ANN401 - a processor or a module
    """Within the block, answer every call of a method with what its first one returned."""
    own, answers = getattr(owner, name), list[Any]()

    def answer(*args: Any, **options: Any) -> Any:  # noqa: ANN401 - as the method's
        if not answers:
            answers.append(own(*args, **options))
        return answers[0]

    setattr(owner, name, answer)
    try:
        yield
    finally:
        delattr(owner, name)
