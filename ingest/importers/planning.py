"""Rank 0 before anything is written: list the cache, compare it with the store, check some of its latents.

A row's `source` is the path of its file, or of its image where the cache records that one. By it, ids stay as a data set grows,
and rows of another folder with the same names are not replaced.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from dataclasses import dataclass, replace
from heapq import nsmallest
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from bucketline.command_line import counted
from bucketline.errors import FingerprintError, SourceError, UsageError
from bucketline.ingest.images.rejects import Reason, RejectedError
from bucketline.ingest.importers.cache import Crops, ListRequest
from bucketline.ingest.importers.captions import CaptionSource, text_plan
from bucketline.ingest.importers.columns import ColumnRules, as_frames, named_roles, side_columns, stored_columns
from bucketline.ingest.importers.listing import listed
from bucketline.ingest.importers.registry import expect_inputs, importer_of
from bucketline.ingest.importers.rows import (
    SOURCE,
    ImportPlan,
    cache_stamp,
    kept_captions,
    origin_of,
    read_entry,
    rejects_named,
)
from bucketline.ingest.importers.vae import named_vae
from bucketline.ingest.packing.target import newest_store
from bucketline.ingest.pipeline.packed_index import PackedIndex
from bucketline.store.format.columns import FLIPPED
from bucketline.store.format.hashing import draw
from bucketline.store.format.manifest import refuse_difference
from bucketline.store.format.sample_record import captions_checksum

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from bucketline.ingest.encoders.model_folder import ModelFolder
    from bucketline.ingest.importers.cache import Cached, CacheEntry, Importer
    from bucketline.ingest.importers.config import ImportConfig
    from bucketline.ingest.importers.listing import CacheListing
    from bucketline.ingest.importers.vae import NamedVae
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
    spread: float | None = (
        None  # of the latents that were checked, over the VAE's; None: nothing new, or the check was declined
    )
    captions: CaptionSource | None = None  # if its encoders were loaded


class _ReadSample(NamedTuple):
    """A sample that is read before anything is written, and can be imported."""

    cached: Cached
    latent: NDArray[Any]  # [C, h, w] or [C, F, h, w], unscaled


def plan_import(config: ImportConfig, model: ModelFolder | None, local_rank: int) -> Planned:
    """List the cache, compare it with the store, and check new samples."""
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
    form = listing.form
    crops = Crops(config.crop or ("source" if importer.has_crops else "unknown"))
    if crops is Crops.SOURCE and not importer.has_crops:
        raise UsageError(f"--crop source: {importer.kind} does not record crops; say center or unknown")
    vae = named_vae(model, config.vae, config.dtype, form.latents)
    vae.refuse_scaling(form.scaling, str(config.source))
    text = text_plan(config, model, listing)
    at_most = config.most_captions(text)
    if at_most < max((len(entry.captions or ()) for entry in listing.entries), default=0):
        listing.notes.append(f"of a sample's captions at most {at_most} can be stored, the first")
    changed = not_stored(listing.entries, store, config.source, at_most)
    if store is not None and not config.replace:
        _refuse_other_origin(changed, store, config.source)
    spread, captions, columns, is_first = None, None, _columns_of(manifest), manifest is None
    checking = _Checking(config=config, importer=importer, listing=listing, changed=changed, vae=vae)
    if changed and (checked := checking.samples(is_first=is_first)):
        if not config.trust_scale:
            latents = [sample.latent for sample in checked]
            spread = vae.refuse_other(latents, form.scaling, str(config.source), is_first=is_first)
        if text == SOURCE:
            captions = CaptionSource(config, model, text, local_rank)
            captions.refuse_other_encoders([sample.cached for sample in checked])
        if manifest is None or roles is not None:
            columns = checking.columns(checked, roles)
    columns = replace(columns, declined=roles is not None)
    plan = ImportPlan(
        kind=importer.kind,
        variant=listing.variant,
        scaling=form.scaling,
        latents=form.latents,
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
        captions=captions,
    )


def _name(listing: CacheListing, config: ImportConfig, store: Store | None) -> None:
    """Set the ids of entries to those that they have in the store, each once."""
    prefix = "" if config.prefix is None else f"{config.prefix.strip('/')}/"
    listing.entries = [replace(entry, id=prefix + entry.id) for entry in listing.entries] if prefix else listing.entries
    if store is not None:
        listing.entries = _named_as_stored(listing.entries, store, prefix)
    _unique(listing)


def _unique(listing: CacheListing) -> None:
    """Mark a second entry of an id, and entries whose values are the same part of a file, as such that cannot be imported."""
    seen: dict[str, CacheEntry] = {}
    sharing: dict[tuple[object, ...], list[str]] = {}  # ids by part of a file
    for entry in listing.entries:
        sharing.setdefault((entry.path, entry.at), []).append(entry.id)
    entries = []
    for entry in listing.entries:
        if entry.problem is None and len(ids := sharing[entry.path, entry.at]) > 1:
            problem = f"{' and '.join(ids[:5])} share it, which is of one of them; rename the others, and cache them again"
            entry = replace(entry, problem=problem)  # noqa: PLW2901 - its only form
        if (other := seen.setdefault(entry.id, entry)) is not entry:
            problem = f"{entry.path} and {other.path} are caches of one image; keep one"
            entry = replace(entry, id=f"{entry.id} ({entry.path})", problem=problem)  # noqa: PLW2901 - its only form
        entries.append(entry)
    listing.entries = entries


def not_stored(entries: Sequence[CacheEntry], store: Store | None, source: Path, max_captions: int) -> list[CacheEntry]:
    """Return the entries that the store does not have as they are now: values and captions."""
    if store is None:
        return list(entries)
    index, changed = PackedIndex(store), []
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


def _named_as_stored(entries: Sequence[CacheEntry], store: Store, prefix: str) -> list[CacheEntry]:
    """Return entries with the ids under which the store has their images.

    An id is the image's path from the folder that all images are in. If a folder next to that one is added, this is another
    folder, and the rows of the images that were there before are found by the end of their path and by their `source`.
    """
    index, found = PackedIndex(store), list(entries)
    stored = index.find_all([entry.id for entry in entries])
    missing = [n for n, entry in enumerate(entries) if stored[n] is None and entry.image is not None]
    named = [(n, name) for n in missing for name in _other_names(entries[n], prefix)]
    for (n, name), row in zip(named, index.find_all([name for _, name in named]), strict=True):
        if row is not None and store.sample(name)[1].source == entries[n].image:
            found[n] = replace(entries[n], id=name)
    times = Counter(entry.id for entry in found)
    return [
        replace(entry, id=prefix + (entry.image or "").replace("\\", "/").lstrip("/"))
        if entry.id == before.id and entry.image is not None and times[entry.id] > 1
        else entry
        for entry, before in zip(found, entries, strict=True)
    ]


def _other_names(entry: CacheEntry, prefix: str) -> Iterator[str]:
    """Yield the ids that an entry would have from other folders above its image."""
    path = (entry.image or "").replace("\\", "/").lstrip("/")
    own = entry.id.removeprefix(prefix)
    parts = path.split("/")
    ends = ["/".join(parts[at:]) for at in range(len(parts))]
    end = next((end for end in ends if own == end or own.startswith((f"{end}/", f"{end} ("))), None)
    if end is not None:  # what follows says which of an image's latents it is
        yield from (prefix + other + own[len(end) :] for other in ends if other != end)


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
            f"{entry.id!r:.200} came from {own!r:.300}, here it is {origin_of(entry, source)!r:.300}. --prefix NAME imports "
            "this cache next to it, as NAME/ID; --replace replaces the rows"
        )


def _is_of(entry: CacheEntry, own: str, source: Path) -> bool:
    return own == entry.image if entry.image is not None else own.startswith(f"{os.path.abspath(source)}/")  # noqa: PTH100


def _rules(
    config: ImportConfig, importer: Importer, listing: CacheListing, text: str, crops: Crops, columns: ColumnRules
) -> dict[str, Json]:
    """Return what the manifest says of the import."""
    return {
        "kind": importer.kind,
        "variant": listing.variant,
        "scaling_undone": listing.form.scaling.value,
        "vae": f"named by {'--model' if config.vae is None else f'--vae {config.vae}'}",
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
        """Return some samples, new ones first; none if none can be read and the store has others."""
        is_new = {entry.id for entry in self.changed}
        others = [entry for entry in self.listing.entries if entry.id not in is_new]
        rejects: list[tuple[str, RejectedError]] = []
        # with few new ones, as many of the others: one flat image would not have the spread of a data set
        found = list(self._readable([*_drawn(self.changed), *_drawn(others)][:CHECKED], rejects))
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
                    sample = _ReadSample(cached, self.vae.unscaled(cached.latent, self.listing.form.scaling))
                    if self.vae.factor_of(sample.latent) == math.inf:
                        raise RejectedError(Reason.LATENT, "latent: NaN or infinite")
            except RejectedError as error:
                rejects.append((entry.id, error))
            else:
                yield sample


def _drawn(entries: Sequence[CacheEntry]) -> list[CacheEntry]:
    """Return the entries that are checked before anything is written, drawn by a hash of their ids."""
    return nsmallest(CHECKED, entries, key=lambda entry: draw(entry.id, "check", "import"))
