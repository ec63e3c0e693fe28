"""Turn a cache's sample into a store's row: bucket and geometry from the tensor's shape, columns, captions, record.

Letters: C latent channels, h and w the latent's height and width.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from bucketline.errors import ModelError, SourceError, UsageError
from bucketline.families.family import Padding
from bucketline.families.registry import family_of_pipeline
from bucketline.ingest.encoders.text_columns import TextSettings
from bucketline.ingest.encoders.text_encoders import load_caption_encoder, text_family_of
from bucketline.ingest.images.crop import Grid, Placement, Reason, RejectedError, Size, bucket_placement
from bucketline.ingest.importers.cache import Crops, Scaling, damaged, odd_files_rejected
from bucketline.ingest.pipeline.captions import FreshCaptions
from bucketline.ingest.pipeline.model import chosen_device
from bucketline.ingest.rules import HeldOut, held_out
from bucketline.ingest.sources.source import LEADS_OUT, LinkedOutError, file_stamp
from bucketline.store import Axis, RowColumn, SampleRecord
from bucketline.store.format.block import FLIPPED_SUFFIX, PLAIN_FAMILY, TARGET, TOKENS, checksum, identity
from bucketline.store.format.schema import UNKNOWN_BOX, bucket_name, storable_mtime_ns
from bucketline.torch_dtypes import TORCH_DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import Tensor

    from bucketline.ingest.encoders.model_folder import ModelFolder
    from bucketline.ingest.encoders.text_columns import Embedding
    from bucketline.ingest.importers.cache import Cached, CacheEntry, Geometry, Importer, Text
    from bucketline.ingest.importers.config import ImportConfig
    from bucketline.ingest.importers.reading import CacheListing
    from bucketline.ingest.importers.vae import NamedVae
    from bucketline.store.format.text import TextSpec
    from bucketline.typed_json import Json


SOURCE = "source"  # text embeddings are those of the cache
ROUNDING_PX = 1  # by which another trainer's resized size may differ from ours, which rounds half up
Box = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRules:
    """How a cache's samples become rows."""

    vae: NamedVae
    scaling: Scaling
    dtype: str  # of latents
    may_be_off: bool  # whether their spread is not compared with the VAE's
    crops: Crops
    is_flipped: bool  # whether the mirrored image's latent is stored too
    is_text_kept: bool  # whether text embeddings are those of the cache
    max_captions: int
    held_out: HeldOut

    def columns(self) -> list[RowColumn]:
        """Return the store's columns. That their values are finite is checked before they are written."""
        height, width = (Axis(name=name, step=self.vae.downscale) for name in ("height_px", "width_px"))
        shape = (self.vae.channels, height, width)
        roles = (TARGET, TARGET + FLIPPED_SUFFIX) if self.is_flipped else (TARGET,)
        return [RowColumn(role=role, dtype=self.dtype, shape=shape, allow_nonfinite=True) for role in roles]

    def unscaled(self, latent: Tensor) -> NDArray[Any]:
        """Return a cache's latent as a row has it."""
        return self.vae.stored(latent, self.scaling, self.dtype, may_be_off=self.may_be_off)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedRow:
    """A sample in the form in which a store takes it."""

    record: SampleRecord
    columns: dict[str, Any]  # by role
    texts: tuple[Text, ...]  # of the cache
    left_out: tuple[str, ...]  # what the cache has and the store does not


def cache_stamp(source: Path, entry: CacheEntry) -> tuple[int, int]:
    """Return the length and the mtime of a sample's values: of its files together, and of the newest of them."""
    if entry.stamp is not None:
        return entry.stamp[0], storable_mtime_ns(entry.stamp[1])
    stamps = [file_stamp(f"{source}/{path}", source) for path in (entry.path, entry.text_path) if path is not None]
    return sum(stamp.num_bytes for stamp in stamps), max(storable_mtime_ns(stamp.mtime_ns) for stamp in stamps)


@contextmanager
def rejects_named(entry: CacheEntry) -> Iterator[None]:
    """Name an entry's file in what it is rejected for in this block, whatever that is."""
    try:
        with odd_files_rejected(entry.path):
            yield
    except LinkedOutError as error:
        why = f"{entry.path}: {LEADS_OUT}, which an import never follows; put the file itself there"
        raise RejectedError(error.reason, why) from error
    except RejectedError as error:
        if entry.path in error.detail:
            raise
        raise RejectedError(error.reason, f"{entry.path}: {error.detail}") from error


def read_entry(importer: Importer, source: Path, entry: CacheEntry, variant: str) -> Cached:
    with rejects_named(entry):
        if entry.problem is not None:
            raise RejectedError(Reason.CACHE, entry.problem)
        if entry.caption_problem is not None:
            raise RejectedError(Reason.CAPTION, entry.caption_problem)
        return importer.read(source, entry, variant)


def origin_of(entry: CacheEntry, source: Path) -> str:
    """Return what a row says of its origin: the image that the cache records, else the file in the cache."""
    return entry.image or f"{os.path.abspath(source)}/{entry.path}"  # noqa: PTH100 - called per row


def row_of(source: Path, entry: CacheEntry, cached: Cached, rules: RowRules) -> ImportedRow:
    captions = kept_captions(cached.captions if entry.captions is None else entry.captions, rules.max_captions)
    if rules.is_text_kept and not {*captions} <= {text.caption for text in cached.texts}:
        raise RejectedError(
            Reason.TEXT, f"the cache has no embedding of its caption {captions[0][:80]!r}; --text encode makes one"
        )

    vae, target = rules.vae, rules.unscaled(cached.latent)  # [C, h, w]
    columns = {TARGET: target}
    if rules.is_flipped:
        columns[TARGET + FLIPPED_SUFFIX] = rules.unscaled(_flipped(cached))
    bucket = Size(*(length * vae.downscale for length in target.shape[1:]))
    split = "val" if held_out(entry.id, rules.held_out.fraction, rules.held_out.by) else "train"
    original, resized, crop, crop_in_source = _boxes(cached.geometry, bucket, rules.crops)
    num_bytes, mtime_ns = cache_stamp(source, entry)
    record = SampleRecord(
        id=entry.id,
        bucket=bucket_name(split, bucket.height_px, bucket.width_px),
        row=0,
        split=split,
        source=origin_of(entry, source),
        source_bytes=num_bytes,
        source_mtime_ns=storable_mtime_ns(mtime_ns),
        # a digest of checksums: BLAKE2b of the values would take as long as reading them from the cache
        content=identity(b"".join(checksum(value.data).to_bytes(8, "little") for value in columns.values())),
        original_size=original,
        resized=resized,
        crop=crop,
        crop_in_source=crop_in_source,
        captions=captions,
        caption_rows=(),
    )
    return ImportedRow(record=record, columns=columns, texts=cached.texts, left_out=cached.left_out)


def kept_captions(found: tuple[str, ...] | None, at_most: int) -> tuple[str, ...]:
    """Return the captions that are stored: each once, none that is empty, and not more than `at_most`."""
    return tuple(dict.fromkeys(text for text in found or () if text))[:at_most]


def _flipped(cached: Cached) -> Tensor:
    if cached.flipped is None:
        raise damaged("it has no latent of the mirrored image, other samples do; cache it again with the same options")
    if cached.flipped.shape != cached.latent.shape:
        shapes = f"{list(cached.latent.shape)} and {list(cached.flipped.shape)}"
        raise damaged(f"its latents of the image and of the mirrored image are {shapes}, expected one shape")
    return cached.flipped


def _boxes(found: Geometry, bucket: Size, crops: Crops) -> tuple[tuple[int, int], tuple[int, int], Box, Box]:
    original = found.original or found.resized
    if original is not None and not all(original):
        raise damaged(f"its original size is {original[0]}x{original[1]} px")
    placed = None if original is None else placed_in(original, bucket)
    if crops is Crops.UNKNOWN:
        unknown = (*UNKNOWN_BOX[:2], bucket.height_px, bucket.width_px)
        return original or (0, 0), placed.resized if placed else (0, 0), unknown, UNKNOWN_BOX
    if placed is None:
        raise RejectedError(Reason.PLACEMENT, "its cache does not have the size of the original; --crop unknown imports it")
    if crops is Crops.SOURCE:
        placed = _as_recorded(found, placed)
    return placed.source, placed.resized, placed.crop, placed.crop_in_source


@lru_cache(1 << 16)
def placed_in(original: tuple[int, int], bucket: Size) -> Placement:
    """Return the placement of an image in a bucket, with the crop at its centre."""
    return bucket_placement(*original, Grid(name="", sizes=(bucket,)))


def _as_recorded(found: Geometry, placed: Placement) -> Placement:
    if found.crop is None:
        raise RejectedError(Reason.PLACEMENT, "its cache does not record the crop; --crop unknown imports it")
    resized = found.resized or placed.resized
    bounds = [size - own for size, own in zip(placed.resized, (placed.bucket.height_px, placed.bucket.width_px), strict=True)]
    is_other = any(abs(own - other) > ROUNDING_PX for own, other in zip(placed.resized, resized, strict=True))
    if is_other or any(at > most + ROUNDING_PX for at, most in zip(found.crop, bounds, strict=True)):
        raise RejectedError(
            Reason.PLACEMENT,
            f"cropped at {found.crop[0]}, {found.crop[1]} of {resized[0]}x{resized[1]} px, expected one resized to just cover "
            f"its bucket of {placed.bucket}, {placed.resized[0]}x{placed.resized[1]} px; --crop unknown imports it",
        )
    top, left = (min(at, most) for at, most in zip(found.crop, bounds, strict=True))
    return Placement(bucket=placed.bucket, source=placed.source, resized=placed.resized, top=top, left=left)


# -------------------------------------------------------------------------------------------------------------------- captions

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
