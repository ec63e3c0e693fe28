"""Choose the caption encoder of a model folder: by its index, else by its parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bucketline.errors import ModelError
from bucketline.families.registry import (
    FAMILIES,
    class_name,
    family_of_model,
    family_of_pipeline,
    known_pipelines,
)
from bucketline.ingest.encoders.text.any_transformer import TextEncoder
from bucketline.ingest.encoders.text.class_labels import ClassLabels, refuse_length
from bucketline.ingest.encoders.text.pipeline_encoder import PromptEncoder
from bucketline.ingest.encoders.text_model import UNNAMED, architecture_of
from bucketline.store.format.columns import TOKENS

if TYPE_CHECKING:
    import torch

    from bucketline.families.family import Family, Part
    from bucketline.ingest.encoders.model_folder import ModelFolder
    from bucketline.ingest.encoders.text_columns import CaptionEncoder, Embedding, TextSettings

# Encoders that models take the last hidden state of. A language model gets a prompt around the caption, or another layer
# is taken, and only its pipeline knows which.
_PLAIN_ENCODERS = ("Bert", "CLIPText", "DistilBert", "MPNet", "MT5", "Roberta", "T5", "UMT5", "XLMRoberta")
_PLAIN_TYPES = ("bert", "clip_text_model", "distilbert", "mpnet", "mt5", "roberta", "t5", "umt5", "xlm-roberta")
_ENCODERS = ["text_encoder", "text_encoder_2", "text_encoder_3", "text_encoder_4"]
_MAX_NAME = 80


def load_caption_encoder(model: ModelFolder, device: torch.device, settings: TextSettings) -> CaptionEncoder:
    encoder = _load(model, device, settings)
    _refuse_bad_empty_caption(model, encoder.encode([""])[0], settings.stored_dtype)
    return encoder


def _load(model: ModelFolder, device: torch.device, settings: TextSettings) -> CaptionEncoder:
    family = text_family_of(model, is_plain=settings.is_plain)
    if family is None:
        return TextEncoder(model, device, settings)
    if family.parts:
        return PromptEncoder(family, model, device, settings)
    refuse_length(model, settings.max_tokens)
    return ClassLabels(model)


def _refuse_bad_empty_caption(model: ModelFolder, empty: Embedding, dtype: str) -> None:
    """Refuse a model whose empty caption cannot be stored, since every shard has it and every dropped caption becomes it."""
    if empty.is_finite:
        return
    columns = {TOKENS: empty.tokens, **empty.fixed}
    bad = next((name for name, values in columns.items() if not bool(values.isfinite().all())), TOKENS)
    raise ModelError(
        f"{model.name}: the empty caption's {bad} are not finite as {dtype}; every dropped caption would become it. "
        "Try --text-dtype bf16 or fp32 and --encode-dtype fp32, or download the model again"
    )


def text_family_of(model: ModelFolder, *, is_plain: bool = False) -> type[Family] | None:
    """Return the family of a model; None if its only text encoder's last hidden state is stored.

    `is_plain`: the user wants that, whatever the model's pipeline does (`--text plain`).
    """
    if is_plain:
        _refuse_several(model)
        return None
    pipeline = model.index().get("_class_name")
    if pipeline is None:
        return _by_parts(model)
    name = str(pipeline)[:_MAX_NAME]
    family = family_of_pipeline(name)
    if family is None:
        raise _unknown(model, f"its pipeline is {name}", name)
    wrong = next((part for part in family.parts if not _is_its_encoder(part, model)), None)
    if wrong is None:
        return family
    found = f"its pipeline is {name}, which takes a {wrong.kind}Model"
    if len(family.parts) > 1:
        raise ModelError(
            f"{model.name}: {found} as {wrong.encoder}, and {wrong.encoder}/config.json is a "
            f"{_architecture(model, wrong.encoder)[:_MAX_NAME]}; take all text encoders from one model"
        )
    # a model may reuse the pipeline class with another encoder, as the demo's does
    _refuse_unusual(model, found, name)
    return None


def _is_its_encoder(part: Part, model: ModelFolder) -> bool:
    """Return whether a text encoder that a model has is of the family's class; one that is not named may be."""
    return _architecture(model, part.encoder).startswith((part.kind, UNNAMED))


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


def _refuse_several(model: ModelFolder) -> None:
    if others := [part for part in _ENCODERS[1:] if model.has(part)]:
        raise ModelError(
            f"{model.name} has several text encoders (text_encoder, {', '.join(others)}), and --text plain stores one's last "
            "hidden state; leave it out, or name a model with one text encoder"
        )


def _refuse_unusual(model: ModelFolder, found: str, name: str) -> None:
    """Refuse a model if the last hidden state of its encoder is not what models usually take."""
    architecture = _architecture(model, "text_encoder")
    kind = (model.config("text_encoder") or {}).get("model_type")
    if not architecture.startswith((*_PLAIN_ENCODERS, UNNAMED)) and kind not in _PLAIN_TYPES:
        raise _unknown(model, f"{found}, and its text encoder a {architecture[:_MAX_NAME]}", name)


def _by_parts(model: ModelFolder) -> type[Family] | None:
    """Return the family of a model without an index: by its denoiser, else by its text encoders."""
    transformer, unet = model.config("transformer"), model.config("unet")
    denoiser = (unet if transformer is None else transformer) or {}
    folder = "unet" if transformer is None else "transformer"
    kind = str(class_name(denoiser))[:_MAX_NAME]
    encoders = [part for part in _ENCODERS if model.has(part)]
    family = family_of_model(denoiser, folder)
    if not encoders:
        has_classes = denoiser.get("num_embeds_ada_norm") is not None
        return family if has_classes and family is not None and not family.parts else None
    if transformer is not None and family is not None and family.parts:
        return family
    if transformer is not None or (unet is not None and family is None and kind != "None"):
        raise _unknown(model, f"it has no model_index.json, its {folder} is a {kind}", kind)
    if encoders == _ENCODERS[:1]:
        alone = [one for one in FAMILIES if unet is not None and one.folder == folder and len(one.parts) == 1]
        fitting = (one for one in alone if _architecture(model, encoders[0]).startswith(one.parts[0].kind))
        found = next(fitting, None)
        if found is None:
            _refuse_unusual(model, "it has no model_index.json", "")
        return found
    return _by_text_encoders(model, encoders, has_unet=unet is not None)


def _by_text_encoders(model: ModelFolder, encoders: list[str], *, has_unet: bool) -> type[Family]:
    """Return the family of a model that has several text encoders, or only the second (SDXL's refiner), and no transformer.

    Of those with such encoders it is the one that says most about their classes.
    """

    def fits(family: type[Family]) -> bool:
        own = {part.encoder: part for part in family.parts}
        needed = {name for name, part in own.items() if not part.is_optional}
        return (
            needed <= set(encoders) <= set(own)
            and (family.folder == "unet" or not has_unet)
            and all(_architecture(model, name).startswith(own[name].kind) for name in encoders)
        )

    found = [family for family in FAMILIES if len(family.parts) > 1 and fits(family)]
    if not found:
        raise _unknown(model, f"it has no model_index.json, and {', '.join(encoders)}", "")
    return max(found, key=lambda family: sum(len(part.kind) for part in family.parts if part.encoder in encoders))


def _architecture(model: ModelFolder, part: str) -> str:
    return architecture_of(model.config(part) or {})
