"""Rank 0 before anything is written: list the cache, compare it with the store, check some of its latents."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from heapq import nsmallest
from typing import TYPE_CHECKING

from bucketline.command_line import counted
from bucketline.errors import FingerprintError, SourceError, UsageError
from bucketline.files.paths import refuse_overlap
from bucketline.ingest.images.rejects import RejectedError
from bucketline.ingest.importers.account import ImportPlan
from bucketline.ingest.importers.cache import Crops, ListRequest
from bucketline.ingest.importers.captions import SOURCE, CaptionSource, most_captions, text_plan
from bucketline.ingest.importers.changes import not_stored, read_entry, rejects_named, unique
from bucketline.ingest.importers.columns import ColumnRules, as_frames, named_roles, side_columns, stored_columns
from bucketline.ingest.importers.origins import named_as_stored, refuse_other_origin
from bucketline.ingest.importers.registry import importer_of, listed
from bucketline.ingest.importers.vae.named_vae import named_vae
from bucketline.ingest.importers.vae.round_trip import SAMPLES, refuse_other_vae
from bucketline.ingest.importers.vae.spread import refuse_wrong_scale
from bucketline.ingest.importers.vae.weights import has_weights
from bucketline.ingest.pipeline.model.device import chosen_device
from bucketline.store.format.columns import FLIPPED
from bucketline.store.format.hashing import draw
from bucketline.store.format.manifest import refuse_difference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

    from numpy.typing import NDArray

    from bucketline.ingest.encoders.model_folder import ModelFolder
    from bucketline.ingest.importers.cache import Cached, CacheEntry, CacheListing, Importer
    from bucketline.ingest.importers.config import ImportConfig
    from bucketline.ingest.importers.vae.named_vae import NamedVae
    from bucketline.ingest.importers.vae.round_trip import RoundTrip
    from bucketline.ingest.importers.vae.spread import LatentSpread
    from bucketline.store import Manifest, Store
    from bucketline.typed_json import Json

CHECKED = 32  # samples whose spread is compared with the VAE's before anything is written


@dataclass(slots=True, kw_only=True)
class Planned:
    """The knowledge of rank 0 before anything is written."""

    plan: ImportPlan
    vae: NamedVae
    listing: CacheListing
    changed: list[CacheEntry]  # that the store does not have as they are now
    store: Store | None  # as it is
    spread: LatentSpread | None = None
    round_trip: RoundTrip | None = None
    captions: CaptionSource | None = None  # if its encoders were loaded


@dataclass(slots=True, kw_only=True)
class _Checked:
    """The samples that are read before anything is written."""

    samples: list[Cached] = field(default_factory=list)
    latents: list[NDArray[Any]] = field(default_factory=list)  # [C, h, w] or [C, F, h, w] each, unscaled

    def add(self, cached: Cached, latent: NDArray[Any]) -> None:
        self.samples.append(cached)
        self.latents.append(latent)


def plan_import(
    config: ImportConfig, model: ModelFolder | None, local_rank: int, newest: Callable[[], Store | None]
) -> Planned:
    """List the cache, compare it with the store, and check new samples.

    `newest` opens the newest generation of the store, if there is one.

    Raises:
        UsageError: if source and store overlap, or options contradict each other or lack the VAE.
        SourceError: if the cache cannot be listed, no sample can be read, the latents' spread is not the VAE's, the text is of
            other encoders, or rows of another cache would be replaced.
        ModelError, FingerprintError, StoreError: as `import_cache`.
    """
    importer = importer_of(config.kind, config.source)
    for path in (config.source, config.captions):
        if path is not None:
            refuse_overlap(path, config.store)
    roles = named_roles(config.columns)
    store = newest()
    manifest = None if store is None else store.manifest
    if manifest is not None and "import" not in manifest.rules:
        raise FingerprintError(f"{config.store} was packed, not imported; import into a new store")
    listing = listed(importer, ListRequest(source=config.source, variant=config.variant, captions=config.captions))
    _name(listing, config, store)
    crops = Crops(config.crop or ("source" if listing.has_crops else "unknown"))
    if crops is Crops.SOURCE and not listing.has_crops:
        raise UsageError(f"--crop source: {importer.kind} does not record crops; say center or unknown")
    vae = named_vae(model, config.vae, config.dtype, listing.latents)
    vae.refuse_scaling(listing.scaling, str(config.source))
    text = text_plan(config, model, listing)
    at_most = most_captions(config, text)
    if at_most < max((len(entry.captions or ()) for entry in listing.entries), default=0):
        listing.notes.append(f"of a sample's captions at most {at_most} can be stored, the first")
    changed = not_stored(listing.entries, store, config.source, at_most)
    if store is not None and not config.replace:
        refuse_other_origin(changed, store, config.source)
    spread, round_trip, captions, columns = None, None, None, _columns_of(manifest)
    if changed and (checked := _read_some(config, importer, listing, changed, vae, is_first=manifest is None)):
        if not config.trust_scale:
            spread = refuse_wrong_scale(checked.latents, vae.expected, listing.scaling, str(config.source))
            if model is not None and has_weights(model):
                device = chosen_device(config.device, local_rank)
                round_trip = refuse_other_vae(checked.latents[:SAMPLES], model, device, str(config.source))
        if text == SOURCE:
            captions = CaptionSource(config, model, text, local_rank)
            captions.refuse_other_encoders(checked.samples)
        if manifest is None or roles is not None:
            columns = _columns(config, importer, listing, changed, vae, checked, roles)
    columns = ColumnRules(
        side=columns.side,
        frames=columns.frames,
        flip=columns.flip,
        control_scaling=listing.control_scaling or listing.scaling,
        declined=roles is not None,
    )
    plan = ImportPlan(
        kind=importer.kind,
        variant=listing.variant,
        scaling=listing.scaling,
        latents=listing.latents,
        family=listing.family,
        text=text,
        crops=crops,
        columns=columns,
        rules={"import": _rules(config, importer, listing, text, crops, columns)},
        is_written=not config.dry_run and (manifest is None or bool(changed)),
    )
    if manifest is not None:
        before: Json = {"vae": manifest.encoders.get("vae"), "rules": manifest.rules, "max_captions": manifest.max_captions}
        refuse_difference(before, {"vae": dict(vae.provenance), "rules": plan.rules, "max_captions": config.max_captions})
    return Planned(
        plan=plan,
        vae=vae,
        listing=listing,
        changed=changed,
        store=store,
        spread=spread,
        round_trip=round_trip,
        captions=captions,
    )


def _name(listing: CacheListing, config: ImportConfig, store: Store | None) -> None:
    """Set the ids of entries to those that they have in the store, each once."""
    prefix = "" if config.prefix is None else f"{config.prefix.strip('/')}/"
    listing.entries = [replace(entry, id=prefix + entry.id) for entry in listing.entries] if prefix else listing.entries
    if store is not None:
        listing.entries = named_as_stored(listing.entries, store, prefix)
    unique(listing)


def _rules(
    config: ImportConfig, importer: Importer, listing: CacheListing, text: str, crops: Crops, columns: ColumnRules
) -> dict[str, Json]:
    """Return what the manifest says of the import."""
    return {
        "kind": importer.kind,
        "variant": listing.variant,
        "scaling_undone": listing.scaling.value,
        "vae": f"named by {'--model' if config.vae is None else f'--vae {config.vae}'}",
        "vae_of_the_cache": listing.vae,
        "captions": listing.captions_from,
        "text": text,
        "crop": crops.value,
        "flip": columns.flip,
        "split": {"val_fraction": float(config.val_fraction), "by": config.split_by.value},
        **columns.as_json(),
    }


def _columns_of(manifest: Manifest | None) -> ColumnRules:
    """Return the columns of a store."""
    if manifest is None:
        return ColumnRules()
    rules = manifest.rules["import"]
    assert isinstance(rules, dict)
    axes = {axis.name for bucket in manifest.buckets for axis in bucket.axes}
    names = {name for bucket in manifest.buckets for name in bucket.columns}
    return ColumnRules(side=stored_columns(rules), frames="frames" in axes, flip=FLIPPED in names)


def _columns(
    config: ImportConfig,
    importer: Importer,
    listing: CacheListing,
    changed: list[CacheEntry],
    vae: NamedVae,
    checked: _Checked,
    roles: tuple[str, ...] | None,
) -> ColumnRules:
    """Return the columns that some samples have; of those that the user names, all samples are read until each is found."""

    def sized() -> Iterator[tuple[Cached, tuple[int, int]]]:
        for cached, latent in zip(checked.samples, checked.latents, strict=True):
            yield cached, latent.shape[-2:]
        for entry in changed if roles else ():
            try:
                cached = read_entry(importer, config.source, entry, listing.variant)
                with rejects_named(entry):
                    size = vae.unscaled(cached.latent, listing.scaling).shape[-2:]
            except RejectedError:
                continue
            yield cached, size

    return ColumnRules(
        side=side_columns(sized(), roles, vae),
        frames=any(latent.ndim == 4 for latent in checked.latents),
        flip=checked.samples[0].flipped is not None,
    )


def drawn(entries: Sequence[CacheEntry]) -> list[CacheEntry]:
    """Return the entries that are checked before anything is written, drawn by a hash of their ids."""
    return nsmallest(CHECKED, entries, key=lambda entry: draw(entry.id, "check", "import"))


def _read_some(
    config: ImportConfig, importer: Importer, listing: CacheListing, changed: list[CacheEntry], vae: NamedVae, *, is_first: bool
) -> _Checked | None:
    """Read some samples, new ones first; None if none can be read and the store has others.

    Those that the import will reject one by one say nothing about the others: latents that are not finite, and those far out of
    the VAE's range, unless in a first run most are.

    Raises:
        SourceError: if none can be read.
    """
    found, wide, reasons = _Checked(), _Checked(), []
    is_new = {entry.id for entry in changed}
    # with few new ones, as many of the others: one flat image would not have the spread of a data set
    entries = [*drawn(changed), *drawn([entry for entry in listing.entries if entry.id not in is_new])][:CHECKED]
    for entry in entries:
        try:
            cached = read_entry(importer, config.source, entry, listing.variant)
            with rejects_named(entry):
                as_frames(cached.latent, is_video=vae.frames_step is not None and cached.latent.ndim == 4)
                latent = vae.unscaled(cached.latent, listing.scaling)
                (wide if vae.is_wide(latent) else found).add(cached, latent)
        except RejectedError as error:
            if entry.id in is_new:
                reasons.append((entry.id, error))
    if config.trust_scale or (is_first and len(wide.samples) > len(found.samples)):
        for one in zip(wide.samples, wide.latents, strict=True):
            found.add(*one)
    if found.samples:
        return found
    if not is_first:
        return None
    (first, reason), number = reasons[0], len(reasons)
    raise SourceError(
        f"{config.source}: not one of {counted(number, 'sample')} can be imported; {first}: {reason.reason}: {reason.detail}"
    )
