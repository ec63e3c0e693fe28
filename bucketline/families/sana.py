"""Sana: the last hidden state of a Gemma 2 at the caption's own tokens; the model masks the others.

An instruction comes before each caption, of whose tokens the first and the last are kept. The empty caption has none: it is the
pipeline's negative prompt. Captions are lowercased and stripped, as the pipeline does with `clean_caption` off.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, ClassVar

from bucketline.families.family import Family, Padding, Part
from bucketline.families.packing import flow

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from bucketline.families.family import Encoded
    from bucketline.loader import Batch
    from bucketline.typed_json import Json


class Sana(Family):
    """Sana: takes latents of an AutoencoderDC, timesteps, tokens and their mask."""

    name = "sana"
    pipelines = ("SanaPipeline",)
    parts = (Part(kind="Gemma2", is_open=True),)
    padding = Padding.VALID
    results = ("tokens", "mask", "empty tokens", "empty mask")
    prompt_options: ClassVar[Mapping[str, Any]] = {"clean_caption": False}
    model_class = "SanaTransformer2DModel"
    usual_tokens = 300
    image_guidance = 4.5
    embeds: ClassVar[Mapping[str, str]] = {"prompt_embeds": "tokens", "prompt_attention_mask": "mask"}
    call_options: ClassVar[Mapping[str, Any]] = {"negative_prompt": None, "use_resolution_binning": False}
    widths: ClassVar[Mapping[str, str]] = {"caption_channels": "tokens"}
    out_channels = (None, 1, 2)
    lora_targets = ("to_q", "to_k", "to_v")
    scheduler = flow(3.0)  # the shift of the DPM solver published with it

    @classmethod
    def encode_prompt(cls, pipeline: Any, captions: list[str], more: Mapping[str, Any]) -> Encoded:  # noqa: ANN401 - diffusers has no types
        """Encode captions after the instruction that the pipeline puts before them by default."""
        return super().encode_prompt(pipeline, captions, {**more, "complex_human_instruction": _instruction(pipeline)})

    @classmethod
    def cleaned(cls, pipeline: Any, captions: list[str]) -> list[str]:  # noqa: ANN401 - likewise
        """Return captions with the instruction; the empty one without it."""
        before = "\n".join(_instruction(pipeline))
        plain: list[str] = pipeline._text_preprocessing(captions, clean_caption=False)
        return [before + one if caption else one for one, caption in zip(plain, captions, strict=True)]

    @classmethod
    def num_dropped(cls, pipeline: Any, caption: str) -> int:  # noqa: ANN401 - likewise
        """Return the tokens of the instruction but for two; none for the empty caption."""
        return len(pipeline.tokenizer.encode("\n".join(_instruction(pipeline)))) - 2 if caption else 0

    @classmethod
    def takes(cls, kind: str, config: Mapping[str, Json]) -> bool:
        """Return whether it is a Sana, but not a Sana Sprint, which is told the guidance and predicts something else."""
        return kind == cls.model_class and not config.get("guidance_embeds")

    def arguments(self, noisy: Tensor, timesteps: Tensor, batch: Batch) -> dict[str, Any]:
        """Return latents, timesteps by the model's scale, tokens and their mask."""
        return super().arguments(noisy, timesteps * self.config.get("timestep_scale", 1.0), batch)


def _instruction(pipeline: Any) -> list[str]:  # noqa: ANN401 - likewise
    """Return the lines that the pipeline puts before a caption."""
    lines: list[str] = inspect.signature(pipeline.__call__).parameters["complex_human_instruction"].default
    return lines
