"""Read a sample of a cache, and turn it into a store's row: bucket and geometry from the tensor's shape, columns, record.

Letters: C latent channels, h and w the latent's height and width.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from bucketline.ingest.held_out import HeldOut, held_out
from bucketline.ingest.images.bucket_grid import Grid, Size
from bucketline.ingest.images.geometry import Placement, bucket_placement
from bucketline.ingest.images.rejects import Reason, RejectedError
from bucketline.ingest.importers.cache import Crops, Scaling, damaged, odd_files_rejected
from bucketline.ingest.sources.local_files import LEADS_OUT, LinkedOutError, file_stamp
from bucketline.store import Axis, RowColumn, SampleRecord
from bucketline.store.format.columns import FLIPPED_SUFFIX, TARGET
from bucketline.store.format.hashing import checksum, identity
from bucketline.store.format.sample_record import UNKNOWN_BOX, storable_mtime_ns
from bucketline.store.format.schema import bucket_name

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import Tensor

    from bucketline.ingest.importers.cache import Cached, CacheEntry, Geometry, Importer, Text
    from bucketline.ingest.importers.vae import NamedVae

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
    """Read an entry's values."""
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
    """Return a sample's row."""
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
    """Return the original size, the resized size, the crop in the resized image and in the original."""
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
    """Return the placement with the crop that the cache records."""
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
