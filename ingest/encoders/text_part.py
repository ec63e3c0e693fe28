"""One text encoder of a model folder with its tokenizer, and their digests; or the tokenizer alone, without a weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from bucketline.errors import ModelError
from bucketline.ingest.encoders.arrays import DTYPES
from bucketline.ingest.encoders.hub import one_line
from bucketline.ingest.encoders.loaded import hash_of_weights, refuse_incomplete, tokenizer_hash
from bucketline.store.provenance import config_hash

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from bucketline.ingest.encoders.model_folder import ModelFolder
    from bucketline.store.typed_json import Json

_LOADING = (OSError, ValueError, RuntimeError, KeyError, NotImplementedError)  # what the libraries raise of a part


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerPart:
    """A tokenizer, and the configuration of the encoder that it belongs to."""

    tokenizer: Any  # its `model_max_length` is `limit`, where there is one
    config: Any
    limit: int | None  # most tokens that tokenizer and encoder take, where one of them names a limit

    @property
    def architecture(self) -> str:
        """The class that the weights were saved from; AutoModel where the configuration does not say."""
        return str((self.config.architectures or ["AutoModel"])[0])

    @property
    def is_clip(self) -> bool:
        """Whether it is a CLIP's text encoder, which is attended to at every position."""
        return self.architecture.startswith("CLIPText") or self.config.model_type == "clip_text_model"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPart:
    """A tokenizer and an encoder, ready to compute."""

    tokenizer: Any
    encoder: Any
    limit: int | None  # as the tokenizer's part has it
    provenance: dict[str, Json]


def token_counts(tokenizer: Any, captions: Sequence[str]) -> list[int]:  # noqa: ANN401 - any transformers tokenizer
    """Count the tokens of each caption, uncut, its special tokens included."""
    return [len(ids) for ids in tokenizer(list(captions))["input_ids"]] if captions else []


def load_tokenizer_part(model: ModelFolder, encoder_name: str, tokenizer_name: str) -> TokenizerPart:
    """Load a tokenizer, and read its encoder's config.json.

    Raises:
        ModelError: where one is missing or cannot be loaded.
    """
    import transformers

    tokenizer_part, encoder_part = model.part(tokenizer_name), model.part(encoder_name)
    transformers.logging.set_verbosity_error()
    try:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(**tokenizer_part)
        config: Any = transformers.AutoConfig.from_pretrained(**encoder_part)
    except _LOADING as error:
        raise _not_loaded(model, encoder_name, tokenizer_name, error) from error
    limits = (tokenizer.model_max_length, getattr(config, "max_position_embeddings", None))
    limit = min((int(n) for n in limits if n is not None and n < 1 << 30), default=None)
    if limit is not None:
        tokenizer.model_max_length = limit
    return TokenizerPart(tokenizer=tokenizer, config=config, limit=limit)


def load_text_part(
    model: ModelFolder,
    encoder_name: str,
    tokenizer_name: str,
    *,
    device: torch.device,
    dtype: str,
    unread: str | None = None,
) -> TextPart:
    """Load an encoder and its tokenizer. Weights whose names begin with `unread` may be missing.

    Raises:
        ModelError: where one is missing, is not whole or cannot be loaded.
    """
    import transformers

    part, encoder_part = load_tokenizer_part(model, encoder_name, tokenizer_name), model.part(encoder_name)
    transformers.logging.disable_progress_bar()
    try:
        # the class that the weights were saved from: AutoModel would give a T5 its decoder as well
        encoder, loading = getattr(transformers, part.architecture, transformers.AutoModel).from_pretrained(
            **encoder_part, dtype=torch.float32, output_loading_info=True
        )
        spared = refuse_incomplete(f"{model.name}: {encoder_name}/", loading, unread=unread)
    except _LOADING as error:
        raise _not_loaded(model, encoder_name, tokenizer_name, error) from error
    provenance: dict[str, Json] = {
        "class": type(encoder).__name__,
        "config_hash": config_hash(model.config(encoder_name) or {}),
        "weights_hash": hash_of_weights(encoder, but=spared),
        "tokenizer_hash": tokenizer_hash(part.tokenizer),
        "dtype": dtype,
    }
    _cast(encoder, dtype)
    encoder = encoder.to(device).eval().requires_grad_(requires_grad=False)
    return TextPart(tokenizer=part.tokenizer, encoder=encoder, limit=part.limit, provenance=provenance)


def _not_loaded(model: ModelFolder, encoder_name: str, tokenizer_name: str, error: Exception) -> ModelError:
    return ModelError(f"{model.name}: {tokenizer_name}/ or {encoder_name}/ cannot be loaded: {one_line(error)}")


def _cast(encoder: nn.Module, dtype: str) -> None:
    """Bring the weights to a dtype, but for those that overflow in half precision and that the class says so of (T5's)."""
    kept = set(getattr(encoder, "_keep_in_fp32_modules", None) or ()) if dtype == "F16" else set()
    for name, weights in encoder.named_parameters():
        if not kept & set(name.split(".")):
            weights.data = weights.data.to(DTYPES[dtype])
    for buffer in encoder.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(DTYPES[dtype])
