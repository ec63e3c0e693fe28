"""Choose the caption encoder of a model folder: by its index, else by its parts."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from bucketline.errors import ModelError
from bucketline.ingest.encoders.families import flux, pixart, sd, sd3, sdxl
from bucketline.ingest.encoders.families.any_transformer import TextEncoder
from bucketline.ingest.encoders.families.class_labels import ClassLabels, refuse_length
from bucketline.ingest.encoders.families.family import TextFamily
from bucketline.ingest.encoders.families.pipeline_encoder import PromptEncoder
from bucketline.ingest.encoders.text_model import UNNAMED, named_architecture
from bucketline.store.format.columns import TOKENS

if TYPE_CHECKING:
    import torch

    from bucketline.ingest.encoders.model_folder import ModelFolder
    from bucketline.ingest.encoders.text_columns import CaptionEncoder, Embedding, TextSettings

# Pipelines whose `encode_prompt` diffusers copies from the family's own. Similar ones may encode differently.
_BY_PIPELINE: dict[str, TextFamily] = {
    r"StableDiffusion(Img2Img|Inpaint)?Pipeline": sd.FAMILY,
    r"StableDiffusionXL(Img2Img|Inpaint)?Pipeline": sdxl.FAMILY,
    r"StableDiffusion3(Img2Img|Inpaint)?Pipeline": sd3.FAMILY,
    r"Flux(Img2Img|Inpaint)?Pipeline": flux.FAMILY,
    r"PixArtAlphaPipeline": pixart.ALPHA,
    r"PixArtSigmaPipeline": pixart.SIGMA,
}
_CLASS_CONDITIONAL = "DiTPipeline"
_DIT_CLASSES = ("DiTTransformer2DModel", "Transformer2DModel")


def load_caption_encoder(model: ModelFolder, device: torch.device, settings: TextSettings) -> CaptionEncoder:
    """Load the caption encoder of a model.

    Raises:
        ModelError: if a part is missing or cannot be loaded, the model has several text encoders of no known family, or the
            embedding of its empty caption is not finite.
        UsageError: if the family does not support the requested length.
    """
    encoder = _load(model, device, settings)
    _refuse_bad_empty_caption(model, encoder.encode([""])[0], settings.stored_dtype)
    return encoder


def _load(model: ModelFolder, device: torch.device, settings: TextSettings) -> CaptionEncoder:
    kind = family_of(model)
    if isinstance(kind, TextFamily):
        return PromptEncoder(kind, model, device, settings)
    if kind is ClassLabels:
        refuse_length(model, settings.max_tokens)
        return ClassLabels(model)
    return TextEncoder(model, device, settings)


def _refuse_bad_empty_caption(model: ModelFolder, empty: Embedding, dtype: str) -> None:
    """Refuse a model whose empty caption cannot be stored, since every shard has it and every dropped caption becomes it."""
    if empty.is_finite:
        return
    columns = {TOKENS: empty.tokens, **empty.fixed}
    bad = next((name for name, values in columns.items() if not bool(values.isfinite().all())), TOKENS)
    raise ModelError(
        f"{model.name}: the empty caption's {bad} are not finite as {dtype}; every dropped caption would become it. "
        "Try --text-dtype BF16 or F32 and --encode-dtype F32, or download the model again"
    )


def family_of(model: ModelFolder) -> TextFamily | type[ClassLabels | TextEncoder]:
    """Return the family of a model; `TextEncoder` for a single text encoder of no known family.

    Raises:
        ModelError: if there are several text encoders of no known family.
    """
    pipeline = model.index().get("_class_name")
    if pipeline is None:
        return _by_parts(model)
    for pattern, family in _BY_PIPELINE.items():
        if re.fullmatch(pattern, str(pipeline)):
            # this family is a CLIP; a model may reuse the pipeline class with another encoder, as the demo's does
            is_other = family is sd.FAMILY and not _architecture(model, "text_encoder").startswith(("CLIPText", UNNAMED))
            return TextEncoder if is_other else family
    if pipeline == _CLASS_CONDITIONAL:
        return ClassLabels
    if model.has("text_encoder_2"):
        raise ModelError(
            f"{model.name}: its pipeline {pipeline!s:.80} has several text encoders, and how it combines them is unknown; "
            "expected SDXL, SD3 or Flux, or a model with one text encoder"
        )
    return TextEncoder


def _by_parts(model: ModelFolder) -> TextFamily | type[ClassLabels | TextEncoder]:
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
        return pixart.ALPHA  # indistinguishable from Sigma, which takes longer captions; --max-tokens 300 allows them
    return sd.FAMILY if first.startswith("CLIPText") and model.has("unet") else TextEncoder


def _architecture(model: ModelFolder, part: str) -> str:
    return named_architecture((model.config(part) or {}).get("architectures"))
