"""Choose the caption encoder of a model folder: by its index, else by its parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from bucketline.errors import ModelError
from bucketline.ingest.encoders.families import flux, pixart, sd, sd3, sdxl
from bucketline.ingest.encoders.families.any_transformer import TextEncoder
from bucketline.ingest.encoders.families.class_labels import ClassLabels, refuse_length
from bucketline.ingest.encoders.families.family import TextFamily
from bucketline.ingest.encoders.families.pipeline_encoder import PromptEncoder
from bucketline.ingest.encoders.families.pipelines import CLASS_CONDITIONAL, FAMILY_OF, known_pipelines
from bucketline.ingest.encoders.text_model import UNNAMED, named_architecture
from bucketline.store.format.columns import TOKENS

if TYPE_CHECKING:
    import torch

    from bucketline.ingest.encoders.model_folder import ModelFolder
    from bucketline.ingest.encoders.text_columns import CaptionEncoder, Embedding, TextSettings

_FAMILIES: dict[str, TextFamily] = {
    family.name: family for family in (sd.FAMILY, sdxl.FAMILY, sd3.FAMILY, flux.FAMILY, pixart.ALPHA, pixart.SIGMA)
}
_DIT_CLASSES = ("DiTTransformer2DModel", "Transformer2DModel")
# Without an index, the denoiser names the family; a PixArt is taken for Alpha, since only the length of captions tells
# it from Sigma, and --max-tokens 300 allows Sigma's.
_BY_TRANSFORMER: dict[str, TextFamily] = {
    "SD3Transformer2DModel": sd3.FAMILY,
    "FluxTransformer2DModel": flux.FAMILY,
    "PixArtTransformer2DModel": pixart.ALPHA,
}
# Encoders that models take the last hidden state of. A language model gets a prompt around the caption, or another layer
# is taken, and only its pipeline knows which.
_PLAIN_ENCODERS = ("Bert", "CLIPText", "DistilBert", "MPNet", "MT5", "Roberta", "T5", "UMT5", "XLMRoberta")
_PLAIN_TYPES = ("bert", "clip_text_model", "distilbert", "mpnet", "mt5", "roberta", "t5", "umt5", "xlm-roberta")

_ENCODERS = ["text_encoder", "text_encoder_2", "text_encoder_3", "text_encoder_4"]
_PROJECTED = "CLIPTextModelWithProjection"  # SDXL's first encoder has no projection, SD3's has
_UNETS = ("UNet2DConditionModel", "None")
_MAX_NAME = 80

_Kind: TypeAlias = "TextFamily | type[ClassLabels | TextEncoder]"


def load_caption_encoder(model: ModelFolder, device: torch.device, settings: TextSettings) -> CaptionEncoder:
    """Load the caption encoder of a model.

    Raises:
        ModelError: if a part is missing or cannot be loaded, how its pipeline encodes captions is not known, or the
            embedding of its empty caption is not finite.
        UsageError: if the family does not support the requested length.
    """
    encoder = _load(model, device, settings)
    _refuse_bad_empty_caption(model, encoder.encode([""])[0], settings.stored_dtype)
    return encoder


def _load(model: ModelFolder, device: torch.device, settings: TextSettings) -> CaptionEncoder:
    kind = family_of(model, is_plain=settings.is_plain)
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


def family_of(model: ModelFolder, *, is_plain: bool = False) -> _Kind:
    """Return the family of a model; `TextEncoder` if its only text encoder's last hidden state is stored.

    `is_plain`: the user wants that, whatever the model's pipeline does (`--text plain`).

    Raises:
        ModelError: if the model names a pipeline, or without one a denoiser, that is not known: how it encodes captions is
            not either.
    """
    if is_plain:
        return _plain(model)
    pipeline = model.index().get("_class_name")
    if pipeline is None:
        return _by_parts(model)
    name = str(pipeline)[:_MAX_NAME]
    if name == CLASS_CONDITIONAL:
        return ClassLabels
    if name not in FAMILY_OF:
        raise _unknown(model, f"its pipeline is {name}", name)
    family = _FAMILIES[FAMILY_OF[name]]
    if family is sd.FAMILY and not _architecture(model, "text_encoder").startswith(("CLIPText", UNNAMED)):
        # a model may reuse the pipeline class with another encoder, as the demo's does
        return _plain_if_usual(model, f"its pipeline is {name}, which takes a CLIPTextModel", name)
    return family


def is_known(model: ModelFolder) -> bool:
    """Return True if the model tells how it encodes captions."""
    try:
        family_of(model)
    except ModelError:
        return False
    return True


def _unknown(model: ModelFolder, found: str, name: str) -> ModelError:
    """Return the error for a model of which nothing tells how it encodes captions; `found` says what was found."""
    others = [part for part in _ENCODERS[1:] if model.has(part)]
    remedy = (
        "it has several text encoders, and how it combines them is not known; expected a model of a known pipeline"
        if others
        else "name a model of a known pipeline, or add --text plain to store the last hidden state of its text encoder, "
        "without any prompt that its pipeline puts around captions"
    )
    return ModelError(f"{model.name}: {found}, and how that encodes captions is not known ({known_pipelines(name)}); {remedy}")


def _plain(model: ModelFolder) -> _Kind:
    if others := [part for part in _ENCODERS[1:] if model.has(part)]:
        raise ModelError(
            f"{model.name} has several text encoders (text_encoder, {', '.join(others)}), and --text plain stores one's last "
            "hidden state; leave it out, or name a model with one text encoder"
        )
    return TextEncoder


def _plain_if_usual(model: ModelFolder, found: str, name: str) -> _Kind:
    """Return `TextEncoder` for a model whose encoder's last hidden state is what models usually take."""
    architecture = _architecture(model, "text_encoder")
    kind = (model.config("text_encoder") or {}).get("model_type")
    if architecture.startswith((*_PLAIN_ENCODERS, UNNAMED)) or kind in _PLAIN_TYPES:
        return TextEncoder
    raise _unknown(model, f"{found}, and its text encoder a {architecture[:_MAX_NAME]}", name)


def _by_parts(model: ModelFolder) -> _Kind:
    transformer, unet = model.config("transformer"), model.config("unet")
    kind = str(((unet if transformer is None else transformer) or {}).get("_class_name"))[:_MAX_NAME]
    encoders = [part for part in _ENCODERS if model.has(part)]
    if not encoders:
        is_dit = kind in _DIT_CLASSES and (transformer or {}).get("num_embeds_ada_norm") is not None
        return ClassLabels if is_dit else TextEncoder
    if transformer is not None and kind in _BY_TRANSFORMER:
        return _BY_TRANSFORMER[kind]
    if transformer is not None or (unet is not None and kind not in _UNETS):
        part = "unet" if transformer is None else "transformer"
        raise _unknown(model, f"it has no model_index.json, its {part} is a {kind}", kind)
    if encoders == _ENCODERS[:1]:
        is_sd = unet is not None and _architecture(model, encoders[0]).startswith("CLIPText")
        return sd.FAMILY if is_sd else _plain_if_usual(model, "it has no model_index.json", "")
    return _by_text_encoders(model, encoders, has_unet=unet is not None)


def _by_text_encoders(model: ModelFolder, encoders: list[str], *, has_unet: bool) -> _Kind:
    """Return the family of a model that has several text encoders, or only the second (SDXL's refiner), and no transformer."""
    first, second, third = (_architecture(model, part) for part in _ENCODERS[:3])
    is_clip = second.startswith("CLIPText")
    if _ENCODERS[3] not in encoders:
        if is_clip and (third.startswith("T5") or (not has_unet and first.startswith(_PROJECTED))):
            return sd3.FAMILY
        if second.startswith("T5") and first.startswith("CLIPText"):
            return flux.FAMILY
        if is_clip and _ENCODERS[2] not in encoders:
            return sdxl.FAMILY
    raise _unknown(model, f"it has no model_index.json, and {', '.join(encoders)}", "")


def _architecture(model: ModelFolder, part: str) -> str:
    return named_architecture((model.config(part) or {}).get("architectures"))
