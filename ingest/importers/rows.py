"""Turn a cache's samples into a store's rows: the VAE's output from latents, geometry, captions and their embeddings.

Letters: C latent channels, h and w the latent's height and width.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from bucketline.errors import ModelError, UsageError
from bucketline.families.registry import family_of_pipeline
from bucketline.families.vaes import VAES, latent_channels, vae_class
from bucketline.ingest.encoders.text_columns import TextSettings
from bucketline.ingest.encoders.text_encoders import load_caption_encoder, text_family_of
from bucketline.ingest.encoders.vae import VaeEncoder, vae_provenance
from bucketline.ingest.images.crop import Grid, Reason, RejectedError, Size, bucket_placement
from bucketline.ingest.importers.cache import Scaling
from bucketline.ingest.importers.reading import damaged, read_entry, rejects_named
from bucketline.ingest.pipeline.captions import FreshCaptions
from bucketline.ingest.pipeline.model import chosen_device
from bucketline.ingest.rules import held_out
from bucketline.ingest.sources.source import file_stamp
from bucketline.model_file import config_hash
from bucketline.store import Axis, RowColumn, SampleRecord, new_record
from bucketline.store.format.block import FLIPPED_SUFFIX, TARGET, TOKENS, LatentKind, checksum, identity
from bucketline.store.format.schema import UNKNOWN_BOX, box_in_source, bucket_name
from bucketline.store.report.latent_rgb import PUBLISHED, number
from bucketline.torch_dtypes import TORCH_DTYPES, as_stored

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from bucketline.ingest.encoders.model_folder import ModelFolder
    from bucketline.ingest.encoders.text_columns import Embedding
    from bucketline.ingest.importers.cache import CacheEntry, CacheListing, Importer
    from bucketline.ingest.importers.config import CropOption, ImportConfig, TextOption
    from bucketline.ingest.importers.reading import Cached
    from bucketline.ingest.rules import HeldOut
    from bucketline.store import Store
    from bucketline.store.format.text import TextSpec
    from bucketline.typed_json import Json

ROUNDING_PX = 1  # by which another trainer's resized size may differ from ours, which rounds half up
PATCH_PX = 2  # a patch's height and width
_PART = 1 << 14  # values; of twice as many, torch's threads would each take a part, and wait for one another
_NO_TOKENS = {TOKENS: np.zeros((0, 1), dtype="u1")}


@dataclass(slots=True, kw_only=True)
class ImportPlan:
    """What is decided before anything is written."""

    config: ImportConfig
    importer: Importer
    listing: CacheListing
    vae: NamedVae
    crops: CropOption
    text: TextOption
    held_out: HeldOut  # of `config`, parsed once
    store: Store | None = None  # as it is
    changed: list[CacheEntry]  # that the store does not have as they are now
    is_flipped: bool = False  # whether the mirrored image's latent is stored too
    spread: float | None = None  # of latents that were checked, over the VAE's; None: nothing new, or the check was declined

    def columns(self) -> list[RowColumn]:
        """Return the store's columns. That their values are finite is checked before they are written."""
        height, width = (Axis(name=name, step=self.vae.downscale) for name in ("height_px", "width_px"))
        shape, roles = (self.vae.channels, height, width), (TARGET, TARGET + FLIPPED_SUFFIX)[: 1 + self.is_flipped]
        return [RowColumn(role=role, dtype=self.config.dtype, shape=shape, allow_nonfinite=True) for role in roles]

    @property
    def rules(self) -> dict[str, Json]:
        """What the manifest says of the import."""
        config, has_text = self.config, self.text != "none"
        return {
            "kind": self.importer.kind,
            "variant": self.listing.variant,
            "scaling_undone": self.listing.form.scaling.value,
            "vae": f"named by {'--model' if config.vae is None else f'--vae {config.vae}'}",
            "captions": self.listing.captions_from,
            "root": self.listing.root,
            "trigger": config.trigger,
            "text": self.text,
            "crop": self.crops,
            "flip": self.is_flipped,
            "val_fraction": str(self.held_out),
            "encode_dtype": config.encode_dtype if has_text else None,
            "max_tokens": config.max_tokens if has_text else None,
        }


class ImportedRow(NamedTuple):
    """A sample in the form in which a store takes it."""

    record: SampleRecord
    columns: dict[str, NDArray[Any]]  # by role
    left_out: tuple[str, ...]  # what the cache has and the store does not


def cache_stamp(source: Path, entry: CacheEntry) -> tuple[int, int]:
    """Return the length of a sample's values, and the mtime of their file."""
    stamp = file_stamp(f"{source}/{entry.path}", source)
    return stamp.num_bytes if entry.at is None else entry.at[1], stamp.mtime_ns


def row_of(entry: CacheEntry, plan: ImportPlan) -> ImportedRow:
    """Read an entry, and return its row. Raises a RejectedError that names its file."""
    config, vae, scaling = plan.config, plan.vae, plan.listing.form.scaling
    cached = read_entry(plan.importer, config.source, entry)
    with rejects_named(entry.path):
        columns = {TARGET: vae.stored(cached.latent, scaling, config.dtype)}
        if plan.is_flipped:
            if cached.flipped is None or cached.flipped.shape != cached.latent.shape:
                found = "no latent" if cached.flipped is None else f"a latent {list(cached.flipped.shape)}"
                raise damaged(f"it has {found} of the mirrored image, expected {list(cached.latent.shape)}; cache it again")
            columns[TARGET + FLIPPED_SUFFIX] = vae.stored(cached.flipped, scaling, config.dtype)
        bucket = Size(*(length * vae.downscale for length in columns[TARGET].shape[1:]))
        geometry = _geometry(cached, bucket, plan.crops)
        num_bytes, mtime_ns = cache_stamp(config.source, entry)
    split = "val" if held_out(entry.id, plan.held_out.fraction, plan.held_out.by) else "train"
    name, captions = bucket_name(split, bucket.height_px, bucket.width_px), kept_captions(entry, config.max_captions)
    record = replace(
        new_record(entry.id, name, captions),
        source=entry.image or f"{os.path.abspath(config.source)}/{entry.path}",  # noqa: PTH100 - called per row
        source_bytes=num_bytes,
        source_mtime_ns=mtime_ns,
        # a digest of checksums: BLAKE2b of the values would take as long as reading them from the cache
        content=identity(b"".join(checksum(value.data).to_bytes(8, "little") for value in columns.values())),
        **geometry,
    )
    return ImportedRow(record, columns, cached.left_out)


def kept_captions(entry: CacheEntry, at_most: int) -> tuple[str, ...]:
    """Return the captions that are stored: each once, none that is empty, and not more than `at_most`."""
    return tuple(dict.fromkeys(text for text in entry.captions or () if text))[:at_most]


def _geometry(found: Cached, bucket: Size, crops: str) -> dict[str, Any]:
    """Return a record's sizes and boxes by field."""
    original, size = found.original or found.resized, (bucket.height_px, bucket.width_px)
    if original is not None and not all(original):
        raise damaged(f"its original size is {original[0]}x{original[1]} px")
    centred = None if original is None else bucket_placement(*original, Grid(name="", sizes=(bucket,)))
    resized = (0, 0) if centred is None else centred.resized
    if crops == "unknown":
        unknown = {"crop": (*UNKNOWN_BOX[:2], *size), "crop_in_source": UNKNOWN_BOX}
        return {"original_size": original or (0, 0), "resized": resized, **unknown}
    if original is None or centred is None or (found.crop is None and crops == "source"):
        what = "the size of the original" if original is None else "the crop"
        raise RejectedError(Reason.PLACEMENT, f"its cache does not record {what}; --crop unknown imports it")
    crop = centred.crop
    if crops == "source" and found.crop is not None:
        resized = found.resized or resized
        bounds = [whole - own for whole, own in zip(resized, size, strict=True)]
        if min(bounds) < 0 or any(at > most + ROUNDING_PX for at, most in zip(found.crop, bounds, strict=True)):
            what = f"its crop of {bucket} at {found.crop[0]}, {found.crop[1]} is not in {resized[0]}x{resized[1]} px"
            raise RejectedError(Reason.PLACEMENT, f"{what}; --crop unknown imports it")
        crop = (min(found.crop[0], bounds[0]), min(found.crop[1], bounds[1]), *size)
    box = box_in_source(crop, resized, original)
    return {"original_size": original, "resized": resized, "crop": crop, "crop_in_source": box}


# -------------------------------------------------------------------------------------------------------------------------- vae


@dataclass(frozen=True, kw_only=True)
class NamedVae:
    """The VAE that the user names."""

    name: str  # as the user gave it, with the option
    provenance: Mapping[str, Json]  # as in the manifest's `encoders.vae`

    @cached_property
    def channels(self) -> int:
        return int(number(self.provenance, "latent_channels", 0))

    @cached_property
    def downscale(self) -> int:
        return int(number(self.provenance, "downscale", 0))

    @cached_property
    def constants(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean of its latents, and their factor as a model is fed, `[C, 1]` or `[1, 1]` each; of packed ones, once packed."""
        made = self.provenance
        own = {"mean": made["latents_mean"] or made["shift_factor"], "std": made["latents_std"] or 1.0}
        found: Any = made.get("batch_norm") or own
        mean, std = (np.array(found[name], dtype=np.float64).reshape(-1, 1) for name in ("mean", "std"))
        return mean, number(made, "scaling_factor", 1.0) / std

    def unscaled(self, latent: torch.Tensor, scaling: Scaling) -> NDArray[Any]:
        """Return a cache's latent, `[C, h, w]`, as the VAE made it, in float32, or float64 if it was scaled."""
        channels = self.channels * (PATCH_PX**2 if scaling is Scaling.PACKED else 1)
        if latent.shape[0] != channels:
            packed = f", packed {channels}" if channels != self.channels else ""
            raise RejectedError(
                Reason.OTHER_VAE, f"it has {latent.shape[0]} channels, the VAE of {self.name} has {self.channels}{packed}"
            )
        values: NDArray[Any] = latent.float().numpy()
        if scaling is not Scaling.NONE:
            mean, scale = self.constants
            with np.errstate(all="ignore"):  # what is not finite is rejected, not warned about
                values = (values.reshape(channels, -1) / scale + mean).reshape(values.shape)
        # four channels of a packed one hold the pixels of a 2 x 2 patch, by row
        return values if scaling is not Scaling.PACKED else pixel_shuffle(torch.from_numpy(values), PATCH_PX).numpy()

    def stored(self, latent: torch.Tensor, scaling: Scaling, dtype: str) -> NDArray[Any]:
        """Return a cache's latent as the VAE made it, in a stored dtype, of BF16 its bits."""
        stored = _converted(self.unscaled(latent, scaling), dtype)
        if not all(math.isfinite(value) for channel in stored for value in channel.aminmax()):  # NaN is the least and largest
            raise RejectedError(Reason.LATENT, f"latent as {dtype}: NaN, infinite, or beyond the dtype's range")
        return as_stored(stored)

    def spread_of(self, latents: Sequence[NDArray[Any]]) -> float:
        """Return the spread of unscaled latents, `[C, h, w]` each: the median of their root mean squares as a model is fed."""
        (mean, scale), is_packed = self.constants, "batch_norm" in self.provenance
        fed = [pixel_unshuffle(torch.from_numpy(one), PATCH_PX).numpy() if is_packed else one for one in latents]
        return float(np.median([np.sqrt((((one.reshape(len(mean), -1) - mean) * scale) ** 2).mean()) for one in fed]))


def _converted(values: NDArray[Any], dtype: str) -> torch.Tensor:
    """Return values in a stored dtype, rounded to F32 first, as in packing; in parts that torch converts in this thread."""
    with np.errstate(all="ignore"):  # the caller rejects what is out of range
        single = torch.from_numpy(np.ascontiguousarray(values.astype("<f4", copy=False)))
    if dtype == "F32":
        return single
    flat, found = single.reshape(-1), torch.empty(single.numel(), dtype=TORCH_DTYPES[dtype])
    for begin in range(0, len(flat), _PART):
        found[begin : begin + _PART] = flat[begin : begin + _PART]
    return found.reshape(single.shape)


def named_vae(model: ModelFolder | None, published: str | None, dtype: str, latents: str) -> NamedVae:
    """Return the VAE that the user names: that of a model, or a published one."""
    if (model is None) == (published is None):
        raise UsageError(
            "the cache does not say which VAE made its latents: name the model that did by --model, or without its files a "
            f"published VAE by --vae ({', '.join(PUBLISHED)}); one of both"
        )
    made: dict[str, Json] = {
        "dtype": None,
        "latents": LatentKind(latents).value,
        "stored_dtype": dtype,
    }  # in which dtype is unknown
    if model is not None:
        return NamedVae(name=f"--model {model.name}", provenance={**_provenance_of(model), **made})
    known = PUBLISHED[str(published)]
    means = {"latents_mean": known.mean, "latents_std": known.std}
    constants = {"scaling_factor": known.scaling, "shift_factor": known.shift, **means}
    made |= {"latent_channels": known.channels, "downscale": 8, "config_hash": None, "weights_hash": None}
    return NamedVae(name=f"--vae {published}", provenance=vae_provenance(known.kind, constants, **made))


def _provenance_of(model: ModelFolder) -> dict[str, Json]:
    config = model.config("vae")
    if config is None:
        raise ModelError(f"{model.name} has no vae/config.json; name the model whose VAE made the latents")
    kind = vae_class(config)
    if (own := VAES.get(kind)) is None:
        raise ModelError(f"{model.name}: the constants of its VAE, a {kind:.80}, are unknown; its latents cannot be imported")
    if own.is_packed and (model.file is not None or model.has_weights("vae")):  # so that a trainer can compare them
        return VaeEncoder(model, torch.device("cpu"), "F32").provenance
    if own.has_batch_norm:
        raise ModelError(
            f"{model.name} has only the configuration of its VAE; the statistics that scale Flux.2's latents are among its "
            "weights: download vae/ completely"
        )
    sizes: dict[str, Json] = {"latent_channels": latent_channels(config), "downscale": own.px_per_latent(config)}
    if None in sizes.values():
        raise ModelError(f"{model.name}: vae/config.json does not tell its channels or levels; download it again")
    return vae_provenance(kind, config, config_hash=config_hash(config), weights_hash=None, **sizes)


# --------------------------------------------------------------------------------------------------------------------- captions


def text_plan(config: ImportConfig, model: ModelFolder | None, *, has_captions: bool) -> TextOption:
    """Return what becomes of captions."""
    if config.text == "none" or model is None:
        return "none"
    known = family_of_pipeline(str(model.index().get("_class_name")))
    can_encode = model.has("text_encoder") or model.has("text_encoder_2") or (known is not None and not known.parts)
    if config.text is None and not (has_captions and can_encode):
        return "none"
    if not can_encode:
        raise UsageError(f"--text {config.text}: {config.model} has no text encoder; name a model that has")
    try:
        text_family_of(model, is_plain=config.text == "plain")
    except ModelError as error:
        raise ModelError(f"{error}; --text none imports the captions without embeddings") from error
    return config.text or "encode"


class ImportedCaptions:
    """Encodes the captions of rows."""

    columns: TextSpec | tuple[()] = ()
    empty: Mapping[str, Any] | None = None
    provenance: Mapping[str, Json] | None = None

    def __init__(self, config: ImportConfig, model: ModelFolder | None, plan: TextOption) -> None:
        """Load the text encoders, if any text is stored."""
        self._known: dict[str, Mapping[str, Any] | RejectedError] = {}
        if plan == "none" or model is None:
            return
        settings = TextSettings(
            stored_dtype=config.text_dtype or config.dtype,
            encode_dtype=config.encode_dtype,
            max_tokens=config.max_tokens,
            is_plain=plan == "plain",
        )
        encoder = load_caption_encoder(model, chosen_device(config.device, 0), settings)
        self.columns, self.provenance = encoder.columns, encoder.provenance
        self._fresh = FreshCaptions(encoder, encoder.columns, config.batch_size)
        self.empty = self._arrays(self._fresh.empty_embedding)

    def of(self, rows: Sequence[ImportedRow]) -> list[Mapping[str, Any] | RejectedError]:
        """Return the arrays of each row's captions by text; of a row with one that cannot be stored, why."""
        wanted = {text: None for row in rows for text in row.record.captions if text not in self._known}
        if not self.columns:
            self._known |= dict.fromkeys(wanted, _NO_TOKENS)
        elif wanted:
            for text, embedding in zip(wanted, self._fresh.embeddings(list(wanted)), strict=True):
                self._known[text] = self._fresh.problem(text, embedding) or self._arrays(embedding)
        found = [{text: self._known[text] for text in row.record.captions} for row in rows]
        self._known = {text: one for own in found for text, one in own.items()}  # the next samples may have them too
        return [next((one for one in own.values() if isinstance(one, RejectedError)), own) for own in found]

    def _arrays(self, embedding: Embedding) -> dict[str, Any]:
        assert self.columns
        return {self.columns.tokens[0].name: embedding.tokens, **embedding.fixed}
