"""One text encoder of a model folder with its tokenizer, and their digests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from bucketline.errors import ModelError
from bucketline.ingest.encoders.arrays import DTYPES
from bucketline.ingest.encoders.loaded import hash_of_weights, refuse_incomplete, tokenizer_hash
from bucketline.store.provenance import config_hash

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from bucketline.ingest.encoders.model_folder import ModelFolder
    from bucketline.store.typed_json import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPart:
    """A tokenizer and an encoder, ready to compute."""

    tokenizer: Any
    encoder: Any
    limit: int | None  # most tokens that tokenizer and encoder take, where one of them names a limit
    provenance: dict[str, Json]

    def lengths(self, captions: Sequence[str]) -> list[int]:
        """Count the tokens of each caption, uncut."""
        return [len(ids) for ids in self.tokenizer(list(captions))["input_ids"]]


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

    tokenizer_part, encoder_part = model.part(tokenizer_name), model.part(encoder_name)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(**tokenizer_part)
        config = transformers.AutoConfig.from_pretrained(**encoder_part)
        name = (config.architectures or ["AutoModel"])[0]
        # the class that the weights were saved from: AutoModel would give a T5 its decoder as well
        encoder, loading = getattr(transformers, name, transformers.AutoModel).from_pretrained(
            **encoder_part, dtype=torch.float32, output_loading_info=True
        )
        spared = refuse_incomplete(f"{model.name}: {encoder_name}/", loading, unread=unread)
    except (OSError, ValueError, RuntimeError, KeyError, NotImplementedError) as error:
        raise ModelError(f"{model.name}: {tokenizer_name}/ or {encoder_name}/ cannot be loaded: {error}") from error
    provenance: dict[str, Json] = {
        "class": type(encoder).__name__,
        "config_hash": config_hash(model.config(encoder_name) or {}),
        "weights_hash": hash_of_weights(encoder, but=spared),
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "dtype": dtype,
    }
    limits = (tokenizer.model_max_length, getattr(config, "max_position_embeddings", None))
    limit = min((int(n) for n in limits if n is not None and n < 1 << 30), default=None)
    if limit is not None:
        tokenizer.model_max_length = limit
    _cast(encoder, dtype)
    encoder = encoder.to(device).eval().requires_grad_(requires_grad=False)
    return TextPart(tokenizer=tokenizer, encoder=encoder, limit=limit, provenance=provenance)


def _cast(encoder: nn.Module, dtype: str) -> None:
    """Bring the weights to a dtype, but for those that overflow in half precision and that the class says so of (T5's)."""
    kept = set(getattr(encoder, "_keep_in_fp32_modules", None) or ()) if dtype == "F16" else set()
    for name, weights in encoder.named_parameters():
        if not kept & set(name.split(".")):
            weights.data = weights.data.to(DTYPES[dtype])
    for buffer in encoder.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(DTYPES[dtype])
