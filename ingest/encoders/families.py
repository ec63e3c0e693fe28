"""Which encoder a model folder's captions go through: by its index, else by which parts are there."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from bucketline.errors import ModelError
from bucketline.ingest.encoders import flux, pixart, sd, sd3, sdxl
from bucketline.ingest.encoders.class_labels import ClassLabels, refuse_length
from bucketline.ingest.encoders.prompt_family import Family, PromptEncoder
from bucketline.ingest.encoders.text import TextEncoder

if TYPE_CHECKING:
    import torch

    from bucketline.ingest.encoders.captions import CaptionEncoder, TextSettings
    from bucketline.ingest.encoders.model_folder import ModelFolder

# Pipelines whose `encode_prompt` diffusers copies from the family's own. Others may look alike and encode otherwise.
_BY_PIPELINE: dict[str, Family] = {
    r"StableDiffusion(Img2Img|Inpaint)?Pipeline": sd.FAMILY,
    r"StableDiffusionXL(Img2Img|Inpaint)?Pipeline": sdxl.FAMILY,
    r"StableDiffusion3(Img2Img|Inpaint)?Pipeline": sd3.FAMILY,
    r"Flux(Img2Img|Inpaint)?Pipeline": flux.FAMILY,
    r"PixArtAlphaPipeline": pixart.ALPHA,
    r"PixArtSigmaPipeline": pixart.SIGMA,
}
UNNAMED = "?"  # an architecture that the configuration does not give
_CLASS_CONDITIONAL = "DiTPipeline"
_DIT_CLASSES = ("DiTTransformer2DModel", "Transformer2DModel")


def load_caption_encoder(model: ModelFolder, device: torch.device, settings: TextSettings) -> CaptionEncoder:
    """Load what encodes a model's captions.

    Raises:
        ModelError: where a part is missing or cannot be loaded, or the model has several text encoders and no known family.
        UsageError: where a length is asked for that the family cannot give.
    """
    kind = family_of(model)
    if isinstance(kind, Family):
        return PromptEncoder(kind, model, device, settings)
    if kind is ClassLabels:
        refuse_length(model, settings.max_tokens)
        return ClassLabels(model)
    return TextEncoder(model, device, settings.stored_dtype, settings)


def family_of(model: ModelFolder) -> Family | type[ClassLabels | TextEncoder]:
    """Say which family a model belongs to: `TextEncoder` for a single text encoder of none that is known.

    Raises:
        ModelError: where there are several text encoders, and nothing says how they go together.
    """
    pipeline = model.index().get("_class_name")
    if pipeline is None:
        return _by_parts(model)
    for pattern, family in _BY_PIPELINE.items():
        if re.fullmatch(pattern, str(pipeline)):
            # the family is a CLIP at all positions; a model may borrow the class for another encoder, as the demo's does
            is_other = family is sd.FAMILY and not _architecture(model, "text_encoder").startswith(("CLIPText", UNNAMED))
            return TextEncoder if is_other else family
    if pipeline == _CLASS_CONDITIONAL:
        return ClassLabels
    if model.has("text_encoder_2"):
        raise ModelError(
            f"{model.name}: its pipeline {pipeline!s:.80} has several text encoders, and how they go together is not known; "
            "expected SDXL, SD3 or Flux, or a model of one text encoder"
        )
    return TextEncoder


def _by_parts(model: ModelFolder) -> Family | type[ClassLabels | TextEncoder]:
    transformer = model.config("transformer") or {}
    kind = transformer.get("_class_name")
    if not model.has("text_encoder") and not model.has("text_encoder_2"):
        is_dit = kind in _DIT_CLASSES and transformer.get("num_embeds_ada_norm") is not None
        return ClassLabels if is_dit else TextEncoder
    if kind == "SD3Transformer2DModel" or model.has("text_encoder_3"):
        return sd3.FAMILY
    first, second = (_architecture(model, name) for name in ("text_encoder", "text_encoder_2"))
    if second.startswith("T5"):
        return flux.FAMILY
    if second.startswith("CLIPText"):
        return sdxl.FAMILY
    if kind == "PixArtTransformer2DModel":
        return pixart.ALPHA  # nothing tells it from Sigma, which takes longer captions; --max-tokens 300 gives these
    return sd.FAMILY if first.startswith("CLIPText") and model.has("unet") else TextEncoder


def _architecture(model: ModelFolder, part: str) -> str:
    named = (model.config(part) or {}).get("architectures") or [UNNAMED]
    return str(named[0])
