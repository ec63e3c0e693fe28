"""Captions of imported samples: embeddings of the cache or of the model's encoders, and the rows that wait for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from bucketline.errors import ModelError, SourceError, UsageError
from bucketline.families.family import Padding
from bucketline.families.registry import family_of_pipeline
from bucketline.ingest.encoders.text.registry import load_caption_encoder, text_family_of
from bucketline.ingest.encoders.text_columns import TextSettings
from bucketline.ingest.images.rejects import Reason, RejectedError
from bucketline.ingest.importers.rows import SOURCE
from bucketline.ingest.pipeline.captions import FreshCaptions
from bucketline.ingest.pipeline.model.device import chosen_device
from bucketline.store.format.columns import PLAIN_FAMILY, TOKENS
from bucketline.torch_dtypes import TORCH_DTYPES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bucketline.ingest.encoders.model_folder import ModelFolder
    from bucketline.ingest.encoders.text_columns import Embedding
    from bucketline.ingest.importers.cache import Cached, Text
    from bucketline.ingest.importers.config import ImportConfig
    from bucketline.ingest.importers.listing import CacheListing
    from bucketline.ingest.importers.rows import ImportedRow
    from bucketline.store.format.text_block import TextSpec
    from bucketline.typed_json import Json

_ENCODE, PLAIN, _NONE = "encode", "plain", "none"
_MOST_KNOWN = 64  # captions whose embeddings are kept, since a later sample may have them too
COMPARED = 4  # captions whose embeddings are compared with the encoder's
LEAST_COSINE = 0.9  # of those; encoders that compute in BF16 or FP8 reach 0.99, other encoders' are near 0
_NO_TOKENS = {TOKENS: np.zeros((0, 1), dtype="u1")}
CaptionedRow: TypeAlias = "tuple[ImportedRow, Mapping[str, Any] | RejectedError]"  # arrays by caption, or why there are none


def text_plan(config: ImportConfig, model: ModelFolder | None, listing: CacheListing) -> str:
    """Return where the text embeddings come from: `source`, `encode`, `plain` or `none`."""
    asked, of_cache = config.text, listing.family
    if listing.text_unknown is not None and asked in (None, SOURCE):
        raise SourceError(f"{config.source}: {listing.text_unknown}")
    has_captions = any(entry.captions != () for entry in listing.entries)
    if asked == _NONE or model is None or (asked is None and not has_captions and of_cache is None):
        return _NONE
    known = family_of_pipeline(str(model.index().get("_class_name")))
    if not any(model.has(name) for name in ("text_encoder", "text_encoder_2")) and (known is None or known.parts):
        if asked is None:
            return _NONE
        raise UsageError(f"--text {asked}: {config.model} has no text encoder; name a model that has")
    try:
        family = text_family_of(model, is_plain=asked == PLAIN)
    except ModelError as error:
        raise ModelError(f"{error}; --text none imports the captions without embeddings") from error
    own = PLAIN_FAMILY if family is None else family.name
    if asked in (None, SOURCE) and own == of_cache:
        return SOURCE
    if asked == SOURCE:
        what = "no text embeddings that can be kept" if of_cache is None else f"those of {of_cache}"
        raise SourceError(
            f"{config.source} has {what}, those of {config.model} are {own}; leave --text out to encode the captions"
        )
    return asked or (_ENCODE if has_captions else _NONE)


class CaptionSource:
    """Looks up or encodes the captions of rows, and returns these in the order in which they came."""

    columns: TextSpec | tuple[()]
    empty: Mapping[str, Any] | None
    provenance: Mapping[str, Json] | None

    def __init__(self, config: ImportConfig, model: ModelFolder | None, plan: str) -> None:
        """Load the text encoders, if any text is stored."""
        self._config, self._plan = config, plan
        self._waiting: list[ImportedRow] = []
        self._known: dict[str, dict[str, Any] | RejectedError] = {}
        self.columns, self.empty, self.provenance = (), None, None
        if plan == _NONE or model is None:
            return
        self._settings = TextSettings(
            stored_dtype=config.text_dtype or config.dtype,
            encode_dtype=config.encode_dtype,
            max_tokens=config.max_tokens,
            is_plain=plan == PLAIN,
        )
        self._encoder = load_caption_encoder(model, chosen_device(config.device, 0), self._settings)
        self.columns, self.provenance = self._encoder.columns, self._encoder.provenance
        self._fresh = FreshCaptions(self._encoder, self.columns, config.batch_size)
        self.empty = self._values(self._fresh.empty_embedding)

    def refuse_other_encoders(self, samples: Sequence[Cached]) -> None:
        """Compare a few of the cache's embeddings with what the model's encoders make of their captions."""
        texts = {text.caption: text for cached in samples for text in cached.texts}
        for text in list(texts.values())[:COMPARED]:
            self._compare(text.caption, text.tokens.float())

    def add(self, row: ImportedRow) -> list[CaptionedRow]:
        """Take a row, and return those that are done: one may wait for others, whose captions are encoded together."""
        captions = row.record.captions
        if self._plan == SOURCE:
            try:
                return [(row, {caption: self._from_source(caption, row.texts) for caption in captions})]
            except RejectedError as error:
                return [(row, error)]
        if self._plan == _NONE:
            return [(row, dict.fromkeys(captions, _NO_TOKENS))]
        self._waiting.append(row)
        return self.flush() if len(self._waiting) >= self._config.batch_size else []

    def flush(self) -> list[CaptionedRow]:
        """Encode the captions of the rows that wait, and return these."""
        rows, self._waiting = self._waiting, []
        wanted = {caption: None for row in rows for caption in row.record.captions if caption not in self._known}
        for caption, embedding in zip(wanted, self._fresh.embeddings(list(wanted)) if wanted else (), strict=True):
            self._known[caption] = self._fresh.problem(caption, embedding) or self._values(embedding)
        done: list[CaptionedRow] = []
        for row in rows:
            found = {caption: self._known[caption] for caption in row.record.captions}
            error = next((value for value in found.values() if isinstance(value, RejectedError)), None)
            done.append((row, error or found))
        if len(self._known) > _MOST_KNOWN:
            self._known.clear()
        return done

    def _from_source(self, caption: str, texts: Sequence[Text]) -> dict[str, Any]:
        """Return a caption's columns from the embedding of the cache."""
        text = next(text for text in texts if text.caption == caption)
        spec, dtype = self._encoder.columns, TORCH_DTYPES[self._settings.token_dtype]
        widths = {column.name: column.shape for column in spec.delivered.fixed}
        found = {name: tuple(value.shape) for name, value in text.fixed.items()}
        if text.tokens.shape[1] != spec.delivered.tokens[0].shape[0] or found != widths:
            own = f"tokens {list(text.tokens.shape)}, {found}"
            raise RejectedError(Reason.TEXT, f"{own}, the model's are {spec.delivered.tokens[0].shape[0]} wide, {widths}")
        length, most = text.tokens.shape[0], self._encoder.max_tokens
        if length > most or (self._encoder.padding is Padding.MAX_LENGTH and length != most):
            exactly = "at most " if self._encoder.padding is Padding.VALID else ""
            raise RejectedError(Reason.TEXT, f"{length} tokens, expected {exactly}{most}; --max-tokens changes it")
        tokens = text.tokens.to(dtype).contiguous()
        fixed = {name: value.to(TORCH_DTYPES[self._settings.fixed_dtype]).contiguous() for name, value in text.fixed.items()}
        if not self._settings.are_finite(tokens) or not all(bool(value.isfinite().all()) for value in fixed.values()):
            raise RejectedError(Reason.TOKENS, f"of the caption {caption[:80]!r} as {self._settings.stored_dtype}")
        return {TOKENS: tokens, **fixed}

    def _compare(self, caption: str, found: torch.Tensor) -> None:
        own = self._fresh.embeddings([caption])[0].tokens.float()
        same = own.shape == found.shape
        cosine = float(torch.nn.functional.cosine_similarity(own, found, dim=1).mean()) if same else 0.0
        if cosine < LEAST_COSINE:
            how = f"a mean cosine of {cosine:.3f}" if same else f"{found.shape[0]} tokens, not {own.shape[0]}"
            raise SourceError(
                f"{self._config.source}: its embedding of {caption[:80]!r} is not what the encoders of {self._config.model} "
                f"make of it ({how}, expected {LEAST_COSINE} or more): another model, or the caption has changed since. Name "
                "the model that made it, or add --text encode to encode all captions"
            )

    def _values(self, embedding: Embedding) -> dict[str, Any]:
        return {self._encoder.columns.tokens[0].name: embedding.tokens, **embedding.fixed}
