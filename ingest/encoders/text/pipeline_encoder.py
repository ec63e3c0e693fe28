"""Encode captions with a family's own pipeline: `encode_prompt` of diffusers, with only the text parts loaded.

Letters: B captions, T tokens, D width of a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from bucketline.families.family import Padding
from bucketline.ingest.encoders.text.token_limits import PromptLengths, make_pipeline
from bucketline.ingest.encoders.text_columns import Embedding, TextSettings, text_spec
from bucketline.ingest.encoders.text_model import load_text_part
from bucketline.torch_dtypes import TORCH_DTYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bucketline.families.family import Encoded, Family
    from bucketline.ingest.encoders.model_folder import ModelFolder
    from bucketline.typed_json import Json

LONGER = "a caption of some words"  # than none


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
        self._pipeline = make_pipeline(family, model, given)
        tokenizers = {name: part.tokenizer for name, part in self._parts.items()}
        self._lengths = PromptLengths(family, self._pipeline, tokenizers, settings.max_tokens)
        self._more: dict[str, Any] = {"device": device, "num_images_per_prompt": 1}
        if self._lengths.open_length is not None:
            self._more["max_sequence_length"] = self._lengths.open_length
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
            "empty_caption": "zeros" if self._zeroes_empty else "encoded",
        }

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
        """Encode each caption to what the model sees."""
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
