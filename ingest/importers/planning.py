"""Rank 0 before anything is written: list the cache, compare it with the store, check some of its latents."""

from __future__ import annotations

from dataclasses import dataclass, replace
from heapq import nsmallest
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from bucketline.command_line import counted
from bucketline.errors import FingerprintError, SourceError, UsageError
from bucketline.ingest.images.rejects import RejectedError
from bucketline.ingest.importers.cache import Crops, ListRequest
from bucketline.ingest.importers.captions import CaptionSource, text_plan
from bucketline.ingest.importers.changes import not_stored, read_entry, rejects_named, unique
from bucketline.ingest.importers.columns import ColumnRules, as_frames, named_roles, side_columns, stored_columns
from bucketline.ingest.importers.origins import named_as_stored, refuse_other_origin
from bucketline.ingest.importers.registry import expect_inputs, importer_of, listed
from bucketline.ingest.importers.rows import SOURCE, ImportPlan
from bucketline.ingest.importers.vae.named_vae import has_weights, named_vae
from bucketline.ingest.importers.vae.round_trip import SAMPLES, refuse_other_vae
from bucketline.ingest.importers.vae.spread import refuse_wrong_scale
from bucketline.ingest.packing.target import newest_store
from bucketline.ingest.pipeline.model.device import chosen_device
from bucketline.store.format.columns import FLIPPED
from bucketline.store.format.hashing import draw
from bucketline.store.format.manifest import refuse_difference

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

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


class _ReadSample(NamedTuple):
    """A sample that is read before anything is written, and can be imported."""

    cached: Cached
    latent: NDArray[Any]  # [C, h, w] or [C, F, h, w], unscaled
    is_wide: bool  # its spread is so far over the VAE's that the import will reject it


def plan_import(config: ImportConfig, model: ModelFolder | None, local_rank: int) -> Planned:
    """List the cache, compare it with the store, and check new samples.

    Raises:
        UsageError: if source and store overlap, or options contradict each other or lack the VAE.
        SourceError: if the cache cannot be listed, no sample can be read, the latents' spread is not the VAE's, the text is of
            other encoders or captions, or rows of another cache would be replaced; what is known of the cache is in its lines.
        ModelError, FingerprintError, StoreError: as `import_cache`.
    """
    expect_inputs(config)
    importer = importer_of(config.kind, config.source)
    _ = named_roles(config.columns)
    store = newest_store(config)
    if store is not None and "import" not in store.manifest.rules:
        raise FingerprintError(f"{config.store} was packed, not imported; import into a new store")
    listing = listed(
        importer,
        ListRequest(source=config.source, variant=config.variant, captions=config.captions, trigger=config.trigger),
    )
    try:
        return _planned(config, model, local_rank, importer, store, listing)
    except SourceError as error:
        error.args += tuple(f"note: {note}" for note in listing.notes)
        raise


def _planned(
    config: ImportConfig,
    model: ModelFolder | None,
    local_rank: int,
    importer: Importer,
    store: Store | None,
    listing: CacheListing,
) -> Planned:
    """Return the plan for a cache that is listed; as `plan_import`."""
    manifest, roles = None if store is None else store.manifest, named_roles(config.columns)
    _name(listing, config, store)
    crops = Crops(config.crop or ("source" if listing.has_crops else "unknown"))
    if crops is Crops.SOURCE and not listing.has_crops:
        raise UsageError(f"--crop source: {importer.kind} does not record crops; say center or unknown")
    vae = named_vae(model, config.vae, config.dtype, listing.latents)
    vae.refuse_scaling(listing.scaling, str(config.source))
    text = text_plan(config, model, listing)
    at_most = config.most_captions(text)
    if at_most < max((len(entry.captions or ()) for entry in listing.entries), default=0):
        listing.notes.append(f"of a sample's captions at most {at_most} can be stored, the first")
    changed = not_stored(listing.entries, store, config.source, at_most)
    if store is not None and not config.replace:
        refuse_other_origin(changed, store, config.source)
    spread, round_trip, captions, columns = None, None, None, _columns_of(manifest)
    checking = _Checking(config=config, importer=importer, listing=listing, changed=changed, vae=vae)
    if changed and (checked := checking.samples(is_first=manifest is None)):
        latents = [sample.latent for sample in checked]
        if not config.trust_scale:
            spread = refuse_wrong_scale(latents, vae.expected, listing.scaling, str(config.source))
            if model is not None and has_weights(model):
                device = chosen_device(config.device, local_rank)
                round_trip = refuse_other_vae(latents[:SAMPLES], model, device, str(config.source))
        if text == SOURCE:
            captions = CaptionSource(config, model, text, local_rank)
            captions.refuse_other_encoders([sample.cached for sample in checked])
        if manifest is None or roles is not None:
            columns = checking.columns(checked, roles)
    columns = replace(columns, control_scaling=listing.control_scaling or listing.scaling, declined=roles is not None)
    plan = ImportPlan(
        kind=importer.kind,
        variant=listing.variant,
        scaling=listing.scaling,
        latents=listing.latents,
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
        "trigger": config.trigger,
        "text": text,
        "crop": crops.value,
        "flip": columns.flip,
        "split": config.held_out.as_json(),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Checking:
    """Reads some of a cache's samples before anything is written."""

    config: ImportConfig
    importer: Importer
    listing: CacheListing
    changed: list[CacheEntry]
    vae: NamedVae

    def samples(self, *, is_first: bool) -> list[_ReadSample]:
        """Return some samples, new ones first; none if none can be read and the store has others.

        Those that the import will reject one by one say nothing about the others: latents that are not finite, and those far
        out of the VAE's range, unless in a first run most are.

        Raises:
            SourceError: if none can be read.
        """
        is_new = {entry.id for entry in self.changed}
        others = [entry for entry in self.listing.entries if entry.id not in is_new]
        rejects: list[tuple[str, RejectedError]] = []
        # with few new ones, as many of the others: one flat image would not have the spread of a data set
        read = list(self._readable([*_drawn(self.changed), *_drawn(others)][:CHECKED], rejects))
        found = [sample for sample in read if not sample.is_wide]
        if self.config.trust_scale or (is_first and len(read) > 2 * len(found)):
            found += [sample for sample in read if sample.is_wide]
        reasons = [(name, error) for name, error in rejects if name in is_new]
        if found or not is_first:
            return found
        (first, reason), number = reasons[0], counted(len(reasons), "sample")
        raise SourceError(
            f"{self.config.source}: not one of {number} can be imported; {first}: {reason.reason}: {reason.detail}"
        )

    def columns(self, checked: list[_ReadSample], roles: tuple[str, ...] | None) -> ColumnRules:
        """Return the columns that some samples have; of those that are named, all samples are read until each is found."""
        samples = chain(checked, self._readable(self.changed if roles else (), []))
        return ColumnRules(
            side=side_columns(((one.cached, one.latent.shape[-2:]) for one in samples), roles, self.vae),
            frames=any(sample.latent.ndim == 4 for sample in checked),
            flip=checked[0].cached.flipped is not None,
        )

    def _readable(self, entries: Iterable[CacheEntry], rejects: list[tuple[str, RejectedError]]) -> Iterator[_ReadSample]:
        """Yield the samples that can be imported; add the others to `rejects`."""
        for entry in entries:
            try:
                cached = read_entry(self.importer, self.config.source, entry, self.listing.variant)
                with rejects_named(entry):
                    as_frames(cached.latent, is_video=self.vae.frames_step is not None and cached.latent.ndim == 4)
                    latent = self.vae.unscaled(cached.latent, self.listing.scaling)
                    sample = _ReadSample(cached=cached, latent=latent, is_wide=self.vae.is_wide(latent))
            except RejectedError as error:
                rejects.append((entry.id, error))
            else:
                yield sample


def _drawn(entries: Sequence[CacheEntry]) -> list[CacheEntry]:
    """Return the entries that are checked before anything is written, drawn by a hash of their ids."""
    return nsmallest(CHECKED, entries, key=lambda entry: draw(entry.id, "check", "import"))
