"""PRX: the last hidden state of a T5Gemma's encoder at the caption's own tokens; the model masks the others.

The pipeline cleans captions before it encodes them (lower case, no addresses, no Chinese), and so do stores. It needs ftfy.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

from bucketline.errors import ModelError
from bucketline.families.family import Family, Padding, Part
from bucketline.families.packing import flow

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bucketline.families.family import Model


class Prx(Family):
    """PRX: takes latents of an AutoencoderKL or AutoencoderDC, the noise as a share, tokens and their mask."""

    name = "prx"
    pipelines = ("PRXPipeline",)
    parts = (Part(kind="T5Gemma"),)
    padding = Padding.VALID
    results = ("tokens", "mask", None, None)
    model_class = "PRXTransformer2DModel"
    usual_tokens = 256
    image_guidance = 4.0
    most_drawn = 1  # its pipeline gives the model two timesteps with guidance, whatever the batch
    embeds: ClassVar[Mapping[str, str]] = {"prompt_embeds": "tokens", "prompt_attention_mask": "mask"}
    call_options: ClassVar[Mapping[str, Any]] = {"negative_prompt": None, "use_resolution_binning": False}
    widths: ClassVar[Mapping[str, str]] = {"context_in_dim": "tokens"}
    scheduler = flow(3.0)  # as diffusers' conversion script writes it
    has_lora_loader = False  # its pipeline has that of a UNet
    is_told_share = True
    renames: ClassVar[Mapping[str, str]] = {"encoder_attention_mask": "attention_mask"}
    lora_targets = ("img_qkv_proj", "txt_kv_proj", "to_out.0")

    @classmethod
    def extras(cls, model: Model) -> dict[str, Any]:
        """Check that what the pipeline cleans captions with is there."""
        if find_spec("ftfy") is None:
            raise ModelError(f"{model.name}: PRXPipeline cleans captions with ftfy, which is not installed; pip install ftfy")
        return {}

    @classmethod
    def stored_width(cls, _model: Model, configs: Mapping[str, Any]) -> int:
        """Return the encoder's width; its published configuration is that of an encoder and a decoder."""
        config = configs["text_encoder"]
        return int(getattr(config, "encoder", config).hidden_size)

    @classmethod
    def cleaned(cls, pipeline: Any, captions: list[str]) -> list[str]:  # noqa: ANN401 - diffusers has no types
        return [pipeline.text_preprocessor.clean_text(caption) for caption in captions]
