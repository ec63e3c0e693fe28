"""Before anything is written: list the cache, compare it with the store, check some of its latents.

A row's `source` is the path of its file, or of its image where the cache records that one. By it, rows of another folder with
the same names are not replaced.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from heapq import nsmallest
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.command_line import counted
from bucketline.errors import FingerprintError, SourceError, UsageError
from bucketline.ingest.images.crop import Reason, RejectedError
from bucketline.ingest.importers.cache import Crops, ListRequest, Scaling, importer_of
from bucketline.ingest.importers.config import expect_inputs
from bucketline.ingest.importers.reading import listed
from bucketline.ingest.importers.rows import (
    SOURCE,
    CaptionSource,
    RowRules,
    cache_stamp,
    kept_captions,
    origin_of,
    read_entry,
    rejects_named,
    text_plan,
)
from bucketline.ingest.importers.vae import named_vae
from bucketline.ingest.packed_index import PackedIndex, withdrawn_ids
from bucketline.ingest.packing.run import newest_store
from bucketline.store.format.block import FLIPPED, draw
from bucketline.store.format.manifest import refuse_difference
from bucketline.store.format.schema import captions_checksum

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from bucketline.ingest.encoders.model_folder import ModelFolder
    from bucketline.ingest.importers.cache import Cached, CacheEntry, Importer
    from bucketline.ingest.importers.config import ImportConfig
    from bucketline.ingest.importers.reading import CacheListing
    from bucketline.ingest.importers.vae import NamedVae
    from bucketline.store import Store
    from bucketline.typed_json import Json

CHECKED = 32  # samples whose spread is compared with the VAE's before anything is written
MAX_SPREAD = 2.0  # of these, over or under 1; scaling factors make it 2.8 to 7.7 but for SD3's 1.5


@dataclass(slots=True, kw_only=True)
class ImportPlan:
    """What is decided before anything is written."""

    importer: Importer
    listing: CacheListing
    rows: RowRules
    text: str  # source, encode, plain or none
    rules: dict[str, Json]  # what the manifest says of the import
    changed: list[CacheEntry]  # that the store does not have as they are now
    store: Store | None  # as it is
    spread: float | None  # of the latents that were checked, over the VAE's; None: nothing new, or the check was declined
    captions: CaptionSource | None  # if its encoders were loaded


def plan_import(config: ImportConfig, model: ModelFolder | None) -> ImportPlan:
    """List the cache, compare it with the store, and check new samples."""
    expect_inputs(config)
    importer = importer_of(config.kind)
    store, root = newest_store(config), None
    if store is not None:
        stored = store.manifest.rules.get("import")
        if not isinstance(stored, dict):
            raise FingerprintError(f"{config.store} was packed, not imported; import into a new store")
        root = found if isinstance(found := stored.get("root"), str) else None
    listing = listed(
        importer,
        ListRequest(source=config.source, variant=config.variant, captions=config.captions, trigger=config.trigger, root=root),
    )
    try:
        return _planned(config, model, importer, store, listing)
    except SourceError as error:
        error.args += tuple(f"note: {note}" for note in listing.notes)
        raise


def _planned(
    config: ImportConfig,
    model: ModelFolder | None,
    importer: Importer,
    store: Store | None,
    listing: CacheListing,
) -> ImportPlan:
    """Return the plan for a cache that is listed; as `plan_import`."""
    listing.entries = _unique(listing.entries)
    crops = Crops(config.crop or ("source" if importer.has_crops else "unknown"))
    if crops is Crops.SOURCE and not importer.has_crops:
        raise UsageError(f"--crop source: {importer.kind} does not record crops; say center or unknown")
    vae, text = named_vae(model, config.vae, config.dtype, listing.form.latents), text_plan(config, model, listing)
    at_most = 1 if text == SOURCE else config.max_captions  # a cache has an embedding of one caption
    if at_most < max((len(entry.captions or ()) for entry in listing.entries), default=0):
        listing.notes.append(f"of a sample's captions at most {at_most} can be stored, the first")
    changed = not_stored(listing.entries, store, config.source, at_most, config.taken_back)
    if store is not None:
        _refuse_other_origin(changed, store, config.source)
    spread, captions = None, None
    is_flipped = store is not None and any(FLIPPED in bucket.columns for bucket in store.manifest.buckets)
    if changed and (checked := _checked(config.source, importer, listing, changed, vae, is_first=store is None)):
        if not config.trust_scale:
            spread = vae.spread_of([latent for _, latent in checked])
            _refuse_other_spread(spread, config.source, vae, listing.form.scaling)
        if text == SOURCE:
            captions = CaptionSource(config, model, text)
            captions.refuse_other_encoders([cached for cached, _ in checked])
        if store is None:
            is_flipped = checked[0][0].flipped is not None
    rules: dict[str, Json] = {"import": _rules(config, importer, listing, text, crops, is_flipped=is_flipped)}
    if store is not None:
        manifest = store.manifest
        before: Json = {"vae": manifest.encoders.get("vae"), "rules": manifest.rules, "max_captions": manifest.max_captions}
        refuse_difference(before, {"vae": dict(vae.provenance), "rules": rules, "max_captions": config.max_captions})
    rows = RowRules(
        vae=vae,
        scaling=listing.form.scaling,
        dtype=config.dtype,
        may_be_off=config.trust_scale,
        crops=crops,
        is_flipped=is_flipped,
        is_text_kept=text == SOURCE,
        max_captions=at_most,
        held_out=config.held_out,
    )
    return ImportPlan(
        importer=importer,
        listing=listing,
        rows=rows,
        text=text,
        rules=rules,
        changed=changed,
        store=store,
        spread=spread,
        captions=captions,
    )


def _unique(listed: Sequence[CacheEntry]) -> list[CacheEntry]:
    """Mark a second entry of an id, and entries whose values are the same part of a file, as such that cannot be imported."""
    seen: dict[str, CacheEntry] = {}
    sharing: dict[tuple[object, ...], list[str]] = {}  # ids by part of a file
    for entry in listed:
        sharing.setdefault((entry.path, entry.at), []).append(entry.id)
    entries = []
    for entry in listed:
        if entry.problem is None and len(ids := sharing[entry.path, entry.at]) > 1:
            problem = f"{' and '.join(ids[:5])} share it, which is of one of them; rename the others, and cache them again"
            entry = replace(entry, problem=problem)  # noqa: PLW2901 - its only form
        if (other := seen.setdefault(entry.id, entry)) is not entry:
            problem = f"{entry.path} and {other.path} are caches of one image; keep one"
            entry = replace(entry, id=f"{entry.id} ({entry.path})", problem=problem)  # noqa: PLW2901 - its only form
        entries.append(entry)
    return entries


def not_stored(
    entries: Sequence[CacheEntry], store: Store | None, source: Path, max_captions: int, taken_back: Collection[str] = ()
) -> list[CacheEntry]:
    """Return the entries that the store does not have as they are now, values and captions, and that are not withdrawn."""
    withdrawn = withdrawn_ids(None if store is None else store.manifest, taken_back, (entry.id for entry in entries))
    if store is None:
        return list(entries)
    index, changed = PackedIndex(store), []
    entries = [entry for entry in entries if entry.id not in withdrawn]
    for entry, stored in zip(entries, index.find_all([entry.id for entry in entries]), strict=True):
        try:
            same = (
                entry.problem is entry.caption_problem is None
                and stored is not None
                and (stored.source_bytes, stored.source_mtime_ns) == cache_stamp(source, entry)
                and (
                    entry.captions is None or stored.captions == captions_checksum(kept_captions(entry.captions, max_captions))
                )
            )
        except RejectedError:
            same = False  # read again, and rejected with its reason
        if not same:
            changed.append(entry)
    return changed


def _refuse_other_origin(changed: Sequence[CacheEntry], store: Store, source: Path) -> None:
    """Check that rows that would be replaced came from where the entries are."""
    stored = PackedIndex(store).find_all([entry.id for entry in changed])
    other = [
        (entry, own)
        for entry, row in zip(changed, stored, strict=True)
        if row is not None and entry.problem is None and not _is_of(entry, own := store.sample(entry.id)[1].source, source)
    ]
    if other:
        entry, own = min(other, key=lambda one: one[0].id)
        raise SourceError(
            f"{counted(len(other), 'row')} of the store would be replaced by other files of the same names: "
            f"{entry.id!r:.200} came from {own!r:.300}, here it is {origin_of(entry, source)!r:.300}; import into a store "
            "of its own"
        )


def _is_of(entry: CacheEntry, own: str, source: Path) -> bool:
    return own == entry.image if entry.image is not None else own.startswith(f"{os.path.abspath(source)}/")  # noqa: PTH100


def _rules(
    config: ImportConfig, importer: Importer, listing: CacheListing, text: str, crops: Crops, *, is_flipped: bool
) -> dict[str, Json]:
    return {
        "kind": importer.kind,
        "variant": listing.variant,
        "scaling_undone": listing.form.scaling.value,
        "vae": f"named by {'--model' if config.vae is None else f'--vae {config.vae}'}",
        "captions": listing.captions_from,
        "root": listing.root,
        "trigger": config.trigger,
        "text": text,
        "crop": crops.value,
        "flip": is_flipped,
        "val_fraction": str(config.held_out),
        "encode_dtype": None if text == "none" else config.encode_dtype,
        "max_tokens": None if text == "none" else config.max_tokens,
    }


def _checked(
    source: Path, importer: Importer, listing: CacheListing, changed: list[CacheEntry], vae: NamedVae, *, is_first: bool
) -> list[tuple[Cached, NDArray[Any]]]:
    """Return some samples that can be imported, new ones first, with their unscaled latents [C, h, w].

    None are returned if none can be read and the store has others.
    """
    is_new = {entry.id for entry in changed}
    others = [entry for entry in listing.entries if entry.id not in is_new]
    found: list[tuple[Cached, NDArray[Any]]] = []
    rejects: list[RejectedError] = []
    # with few new ones, as many of the others: one flat image would not have the spread of a data set
    for entry in [*_drawn(changed), *_drawn(others)][:CHECKED]:
        try:
            cached = read_entry(importer, source, entry, listing.variant)
            with rejects_named(entry):
                latent = vae.unscaled(cached.latent, listing.form.scaling)
                if not np.isfinite(latent).all():
                    raise RejectedError(Reason.LATENT, "latent: NaN or infinite")
        except RejectedError as error:
            rejects.append(error)
        else:
            found.append((cached, latent))
    if is_first and not found:
        number, first = counted(len(rejects), "sample"), rejects[0]
        raise SourceError(f"{source}: not one of {number} can be imported; the first: {first.reason}: {first.detail}")
    return found


def _refuse_other_spread(spread: float, source: Path, vae: NamedVae, scaling: Scaling) -> None:
    """Check the spread of the latents that were read, over the VAE's."""
    if not 1 / MAX_SPREAD < spread < MAX_SPREAD:
        undone = "nothing was undone" if scaling is Scaling.NONE else "the VAE's scale and shift were undone"
        raise SourceError(
            f"{source}: its latents are not scaled as this format scales them, or not from the VAE of {vae.name} ({undone}): "
            f"their spread is {spread:.3g} times the VAE's, expected {1 / MAX_SPREAD:g} to {MAX_SPREAD:g}. Name the model that "
            "made them, or import them as they are by --trust-scale"
        )


def _drawn(entries: Sequence[CacheEntry]) -> list[CacheEntry]:
    """Return the entries that are checked before anything is written, drawn by a hash of their ids."""
    return nsmallest(CHECKED, entries, key=lambda entry: draw(entry.id, "check", "import"))
