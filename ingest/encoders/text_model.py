"""Load a text encoder of a model folder with its tokenizer and their digests, or only the tokenizer without weights."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from bucketline.dtype_names import WeightFormat
from bucketline.errors import ModelError, UsageError
from bucketline.families.family import Padding, StandIn
from bucketline.ingest.encoders.model_folder import loading, part_weights, refuse_incomplete, tokenizer_hash
from bucketline.ingest.encoders.text_columns import MAX_CUT_CHARS, Cut
from bucketline.model_file import DIFFUSERS, TRANSFORMERS, config_hash, weights_hash
from bucketline.quantised_linear import QuantisedLinear, quantise_layers
from bucketline.torch_dtypes import TORCH_DTYPES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from bucketline.families.family import Family, Part
    from bucketline.ingest.encoders.model_folder import ModelFolder
    from bucketline.typed_json import Json


QUANTISED_WEIGHTS = ("int8", "nf4")
UNQUANTISED = "BF16"  # dtype of what is not quantised in such an encoder, and of its computation
UNNAMED = "?"  # an architecture that the configuration does not name


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPart:
    """A tokenizer and its loaded encoder."""

    tokenizer: Any  # its `model_max_length` is `limit`, if not None
    encoder: Any
    limit: int | None  # most tokens that tokenizer and encoder accept; None if neither sets a limit
    provenance: dict[str, Json]


def architecture_of(config: Mapping[str, Any]) -> str:
    """Return the class that a configuration's weights were saved from, in transformers or diffusers; UNNAMED if it has none.

    >>> architecture_of({"architectures": ["BertModel"]}), architecture_of({"architectures": {"BertModel": 1}})
    ('BertModel', '?')
    """
    found = config.get("architectures") or [config.get("_class_name")]
    return found[0] if isinstance(found, list) and isinstance(found[0], str) else UNNAMED


def token_counts(tokenizer: Any, captions: Sequence[str]) -> list[int]:  # noqa: ANN401 - any transformers tokenizer
    """Return the number of tokens of each caption, untruncated and with special tokens."""
    return [len(ids) for ids in tokenizer(list(captions))["input_ids"]] if captions else []


def cut_of(encoder: str, tokenizer: Any, caption: str, num_tokens: int, limit: int) -> Cut:  # noqa: ANN401 - as above
    """Return what an encoder that takes `limit` tokens does not see of a caption of `num_tokens`, special tokens included."""
    if tokenizer.is_fast:
        spans = tokenizer(caption, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        tail = caption[spans[max(0, limit - (num_tokens - len(spans)))][0] :]
    else:
        ids = tokenizer(caption, add_special_tokens=False)["input_ids"]
        tail = str(tokenizer.decode(ids[max(0, limit - (num_tokens - len(ids))) :]))
    return Cut(encoder=encoder, tokens=num_tokens, limit=limit, cut=tail.strip()[:MAX_CUT_CHARS])


def _tokenizer(model: ModelFolder, encoder_name: str, tokenizer_name: str) -> tuple[Any, str, int | None]:
    """Return a tokenizer, the architecture of its encoder, and the most tokens that both accept, None for any."""
    import transformers

    tokenizer_part, encoder_part = model.part(tokenizer_name), model.part(encoder_name)
    transformers.logging.set_verbosity_error()
    lacks = model.lacks(tokenizer_name)
    # trust_remote_code=False: if unset, transformers asks on standard input whether to run the folder's own code
    with loading(model, tokenizer_name):
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(**tokenizer_part, trust_remote_code=False)
    if lacks is not None and tokenizer.vocab_files_names:
        # transformers has guessed lengths and special tokens, or takes each word for an unknown one; ByT5 has no such files
        raise ModelError(f"{model.name}: {tokenizer_name}/ has {lacks}; download or save the model again")
    own, config = model.config(encoder_name) or {}, None
    if "_class_name" in own:  # a model of diffusers
        config = StandIn(**{"architectures": None, "model_type": None, **own})
    else:
        with loading(model, encoder_name):
            config = transformers.AutoConfig.from_pretrained(**encoder_part, trust_remote_code=False)
    limits = (tokenizer.model_max_length, getattr(config, "max_position_embeddings", None))
    limit = min((int(n) for n in limits if n is not None and n < 1 << 30), default=None)
    if limit is not None:
        tokenizer.model_max_length = limit
    return tokenizer, architecture_of(vars(config)), limit


def load_text_part(
    model: ModelFolder,
    encoder_name: str,
    tokenizer_name: str,
    *,
    device: torch.device,
    dtype: str,
    unread: str | None = None,
) -> TextPart:
    """Load an encoder and its tokenizer. Weights whose names begin with `unread` may be missing."""
    import diffusers
    import transformers

    tokenizer, architecture, limit = _tokenizer(model, encoder_name, tokenizer_name)
    transformers.logging.disable_progress_bar()
    encoder, spared = model.from_file(encoder_name), frozenset[str]()
    if encoder is None:
        kind = _model_class(architecture)
        is_diffusers = issubclass(kind, diffusers.ModelMixin)
        bases = DIFFUSERS if is_diffusers else TRANSFORMERS
        weights, own = model.weights(encoder_name, bases), _loading_dtype(model, encoder_name, dtype, bases)
        options = {"torch_dtype": own} if is_diffusers else {"dtype": own, "trust_remote_code": False}
        with loading(model, encoder_name):
            encoder, told = kind.from_pretrained(**weights, **options, output_loading_info=True)
            spared = refuse_incomplete(f"{model.name}: {encoder_name}/", told, unread=unread)
    provenance: dict[str, Json] = {
        "class": type(encoder).__name__,
        "config_hash": config_hash(model.config(encoder_name) or {}),
        "weights_hash": weights_hash(encoder, but=spared),
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "dtype": dtype,
    }
    encoder.eval().requires_grad_(requires_grad=False)
    if dtype in QUANTISED_WEIGHTS:
        quantise_layers(encoder, WeightFormat(dtype), device, _EncoderLinear)
    _cast(encoder, UNQUANTISED if dtype in QUANTISED_WEIGHTS else dtype)
    encoder = encoder.to(device)
    return TextPart(tokenizer=tokenizer, encoder=encoder, limit=limit, provenance=provenance)


def _model_class(architecture: str) -> Any:  # noqa: ANN401 - any model of transformers or diffusers
    """Return the class that the weights were saved from, since AutoModel would also load a T5's decoder.

    Return AutoModel, which chooses by the configuration's model type, if the libraries have no class of that name.
    """
    import diffusers
    import transformers

    if architecture == "T5GemmaEncoder":  # diffusers' reads its configuration as published, next to that of a decoder
        return importlib.import_module("diffusers.pipelines.prx").T5GemmaEncoder
    found = getattr(transformers, architecture, None)
    found = found or getattr(diffusers, architecture, None)
    is_model = isinstance(found, type) and issubclass(found, (transformers.PreTrainedModel, diffusers.ModelMixin))
    return found if is_model else transformers.AutoModel


def _loading_dtype(model: ModelFolder, name: str, dtype: str, bases: tuple[str, ...]) -> torch.dtype:
    """Return the dtype to load an encoder in: that of its files if they have one, unless it will compute in F32.

    Such weights are mapped from the files, not copied. The others are F32 in any case, or become it when they are hashed.
    """
    _, dtypes = (0, set[str]()) if dtype == "F32" else part_weights(model, name, bases)
    alone = next(iter(dtypes)) if len(dtypes) == 1 else "F32"
    return TORCH_DTYPES[alone if alone in ("F16", "BF16") else "F32"]


def _cast(encoder: nn.Module, dtype: str) -> None:
    """Cast the weights to a dtype, except those that the class keeps in float32 because they overflow in float16 (T5).

    Buffers that are not saved with the weights, such as the frequencies of rotary positions, keep their precision.
    """
    kept = set(getattr(encoder, "_keep_in_fp32_modules", None) or ()) if dtype == "F16" else set()
    for name, weights in encoder.named_parameters():
        is_kept = kept & set(name.split("."))
        weights.data = weights.data.to(torch.float32 if is_kept else TORCH_DTYPES[dtype])
    saved = encoder.state_dict().keys()
    for name, buffer in encoder.named_buffers():
        if name in saved and buffer.is_floating_point():
            buffer.data = buffer.data.to(TORCH_DTYPES[dtype])


class _EncoderLinear(QuantisedLinear):
    """A quantised linear layer of an encoder."""

    @property
    def weight(self) -> torch.Tensor:
        """A tensor without values: transformers' T5 reads the dtype in which its layers compute."""
        return torch.empty(self.out_features, self.in_features, dtype=TORCH_DTYPES[UNQUANTISED], device="meta")


# ----------------------------------------------------------------------------------------------------------------- text limits

MOST_TOKENS = 4096  # upper bound of --max-tokens; far beyond what any family was trained on


class PromptLengths:
    """Caption length limits of a family."""

    def __init__(self, family: type[Family], pipeline: Any, tokenizers: Mapping[str, Any], asked: int | None) -> None:  # noqa: ANN401 - diffusers has no types
        """Take the limits of a pipeline and of its tokenizers by encoder name; `asked` applies only to the open part."""
        self._family, self._pipeline, self._tokenizers = family, pipeline, tokenizers
        self.open_length = self._settled(asked)  # None for a family without an open part

    def _settled(self, asked: int | None) -> int | None:
        """Return the number of tokens of the open part: as requested, else the pipeline's default."""
        if not any(part.is_open for part in self._family.parts):
            if asked is not None:
                fixed = f"captions of {self._family.name} have a fixed number of tokens, 77 with a CLIP"
                raise UsageError(f"--max-tokens {asked}: {fixed}; leave the option out")
            return None
        most = min(part.most_tokens or MOST_TOKENS for part in self._family.parts if part.is_open and part.has_positions)
        if asked is not None and asked > most:
            raise UsageError(f"--max-tokens is {asked}, expected {most} or fewer")
        # of its call: `encode_prompt` by itself may have another default
        return asked or int(inspect.signature(self._pipeline.__call__).parameters["max_sequence_length"].default)

    def limit(self, part: Part) -> int:
        """Return the maximum number of tokens that a part sees."""
        if part.is_open:
            assert self.open_length is not None, part
            found = self.open_length
        else:  # SD3 and Flux truncate every CLIP at the first tokenizer's length
            shared = getattr(self._pipeline, "tokenizer_max_length", None)
            found = int(shared or self._tokenizers[part.encoder].model_max_length)
        return min(found, part.most_tokens or found)

    @property
    def positions(self) -> int:
        """Maximum number of stored tokens per caption; the exact number if padding is stored."""
        return sum(self.limit(part) for part in self._family.parts if part.has_positions)

    def measure(self, captions: Sequence[str]) -> list[tuple[int, tuple[Cut, ...]]]:
        """Return for each caption the number of stored tokens, and what each part cuts."""
        cleaned = self._family.cleaned(self._pipeline, list(captions))
        templates = [self._family.num_dropped(self._pipeline, caption) for caption in captions]
        kept = [self.positions] * len(cleaned)
        cuts: list[list[Cut]] = [[] for _ in cleaned]
        for part in self._family.parts:
            if part.encoder in self._tokenizers:
                tokenizer, limit = self._tokenizers[part.encoder], self.limit(part)
                lengths = token_counts(tokenizer, cleaned)
                for caption, length, dropped, own in zip(cleaned, lengths, templates, cuts, strict=True):
                    if length - dropped > limit and part.is_cut:
                        own.append(cut_of(part.encoder, tokenizer, caption, length, limit + dropped))
                if self._family.padding is Padding.VALID:
                    pairs = zip(lengths, templates, strict=True)
                    kept = [min(length - dropped + part.num_padding, limit) for length, dropped in pairs]
        return [(own, tuple(found)) for own, found in zip(kept, cuts, strict=True)]

    def refusal(self, caption: str, taken: int = 0) -> str | None:
        """Return why the pipeline, or its model, takes no such caption; None if they do. Images have `taken` of its tokens."""
        shown = f"the caption {caption[:80]!r}"
        for token in self._family.refused_tokens:
            if token in caption:
                return f"{shown} has {token}, which stands for an image to {self._kind}; remove it from the caption"
        for part in self._family.parts:
            if not part.is_cut:
                (cleaned,) = self._family.cleaned(self._pipeline, [caption])
                (length,) = token_counts(self._tokenizers[part.encoder], [cleaned])
                found, limit = length - self._family.num_dropped(self._pipeline, cleaned), self.limit(part) - taken
                if found > limit:
                    return f"{shown} has {found} tokens, and {self._kind} takes up to {limit}, uncut; shorten it"
        return None

    @property
    def _kind(self) -> str:
        return self._family.pipelines[0]


def make_pipeline(family: type[Family], model: ModelFolder, parts: Mapping[str, Any]) -> Any:  # noqa: ANN401 - any pipeline
    """Create the family's pipeline from these parts only, by diffusers name; to measure lengths, tokenizers are enough."""
    try:
        return family.pipeline({**family.pipeline_parts(parts), **family.extras(model)})
    except (ValueError, TypeError, AttributeError) as error:
        raise ModelError(f"{model.name}: cannot make a {family.pipelines[0]} from its text parts: {error}") from error
