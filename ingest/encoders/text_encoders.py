"""Caption encoders, chosen by a model folder: a family's own pipeline, any transformers text encoder, class labels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from bucketline.dtype_names import dtype_name
from bucketline.errors import ModelError, UsageError
from bucketline.families.family import Encoded, Padding
from bucketline.families.registry import FAMILIES, class_name, family_of_model, family_of_pipeline, known_pipelines
from bucketline.families.seen import PIXEL_FIELDS, SeenText
from bucketline.ingest.encoders.text_columns import Cut, Embedding, Seen, TextSettings, text_spec
from bucketline.ingest.encoders.text_model import (
    UNNAMED,
    PromptLengths,
    architecture_of,
    cut_of,
    load_text_part,
    make_pipeline,
    token_counts,
)
from bucketline.model_file import json_hash
from bucketline.store.format.block import CLASS_LABELS, PLAIN_FAMILY, TOKENS, Column
from bucketline.store.format.text import TextSpec
from bucketline.torch_dtypes import TORCH_DTYPES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from PIL.Image import Image

    from bucketline.families.family import Family
    from bucketline.ingest.encoders.model_folder import ModelFolder
    from bucketline.ingest.encoders.text_columns import CaptionEncoder
    from bucketline.typed_json import Json


# ------------------------------------------------------------------------------------------------------------- any transformer
# Encode captions with any transformers text encoder, as its last hidden state.
#
# The stored tokens are those that the model sees. Pipelines attend to a CLIP text encoder at every position, so all
# positions are stored, padding included. Of any other encoder, only the valid tokens are stored.

_MAX_TOKENS = 512  # if neither tokenizer nor encoder sets a limit


class TextEncoder:
    """A loaded text encoder and its tokenizer."""

    sees_images = False

    def __init__(self, model: ModelFolder, device: torch.device, settings: TextSettings) -> None:
        """Load `tokenizer/` and `text_encoder/`."""
        # only the last hidden state is used, and a pooler comes after it
        self._part = load_text_part(
            model,
            "text_encoder",
            "tokenizer",
            device=device,
            dtype=settings.encode_dtype,
            unread="pooler.",
        )
        self._device = device
        self._settings = settings
        asked, most = settings.max_tokens, min(_MAX_TOKENS, self._part.limit or _MAX_TOKENS)
        if asked is not None and asked > most:
            raise UsageError(f"--max-tokens {asked}: the text encoder of {model.name} accepts at most {most}")
        self.max_tokens = asked or most
        is_clip = str(self._part.provenance["class"]).startswith("CLIPText")
        self.padding = Padding.MAX_LENGTH if is_clip else Padding.VALID
        self.width = int(self.encode([""])[0].tokens.shape[1])
        self.columns = text_spec(settings.stored_dtype, self.width, {})
        self.provenance: dict[str, Json] = {
            "family": PLAIN_FAMILY,
            **self._part.provenance,
            "stored_dtype": settings.stored_dtype,
            "layer": "last_hidden_state",
            "width": self.width,
            "max_tokens": self.max_tokens,
            "padding": self.padding.value,
            "empty_caption": "encoded",
        }

    @property
    def is_padded(self) -> bool:
        return self.padding is Padding.MAX_LENGTH

    def padded_lengths(self, captions: Sequence[str]) -> list[int]:
        """Return the number of positions that the encoder sees of each caption."""
        if self.is_padded:
            return [self.max_tokens] * len(captions)
        return [min(length, self.max_tokens) for length in token_counts(self._part.tokenizer, captions)]

    @torch.inference_mode()
    def encode(self, captions: Sequence[str]) -> list[Embedding]:
        """Encode each caption to the tokens that the model sees."""
        lengths = token_counts(self._part.tokenizer, captions)
        inputs = self._part.tokenizer(
            list(captions),
            padding="max_length" if self.is_padded else "longest",
            max_length=self.max_tokens,
            truncation=True,
            return_tensors="pt",
        ).to(self._device)
        mask = None if self.is_padded else inputs["attention_mask"]
        hidden = self._part.encoder(input_ids=inputs["input_ids"], attention_mask=mask).last_hidden_state
        stored = hidden.to(TORCH_DTYPES[self._settings.token_dtype]).cpu()
        embeddings = []
        for n, length in enumerate(lengths):
            tokens = stored[n] if mask is None else stored[n][mask[n].bool().cpu()]
            embeddings.append(
                Embedding(
                    tokens=tokens.contiguous(),
                    is_finite=self._settings.are_finite(tokens),
                    is_truncated=length > self.max_tokens,
                    cuts=self._cuts(captions[n], length),
                )
            )
        return embeddings

    def _cuts(self, caption: str, num_tokens: int) -> tuple[Cut, ...]:
        if num_tokens <= self.max_tokens:
            return ()
        return (cut_of("text_encoder", self._part.tokenizer, caption, num_tokens, self.max_tokens),)


# ------------------------------------------------------------------------------------------------------------ pipeline encoder
# Encode captions with a family's own pipeline: `encode_prompt` of diffusers, with only the text parts loaded.
#
# Letters: B captions, T tokens, D width of a token.

LONGER = "a caption of some words"  # than none
_MOST_DIFFERENCE = 0.05  # of the images' states between a sample's captions, by their norm: rounding, also of quantised weights


class PromptEncoder:
    """The text encoders of a family, called through `encode_prompt`."""

    def __init__(self, family: type[Family], model: ModelFolder, device: torch.device, settings: TextSettings) -> None:
        """Load the family's text parts."""
        self._family, self._device = family, device
        self._settings = settings
        dtype = settings.encode_dtype
        self._parts = {
            part.encoder: load_text_part(model, part.encoder, part.tokenizer, device=device, dtype=dtype)
            for part in family.parts
            if not part.is_optional or model.has(part.encoder)
        }
        names = {part.encoder: part.tokenizer for part in family.parts if part.encoder in self._parts}
        given = {name: self._parts[name].encoder for name in names}
        given |= {tokenizer: self._parts[name].tokenizer for name, tokenizer in names.items()}
        self._seeing = family if settings.sees_images and issubclass(family, SeenText) else None
        if self._seeing is None:
            self._refuse_number(0)
        if self._seeing is not None:
            given["pixels"] = self._pixels = model.pixels("processor")
        self._alone: dict[str, tuple[torch.Tensor, torch.Tensor, int]] = {}  # states of the empty caption without images
        self._pipeline = make_pipeline(family, model, given)
        tokenizers = {name: part.tokenizer for name, part in self._parts.items()}
        self._lengths = PromptLengths(family, self._pipeline, tokenizers, settings.max_tokens)
        self._more: dict[str, Any] = {"device": device, "num_images_per_prompt": 1}
        if self._lengths.open_length is not None:
            self._more["max_sequence_length"] = self._lengths.open_length
        if self.sees_images:
            self.empty = self._with_black()
            empty, self._pads_to_longest = Encoded(tokens=self.empty.tokens[None]), True
        else:
            empty = self._encoded([""])
            longer = empty if family.padding is Padding.MAX_LENGTH else self._encoded([LONGER])
            self._pads_to_longest = longer.tokens.shape[1] != empty.tokens.shape[1]
        width, self.max_tokens = int(empty.tokens.shape[2]), self._lengths.positions
        self.padding = family.padding
        self.columns = text_spec(settings.stored_dtype, width, {name: value.shape[1] for name, value in empty.fixed.items()})
        self.provenance: dict[str, Json] = {
            "family": family.name,
            **self._provenance_of_parts(),
            "stored_dtype": settings.stored_dtype,
            "width": width,
            "max_tokens": self.max_tokens,
            "padding": family.padding.value,
            "empty_caption": "of each sample" if self.sees_images else "zeros" if self._zeroes_empty else "encoded",
        }
        if self.sees_images:
            pixels = self._pipeline.processor.image_processor.to_dict()
            own = json_hash({name: pixels[name] for name in PIXEL_FIELDS if name in pixels})
            self.provenance |= {"processor_hash": own, "image_positions": self._image_positions}

    @property
    def sees_images(self) -> bool:
        return self._seeing is not None

    @property
    def _image_positions(self) -> str:
        """How the encoder counts an image's patches: by row and column, or one after the other if the pipeline says no more.

        Of diffusers 0.42 with transformers 5, Qwen-Image-Edit's do not (diffusers' issue 14194): their states are others.
        """
        return "sequence" if self._pipeline.text_encoder.model.rope_deltas is None else "grid"

    @property
    def _zeroes_empty(self) -> bool:
        """True if the pipeline feeds zeros instead of an encoded empty text for a missing caption (SDXL, set in its index)."""
        return bool(getattr(self._pipeline.config, "force_zeros_for_empty_prompt", False))

    def _provenance_of_parts(self) -> dict[str, Json]:
        """Return the provenance of the parts: of a single part directly, else by part name, with null for an absent part."""
        parts: dict[str, Json] = {
            part.encoder: {**self._parts[part.encoder].provenance, "layer": part.layer, "max_tokens": self._lengths.limit(part)}
            if part.encoder in self._parts
            else None
            for part in self._family.parts
        }
        if len(parts) > 1:
            return {"class": self._family.pipelines[0], "parts": parts}
        alone = next(iter(parts.values()))
        assert isinstance(alone, dict)
        return alone

    def _encoded(self, captions: list[str]) -> Encoded:
        return self._family.encode_prompt(self._pipeline, captions, self._more)

    def padded_lengths(self, captions: Sequence[str]) -> list[int]:
        """Return the number of tokens of each caption if the pipeline pads to the longest of a batch, else a constant."""
        if not self._pads_to_longest:
            return [self.max_tokens] * len(captions)
        return [num_tokens for num_tokens, _ in self._lengths.measure(captions)]

    @torch.inference_mode()
    def encode(self, captions: Sequence[str]) -> list[Embedding]:
        """Encode each caption to what the model sees; if that depends on images, without any."""
        if self.sees_images:
            self._refuse_number(0)
        refusals = [self._lengths.refusal(caption) for caption in captions]
        given = [caption if refusal is None else "" for caption, refusal in zip(captions, refusals, strict=True)]
        encoded = self._encoded(given)
        token_dtype, fixed_dtype = (TORCH_DTYPES[name] for name in (self._settings.token_dtype, self._settings.fixed_dtype))
        tokens = encoded.tokens.to(token_dtype).cpu()
        fixed = {name: value.to(fixed_dtype).cpu() for name, value in encoded.fixed.items()}
        cuts = [own for _, own in self._lengths.measure(given)]
        embeddings = []
        for n, caption in enumerate(given):
            own = tokens[n] if encoded.mask is None else tokens[n][encoded.mask[n].bool().cpu()]
            once = {name: value[n] for name, value in fixed.items()}
            if caption == "" and self._zeroes_empty:
                own, once = torch.zeros_like(own), {name: torch.zeros_like(value) for name, value in once.items()}
            embeddings.append(
                Embedding(
                    tokens=own.contiguous(),
                    fixed={name: value.contiguous() for name, value in once.items()},
                    is_finite=self._settings.are_finite(own) and all(bool(value.isfinite().all()) for value in once.values()),
                    is_truncated=len(cuts[n]) == len(self._parts),  # in SD3 and Flux only the T5 sees all of a long caption
                    cuts=cuts[n],
                    refusal=refusals[n],
                )
            )
        return embeddings

    @torch.inference_mode()
    def encode_seen(self, captions: Sequence[str], images: Sequence[Image]) -> Seen:
        """Encode the captions of one sample, and the empty one, with its images; each by itself, as the pipeline's call does.

        The images' part is the first caption's: that of the others differs by rounding, if at all.

        Raises:
            UsageError: if the family takes more images, or fewer.
            ModelError: if the images' part depends on the caption.
        """
        assert self._seeing is not None
        self._refuse_number(len(images))
        refused = (self._seeing.refused_image(self._pixels, one.height, one.width) for one in images)
        if (reason := next(filter(None, refused), None)) is not None:
            nothing = Embedding(tokens=torch.zeros(0, 0), refusal=reason)
            return Seen(
                images=nothing.tokens, is_image=torch.zeros(0).bool(), empty=nothing, captions=(nothing,) * len(captions)
            )
        return self._seen(captions, images)

    def _seen(self, captions: Sequence[str], images: Sequence[Image]) -> Seen:
        """Encode captions with images of any size and number."""
        assert self._seeing is not None
        taken = self._seeing.num_places([(one.height, one.width) for one in images])
        refusals = [self._lengths.refusal(caption, taken) for caption in captions]
        given = [caption if refusal is None else "" for caption, refusal in zip(captions, refusals, strict=True)]
        with self._seeing.seeing_once(self._pipeline):
            texts, known = dict.fromkeys((*given, "")), {} if images else self._alone
            states = {text: known.get(text) or self._seeing.states(self._pipeline, text, images, self._more) for text in texts}
        if not images:
            self._alone = {"": states[""]}
        (seen, is_image), *others = ((tokens[:start], patches[:start]) for tokens, patches, start in states.values())
        if any((other - seen).float().norm() > _MOST_DIFFERENCE * seen.float().norm() for other, _ in others):
            raise ModelError(f"{self._kind}: the states of the images depend on the caption; its encoder is not causal")
        token_dtype, fixed_dtype = (TORCH_DTYPES[name] for name in (self._settings.token_dtype, self._settings.fixed_dtype))
        own = {text: tokens[start:] for text, (tokens, _, start) in states.items()}
        seen, empty = (part.to(fixed_dtype).cpu().contiguous() for part in (seen, own[""]))
        embeddings = []
        for caption, refusal in zip(given, refusals, strict=True):
            tokens = own[caption].to(token_dtype).cpu().contiguous()
            embeddings.append(Embedding(tokens=tokens, is_finite=self._settings.are_finite(tokens), refusal=refusal))
        is_finite = bool(seen.isfinite().all() and empty.isfinite().all())
        return Seen(
            images=seen, is_image=is_image, empty=Embedding(tokens=empty, is_finite=is_finite), captions=tuple(embeddings)
        )

    @torch.inference_mode()
    def _with_black(self) -> Embedding:
        """Return the empty caption behind a black image, which every such text encoder takes, whatever its model does."""
        from PIL import Image

        return self._seen((), [Image.new("RGB", (64, 64))]).empty

    def _refuse_number(self, found: int) -> None:
        rule = self._family.references
        if rule is not None and not rule.least <= found <= rule.most:
            wanted = f"{rule.least}" if rule.least == rule.most else f"{rule.least} to {rule.most}"
            raise UsageError(
                f"{self._kind} takes {wanted} reference{'s' * (rule.most > 1)} of a sample, found {found}; name as many "
                "folders by `references`, or another model"
            )

    @property
    def _kind(self) -> str:
        return self._family.pipelines[0]


# ---------------------------------------------------------------------------------------------------------------- class labels
# Class labels instead of captions, for class-conditional models (diffusers' DiT).
#
# A caption is the name or number of a class and is stored as one token, the number. The empty caption is the null class,
# numbered after the last one, so a caption dropped by the loader becomes what the model was trained to see without a class.

MAX_DIGITS = 18


class ClassLabels:
    """The classes of a model, by name and number."""

    max_tokens = 1
    padding = Padding.MAX_LENGTH
    sees_images = False

    def __init__(self, model: ModelFolder) -> None:
        """Read the number of classes from `transformer/config.json`, and their names from `id2label` in the index or there."""
        config = model.config("transformer") or {}
        num_classes = config.get("num_embeds_ada_norm")
        if not isinstance(num_classes, int) or num_classes < 1:
            raise ModelError(
                f"{model.name}: transformer/config.json has num_embeds_ada_norm {num_classes!r}, expected the number of classes"
            )
        self._num_classes = num_classes
        self._numbers = _by_name(model, model.index().get("id2label") or config.get("id2label") or {}, num_classes)
        self.columns = TextSpec(tokens=(Column(name=CLASS_LABELS, dtype="I64", shape=(1,)),))
        self.provenance: dict[str, Json] = {
            "family": CLASS_LABELS,
            "class": type(self).__name__,
            "num_classes": num_classes,
            "null_class": num_classes,
            "names_hash": json_hash({name: sorted(numbers) for name, numbers in self._numbers.items()}),
            "stored_dtype": "I64",
            "width": 1,
            "max_tokens": 1,
            "padding": self.padding.value,
            "empty_caption": "null_class",
        }

    def padded_lengths(self, captions: Sequence[str]) -> list[int]:
        return [1] * len(captions)

    def encode(self, captions: Sequence[str]) -> list[Embedding]:
        """Return the class of each caption as one token, or the reason why it has none."""
        return [self._encode(caption) for caption in captions]

    def _encode(self, caption: str) -> Embedding:
        found = self._number(caption.strip())
        if isinstance(found, str):
            return Embedding(tokens=torch.zeros((1, 1), dtype=torch.int64), refusal=found)
        return Embedding(tokens=torch.tensor([[found]], dtype=torch.int64))

    def _number(self, caption: str) -> int | str:
        """Return a caption's class, or the reason why there is none. A name takes precedence over a number."""
        if not caption:
            return self._num_classes
        named = self._numbers.get(caption, set())
        if len(named) == 1:
            return next(iter(named))
        if named:
            several = ", ".join(map(str, sorted(named)))
            return f"the name {caption[:80]!r} stands for several classes ({several}); give the number"
        if caption.isascii() and caption.isdecimal() and len(caption) < MAX_DIGITS and int(caption) < self._num_classes:
            return int(caption)
        return (
            f"{caption[:80]!r} is not a class of the model; expected one of its {len(self._numbers)} names "
            f"or a number from 0 to {self._num_classes - 1}"
        )


def refuse_text_dtype(model: ModelFolder, dtype: str | None) -> None:
    """Refuse --text-dtype for a model whose captions are classes, which are stored as numbers."""
    if dtype is not None:
        raise UsageError(f"--text-dtype {dtype_name(dtype)}: {model.name} takes a class, not text; leave the option out")


def _by_name(model: ModelFolder, labels: Mapping[str, Any], num_classes: int) -> dict[str, set[int]]:
    """Return the class numbers of each name; a label such as `tench, Tinca tinca` yields three names of its class."""
    numbers: dict[str, set[int]] = {}
    for key, label in labels.items():
        if not str(key).isdecimal() or not isinstance(label, str) or int(key) >= num_classes:
            raise ModelError(
                f"{model.name}: id2label has {key!r}: {label!r:.80}; expected numbers below {num_classes} with their names"
            )
        for name in {label.strip(), *(part.strip() for part in label.split(","))} - {""}:
            numbers.setdefault(name, set()).add(int(key))
    return numbers


# -------------------------------------------------------------------------------------------------------------------- registry

# Encoders that models take the last hidden state of. A language model gets a prompt around the caption, or another layer
# is taken, and only its pipeline knows which.
_PLAIN_ENCODERS = ("Bert", "CLIPText", "DistilBert", "MPNet", "MT5", "Roberta", "T5", "UMT5", "XLMRoberta")
_PLAIN_TYPES = ("bert", "clip_text_model", "distilbert", "mpnet", "mt5", "roberta", "t5", "umt5", "xlm-roberta")
_ENCODERS = ["text_encoder", "text_encoder_2", "text_encoder_3", "text_encoder_4"]
_MAX_NAME = 80


def load_caption_encoder(model: ModelFolder, device: torch.device, settings: TextSettings) -> CaptionEncoder:
    encoder = _load(model, device, settings)
    if isinstance(encoder, PromptEncoder) and encoder.sees_images:
        empty = encoder.empty
    else:
        (empty,) = encoder.encode([""])
    _refuse_bad_empty_caption(model, empty, settings.stored_dtype)
    return encoder


def _load(model: ModelFolder, device: torch.device, settings: TextSettings) -> CaptionEncoder:
    family = text_family_of(model, is_plain=settings.is_plain)
    if family is None:
        return TextEncoder(model, device, settings)
    if family.parts:
        return PromptEncoder(family, model, device, settings)
    if settings.max_tokens is not None:
        raise UsageError(f"--max-tokens {settings.max_tokens}: {model.name} takes a class, not text; leave the option out")
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
    known = ((part, _architecture(model, part.encoder)) for part in family.parts)
    wrong = next((part for part, named in known if not named.startswith((part.kind, UNNAMED))), None)
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
