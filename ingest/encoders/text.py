"""Captions to embeddings, by any transformers text encoder: its last hidden state.

Stored tokens are those that the model sees. A CLIP text encoder is attended to at every position by the pipelines that
use it, so all of them are stored, padding included; of any other encoder the valid tokens alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from bucketline.errors import ModelError
from bucketline.ingest.encoders.loaded import hash_of_weights, refuse_incomplete, tokenizer_hash
from bucketline.ingest.encoders.vae import STORED_DTYPES
from bucketline.store.provenance import config_hash

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bucketline.ingest.encoders.model_folder import ModelFolder

MAX_TOKENS = 512  # where neither tokenizer nor encoder name a limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """A caption as the model sees it."""

    tokens: torch.Tensor  # [T, D] in the stored dtype, on the CPU
    is_finite: bool
    is_truncated: bool  # the caption had more tokens than the encoder takes


class TextEncoder:
    """A loaded text encoder and its tokenizer, encoding in float32."""

    def __init__(self, model: ModelFolder, device: torch.device, stored_dtype: str) -> None:
        """Load `tokenizer/` and `text_encoder/`.

        Raises:
            ModelError: where one is missing or cannot be loaded.
        """
        import transformers

        tokenizer_part, encoder_part = model.part("tokenizer"), model.part("text_encoder")
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        try:
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(**tokenizer_part)
            config = transformers.AutoConfig.from_pretrained(**encoder_part)
            name = (config.architectures or ["AutoModel"])[0]
            # the class that the weights were saved from: AutoModel would give a T5 its decoder as well
            encoder, loading = getattr(transformers, name, transformers.AutoModel).from_pretrained(
                **encoder_part, dtype=torch.float32, output_loading_info=True
            )
            # only the last hidden state is read, and a pooler comes after it
            unread = refuse_incomplete(f"{model.name}: text_encoder/", loading, unread="pooler.")
        except (OSError, ValueError, RuntimeError, KeyError, NotImplementedError) as error:
            raise ModelError(f"{model.name}: tokenizer/ or text_encoder/ cannot be loaded: {error}") from error
        self._encoder = encoder.to(device).eval().requires_grad_(requires_grad=False)
        self._device = device
        self._dtype = STORED_DTYPES[stored_dtype]
        limits = (self._tokenizer.model_max_length, getattr(config, "max_position_embeddings", None) or MAX_TOKENS)
        self.max_tokens = min(MAX_TOKENS, *(int(limit) for limit in limits if limit < 1 << 30))
        self.is_padded = name.startswith("CLIPText")
        self.width = int(self.encode([""])[0].tokens.shape[1])
        self.provenance: dict[str, Any] = {
            "class": type(encoder).__name__,
            "config_hash": config_hash(model.config("text_encoder") or {}),
            "weights_hash": hash_of_weights(encoder, but=unread),
            "tokenizer_hash": tokenizer_hash(self._tokenizer),
            "dtype": "F32",
            "stored_dtype": stored_dtype,
            "layer": "last_hidden_state",
            "width": self.width,
            "max_tokens": self.max_tokens,
            "padding": "max_length" if self.is_padded else "valid",
        }

    @torch.inference_mode()
    def encode(self, captions: Sequence[str]) -> list[Embedding]:
        """Encode captions, each to the tokens that the model sees."""
        lengths = [len(ids) for ids in self._tokenizer(list(captions))["input_ids"]]
        inputs = self._tokenizer(
            list(captions),
            padding="max_length" if self.is_padded else "longest",
            max_length=self.max_tokens,
            truncation=True,
            return_tensors="pt",
        ).to(self._device)
        mask = None if self.is_padded else inputs["attention_mask"]
        hidden = self._encoder(input_ids=inputs["input_ids"], attention_mask=mask).last_hidden_state
        stored = hidden.to(self._dtype).cpu()
        embeddings = []
        for n, length in enumerate(lengths):
            tokens = stored[n] if mask is None else stored[n][mask[n].bool().cpu()]
            embeddings.append(
                Embedding(
                    tokens=tokens.contiguous(),
                    is_finite=bool(torch.isfinite(tokens).all()),
                    is_truncated=length > self.max_tokens,
                )
            )
        return embeddings
