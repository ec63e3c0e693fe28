"""Before anything is written: list the cache, compare it with the store, check some of its latents."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from heapq import nsmallest
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.command_line import counted
from bucketline.errors import BucketlineError, FingerprintError, SourceError, UsageError
from bucketline.ingest.images.crop import Reason, RejectedError
from bucketline.ingest.importers.cache import IMPORTERS, CacheEntry, CacheListing, Scaling, Variant
from bucketline.ingest.importers.config import expect_inputs
from bucketline.ingest.importers.reading import files_below, read_entry, rejects_named
from bucketline.ingest.importers.rows import ImportPlan, cache_stamp, kept_captions, named_vae, text_plan
from bucketline.ingest.packed_index import PackedIndex, PackedSample, withdrawn_ids
from bucketline.ingest.packing.run import newest_store
from bucketline.ingest.sources.captions.files import JSON, CaptionFiles
from bucketline.ingest.sources.source import SourceOptions
from bucketline.store.format.block import FLIPPED, draw
from bucketline.store.format.manifest import refuse_difference
from bucketline.store.format.schema import captions_checksum

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from bucketline.ingest.encoders.model_folder import ModelFolder
    from bucketline.ingest.importers.cache import Importer
    from bucketline.ingest.importers.config import ImportConfig
    from bucketline.store import Store
    from bucketline.typed_json import Json

CHECKED = 32  # samples whose spread is compared with the VAE's before anything is written
MAX_SPREAD = 2.0  # of these, over or under 1; scaling factors make it 2.8 to 7.7 but for SD3's 1.5

# --------------------------------------------------------------------------------------------------------------------- listing


def listed(importer: Importer, config: ImportConfig, root: str | None = None) -> CacheListing:
    """List a cache: its samples with their ids, and with their captions as the trainer makes them of files.

    `root`: folder from which the ids of images are their paths; None for the one that all are in.
    """
    try:
        found = [*importer.found(config.source)]
    except BucketlineError:
        raise
    except Exception as error:
        raise SourceError(
            f"{config.source}: the files that list this cache of {importer.kind} are not as the trainer writes them "
            f"({type(error).__name__}: {error!s:.150}); cache it again, or restore them"
        ) from error
    every = [entry for entry in found if isinstance(entry, CacheEntry)]
    variant, form = _chosen(Counter(entry.variant for entry in every), config, importer)
    kept = [entry for entry in every if entry.variant in (variant, None)]
    kept = [replace(entry, image=entry.image and entry.image.replace("\\", "/")) for entry in kept]
    shared = shared_folder([entry.image for entry in kept if entry.image is not None])
    if root is None or not any((entry.image or "").startswith(root) for entry in kept):
        root = shared
    files, captions_from = _caption_files(importer, config)
    entries, ids = list[CacheEntry](), set[str]()
    for entry in kept:
        own_id = (entry.id if entry.image is None else entry.image.removeprefix(root).lstrip("/")) + entry.suffix
        if own_id in ids:  # several caches of an image
            own_id += f" ({entry.path}{'' if entry.at is None else f' at {entry.at[0]}'})"
        ids.add(own_id)
        named = entry.id if entry.image is None else entry.image.removeprefix(shared)
        captions, problem = entry.captions or (), entry.problem
        if files is not None:
            captions, wrong = _captions(files, entry.captioned or os.path.splitext(named)[0], importer, config.trigger)  # noqa: PTH122
            problem = problem or wrong
        entries.append(replace(entry, id=own_id, captions=captions, problem=problem))
    notes = [note for note in found if isinstance(note, str)]
    return CacheListing(entries=entries, variant=variant, form=form, captions_from=captions_from, root=root, notes=notes)


def _chosen(found: Counter[str | None], config: ImportConfig, importer: Importer) -> tuple[str, Variant]:
    """Return the variant to import: the only one of the source, or the one that the user names."""
    named = [(name, count) for name, count in found.most_common() if name is not None]
    there = ", ".join(f"{name or 'unnamed'} ({count})" for name, count in named)
    known = f"known are {', '.join(importer.variants) or 'all but those of another form'}"
    chosen = named[0][0] if config.variant is None and len(named) == 1 else config.variant
    if not found:
        raise SourceError(f"{config.source} has no latents in the format of {importer.kind}; name the folder of its cache")
    if chosen is None:
        what = f"has latents of several models or sizes: {there}" if named else f"does not say its model; {known}"
        raise SourceError(f"{config.source} {what}; choose one by --variant NAME")
    if named and chosen not in found:
        raise SourceError(f"{config.source} has no latents of {chosen!r:.80}, it has {there}; correct --variant")
    form = importer.variants.get(chosen, importer.other)
    if form is None or any(word in chosen.lower() for word in importer.unknown):
        raise SourceError(
            f"latents of {chosen!r:.80} in the format of {importer.kind}: how they are scaled is unknown; {known}"
        )
    return chosen, form


def shared_folder(paths: Sequence[str]) -> str:
    """Return the folder that all paths are in, with a slash at its end; an empty text if there is none."""
    try:
        shared = os.path.commonpath({os.path.dirname(path) for path in paths})  # noqa: PTH120 - a path of any machine
    except ValueError:  # no paths, or some absolute, some not
        return ""
    return f"{shared.rstrip('/')}/" if shared else ""


def _caption_files(importer: Importer, config: ImportConfig) -> tuple[CaptionFiles | None, str]:
    """Return the caption files below the folder that the user names, or the source; None if the cache has the captions."""
    if config.captions is None and importer.captions_in is not None:
        if config.trigger is not None:
            raise UsageError(
                f"--trigger {config.trigger} is for captions of files, and those of this cache are from "
                f"{importer.captions_in}; name the files' folder by --captions, or leave --trigger out"
            )
        return None, importer.captions_in
    folder = config.captions or config.source
    files = CaptionFiles(folder=folder, options=SourceOptions())
    files.names = replace(files.names, is_whole=importer.file_has == "one caption")
    for inside, names in files_below(folder):
        for name in names:
            files.add(inside + name, os.path.splitext(name)[1].lower())  # noqa: PTH122 - as in a listing
    return files, "files of the source" if config.captions is None else "--captions"


def _captions(files: CaptionFiles, stem: str, importer: Importer, trigger: str | None) -> tuple[tuple[str, ...], str | None]:
    """Return the captions in an image's file, of none the trigger word; and why they cannot be used, if they cannot."""
    (texts, problem), extension = files.find(f"{stem}.")
    if importer.file_has == "a caption in line 1" and extension != JSON:
        texts = texts[:1]
    made = (importer.triggered(text.strip(), trigger).strip() for text in texts or ("",))
    return tuple(text for text in made if text), problem


# ------------------------------------------------------------------------------------------------------------------------ plan


def plan_import(config: ImportConfig, model: ModelFolder | None) -> ImportPlan:
    """List the cache, compare it with the store, and check new samples."""
    expect_inputs(config)
    importer, store, root = IMPORTERS[config.kind], newest_store(config), None
    if store is not None:
        stored = store.manifest.rules.get("import")
        if not isinstance(stored, dict):
            raise FingerprintError(f"{config.store} was packed, not imported; import into a new store")
        root = found if isinstance(found := stored.get("root"), str) else None
    listing, crops = listed(importer, config, root), config.crop or ("source" if importer.has_crops else "unknown")
    if crops == "source" and not importer.has_crops:
        raise UsageError(f"--crop source: {importer.kind} does not record crops; say center or unknown")
    plan = ImportPlan(
        config=config,
        importer=importer,
        listing=listing,
        vae=named_vae(model, config.vae, config.dtype, listing.form.latents),
        crops=crops,
        text=text_plan(config, model, has_captions=any(entry.captions for entry in listing.entries)),
        held_out=config.held_out,
        store=store,
        changed=not_stored(listing.entries, store, config),
        is_flipped=store is not None and any(FLIPPED in bucket.columns for bucket in store.manifest.buckets),
    )
    if plan.changed:
        _look(plan)
    if store is not None:
        manifest = store.manifest
        before: Json = {"vae": manifest.encoders.get("vae"), "rules": manifest.rules, "max_captions": manifest.max_captions}
        own: Json = {"vae": dict(plan.vae.provenance), "rules": {"import": plan.rules}, "max_captions": config.max_captions}
        refuse_difference(before, own)
    return plan


def not_stored(entries: Sequence[CacheEntry], store: Store | None, config: ImportConfig) -> list[CacheEntry]:
    """Return the entries that the store does not have as they are now, values and captions, and that are not withdrawn."""
    manifest = None if store is None else store.manifest
    withdrawn = withdrawn_ids(manifest, config.taken_back, (entry.id for entry in entries))
    if store is None:
        return list(entries)
    entries = [entry for entry in entries if entry.id not in withdrawn]

    def is_same(entry: CacheEntry, stored: PackedSample | None) -> bool:
        if entry.problem is not None or stored is None:
            return False
        try:
            stamp = cache_stamp(config.source, entry)
        except RejectedError:
            return False  # read again, and rejected with its reason
        captions = captions_checksum(kept_captions(entry, config.max_captions))
        return (*stamp, captions) == (stored.source_bytes, stored.source_mtime_ns, stored.captions)

    found = PackedIndex(store).find_all([entry.id for entry in entries])
    return [entry for entry, stored in zip(entries, found, strict=True) if not is_same(entry, stored)]


def _look(plan: ImportPlan) -> None:
    """Read some samples, new ones first: whether they can be imported, have mirrored latents, and the VAE's spread."""
    config, is_new = plan.config, {entry.id for entry in plan.changed}
    found: list[NDArray[Any]] = []
    rejects: list[RejectedError] = []
    # with few new ones, as many of the others: one flat image would not have the spread of a data set
    for entry in nsmallest(CHECKED, plan.listing.entries, lambda one: (one.id not in is_new, draw(one.id, "check", "import"))):
        try:
            cached = read_entry(plan.importer, config.source, entry)
            with rejects_named(entry.path):
                latent = plan.vae.unscaled(cached.latent, plan.listing.form.scaling)
                if not np.isfinite(latent).all():
                    raise RejectedError(Reason.LATENT, "latent: NaN or infinite")
        except RejectedError as error:
            rejects.append(error)
        else:
            if plan.store is None and not found:
                plan.is_flipped = cached.flipped is not None
            found.append(latent)
    if plan.store is None and not found:
        number, first = counted(len(rejects), "sample"), rejects[0]
        raise SourceError(f"{config.source}: not one of {number} can be imported; the first: {first.reason}: {first.detail}")
    if not found or config.trust_scale:
        return
    plan.spread = plan.vae.spread_of(found)
    if not 1 / MAX_SPREAD < plan.spread < MAX_SPREAD:
        undone = "nothing was" if plan.listing.form.scaling is Scaling.NONE else "the VAE's scale and shift were"
        raise SourceError(
            f"{config.source}: its latents are not scaled as this format scales them, or not from the VAE of {plan.vae.name} "
            f"({undone} undone): their spread is {plan.spread:.3g} times the VAE's, expected {1 / MAX_SPREAD:g} to "
            f"{MAX_SPREAD:g}. Name the model that made them, or import them as they are by --trust-scale"
        )
