"""Encode captions with any transformers text encoder, as its last hidden state.

The stored tokens are those that the model sees. Pipelines attend to a CLIP text encoder at every position, so all
positions are stored, padding included. Of any other encoder, only the valid tokens are stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from bucketline.errors import UsageError
from bucketline.families.family import Padding
from bucketline.ingest.encoders.text_columns import Cut, Embedding, TextSettings, text_spec
from bucketline.ingest.encoders.text_model import cut_of, load_text_part, token_counts
from bucketline.store.format.columns import PLAIN_FAMILY
from bucketline.torch_dtypes import TORCH_DTYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bucketline.ingest.encoders.model_folder import ModelFolder
    from bucketline.typed_json import Json

_MAX_TOKENS = 512  # if neither tokenizer nor encoder sets a limit


class TextEncoder:
    """A loaded text encoder and its tokenizer."""

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
