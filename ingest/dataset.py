"""Pack a data set file, a store for each of its sources; and `ingest pack --dry-run`, which compares and writes nothing."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from bucketline.errors import UsageError
from bucketline.files.paths import refuse_overlap
from bucketline.ingest.config import recorded_rules, refuse_other_options
from bucketline.ingest.encoders.model_folder import open_model
from bucketline.ingest.encoders.text_columns import text_spec
from bucketline.ingest.encoders.text_encoders import text_family_of
from bucketline.ingest.encoders.vae import refuse_latents
from bucketline.ingest.images.crop import latent_sizes, model_grid
from bucketline.ingest.pack import pack_session, pack_source, ray_workers
from bucketline.ingest.packed_index import PackedIndex, SampleChanges, hold_out_one, leave_out_withdrawn, sample_changes
from bucketline.ingest.packing.run import newest_store, opened_source, with_stored_rules
from bucketline.ingest.parallel.items import take_apart
from bucketline.ingest.parallel.signals import Stopped, exit_code_of
from bucketline.ingest.partners.partner import planned_form, refuse_unlike
from bucketline.ingest.pipeline.image_reader import Change, ImageReader
from bucketline.ingest.pipeline.model import NOT_COMPARED, facts_without_weights
from bucketline.ingest.scan import counted_images
from bucketline.ingest.sources.dataset_file import (
    DatasetEntry,
    DatasetFile,
    is_dataset_file,
    naming_source,
    open_source,
    read_dataset_file,
)
from bucketline.ingest.summary import RunSummary, by_reason, partner_notes
from bucketline.store import Store
from bucketline.store.format.block import LatentKind
from bucketline.store.format.manifest import MANIFEST, MixedStore, write_mixture
from bucketline.store.format.schema import Schema, text_entry
from bucketline.store.write.publish import new_manifest, stored_manifest

if TYPE_CHECKING:
    from collections.abc import Callable

    from bucketline.ingest.config import PackConfig
    from bucketline.ingest.encoders.model_folder import ModelFolder
    from bucketline.ingest.images.crop import Grid
    from bucketline.ingest.packing.finish import PackResult


# --------------------------------------------------------------------------------------------------------------------- dry run


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun(SampleChanges):
    """Result of a dry run, as `ingest pack --dry-run --json` prints it."""

    found: int
    new: int  # images that the store does not have
    changed: int  # images whose content differs
    moved: int  # images that change to the other split, so that they are encoded again
    recaptioned: int  # images of which only captions or mtime differ: only their text is encoded
    unchanged: int
    rejected: int  # as far as the headers tell
    withdrawn: int  # left out, since `store drop` withdrew their ids
    rejected_by_reason: dict[str, int]
    buckets: dict[str, int]  # of new, changed and moved images
    pending_shards: int  # of an interrupted run, which a pack would adopt first; their images count as new here
    not_compared: str
    notes: list[str]
    seconds: float


def dry_run(config: PackConfig) -> DryRun:
    """Compare a source with a store. A lock is neither needed nor taken."""
    started = time.monotonic()
    source, existing = opened_source(config), newest_store(config)
    model = open_model(config.model, config.model_config)
    kind, downscale, _ = latent_sizes(model)
    refuse_latents(kind, LatentKind(config.latents))
    text_family_of(model, is_plain=config.text is not None)  # refuses a model whose captions a pack could not encode
    grid = model_grid(config.grid, model, downscale)
    store = _store(config, model, grid, existing)
    listing = config.listing_of(source)
    partners = planned_form(config, model, listing, None if existing is None else existing.manifest)
    withdrawn = leave_out_withdrawn(listing, store.manifest, config.taken_back)
    hold_out_one(listing.items, config.held_out, store)
    outline, (items,) = take_apart(listing, 1)
    index = PackedIndex(store)
    reader = ImageReader(source, store, index, config, grid, partners=partners, px_per_latent=downscale, reads_headers=True)
    account = RunSummary()
    changes = Counter(image.change for image in counted_images("compare", source, items, reader, config, account))
    _, of_samples = sample_changes(config, store, outline, account)
    return DryRun(
        found=outline.num_items + withdrawn,
        new=changes[Change.NEW],
        changed=changes[Change.CONTENT],
        moved=changes[Change.SPLIT],
        recaptioned=changes[Change.TEXT],
        unchanged=account.unchanged,
        rejected=len(account.rejects),
        withdrawn=withdrawn,
        rejected_by_reason=by_reason(account),
        buckets=dict(sorted(account.buckets.items())),
        **of_samples,
        pending_shards=len(list((config.store / "pending").glob("*.lmdb"))),
        not_compared=NOT_COMPARED,
        notes=[*outline.listing.notes, *partner_notes(account)],
        seconds=round(time.monotonic() - started, 3),
    )


def _store(config: PackConfig, model: ModelFolder, grid: Grid, newest: Store | None) -> Store:
    """Return the store's newest generation, or an empty one that is not written; compare the options with it."""
    rules = recorded_rules(config, grid.name)
    if newest is not None:
        facts = facts_without_weights(config, model, newest.manifest)
        refuse_other_options(config, newest.manifest, {"vae": dict(facts.vae), "text_encoder": dict(facts.text)}, rules)
        return newest
    text = text_entry(text_spec(config.text_dtype or config.dtype, 1, {}))
    contents = Schema(encoders={}, rules=rules, max_captions=config.max_captions, text=text)
    if isinstance(config.place, Path):
        stored_manifest(config.store, contents)  # refuses a path that is something else
    return Store(config.store, new_manifest(contents))


# --------------------------------------------------------------------------------------------------------------------- dataset


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetResult:
    """Result of packing a data set file."""

    sources: dict[str, PackResult]  # by the name of the source
    repeats: dict[str, int]
    notes: list[str]  # folders that were left out, stores that belong to no source
    why_not_readable: str | None  # why the folder was not made readable as one; None if it was

    @property
    def is_good(self) -> bool:
        beyond = any(result.too_many_rejects or result.not_pruned_beyond_limit for result in self.sources.values())
        return self.why_not_readable is None and not beyond


def pack_dataset(
    config: PackConfig,
    on_start: Callable[[DatasetEntry, PackConfig, PackConfig], None],
    on_result: Callable[[DatasetEntry, PackConfig, PackResult], None],
    *,
    rank: int,
    world_size: int,
    local_rank: int,
    local_world_size: int = 1,
) -> DatasetResult | None:
    """Pack each source of the file into `NAME.store` in the folder `config.store`; return the result on rank 0.

    Sources are packed in the file's order. On rank 0, `on_start` is called before
    each, with its options without and with the store's rules, and `on_result` after it. When all are packed, the folder's
    `mixture.json` is replaced, which names their stores and repeats; a run that was interrupted leaves it as it was.
    """
    results: dict[str, PackResult] = {}
    workers = ray_workers(config, world_size)
    with pack_session(config, rank, world_size, local_rank, local_world_size, workers) as session:
        try:
            file = session.ranks.tell("sources", _checked(config) if session.ranks.is_first else None, DatasetFile)
            for entry in file.sources:
                asked = _pack_config(config, entry)
                with naming_source(config.source, entry):
                    own = with_stored_rules(asked)
                    if session.ranks.is_first:
                        with redirect_stdout(session.stdout):
                            on_start(entry, asked, own)
                    result = pack_source(own, session)
                if result is not None:
                    results[str(entry.name)] = result
                    with redirect_stdout(session.stdout):
                        on_result(entry, own, result)
        except KeyboardInterrupt as stop:
            if isinstance(stop, Stopped) or not session.num_packed:
                raise
            raise Stopped(exit_code_of(stop), session.num_packed) from stop
        return _finish(config, file, results) if session.ranks.is_first else None


def dry_run_each(config: PackConfig) -> tuple[DatasetFile | None, list[tuple[DatasetEntry | None, DryRun]]]:
    """Compare the source with the store, or each source of a data set file with its store, in the file's order."""
    each: list[tuple[DatasetEntry | None, PackConfig]] = [(None, config)]
    file = _checked(config) if is_dataset_file(config.source) else None
    if file is not None:
        each = [(entry, with_stored_rules(_pack_config(config, entry))) for entry in file.sources]
    found: list[tuple[DatasetEntry | None, DryRun]] = []
    for entry, own in each:
        with naming_source(config.source, entry):
            found.append((entry, dry_run(own)))
    return file, found


def _checked(config: PackConfig) -> DatasetFile:
    """Read the file, and check that no source overlaps with the folder of the stores. Rank 0 only."""
    if not isinstance(config.place, Path):
        raise UsageError(
            f"{config.source} has several sources, which need a store each: pack them into a folder, and `store push` each of "
            "its stores, or pack each source into a URL of its own"
        )
    if config.taken_back:
        raise UsageError(
            f"--take-back {config.taken_back[0]!r}: {config.source} has several sources, each with a store of its own; "
            f"pack the image's own source with it, into {config.store}/NAME.store"
        )
    if (config.store / MANIFEST).exists():
        raise UsageError(
            f"{config.store} is a store; {config.source} has several sources, which need a folder for a store each: "
            "choose another path"
        )
    file = read_dataset_file(Path(config.source), config.alone())
    refuse_unlike(config, file.sources, open_model(config.model, config.model_config))
    for entry in file.sources:
        for path in open_source(entry.path, entry.options(config.alone())).local_paths:
            refuse_overlap(path, config.store)
    return file


def _pack_config(config: PackConfig, entry: DatasetEntry) -> PackConfig:
    """Return the options for one source: the file's before the command line's, and the store's for what both leave out."""
    overrides = entry.overrides(config.val_fraction)
    place, left_out = config.store / entry.store_name, config.left_out - overrides.keys()
    return replace(config, source=entry.path, place=place, **overrides, left_out=left_out)


def _finish(config: PackConfig, file: DatasetFile, results: dict[str, PackResult]) -> DatasetResult:
    """Write `mixture.json`, unless a store is empty. Rank 0 only."""
    stores = tuple(MixedStore(name=entry.store_name, repeats=entry.repeats) for entry in file.sources)
    names = {store.name for store in stores}
    empty = next((name for name, result in results.items() if not result.packed + result.unchanged), None)
    if empty is None:
        write_mixture(config.store, stores)
        why = None
    else:
        why = f"not one image of {empty} could be packed; fix the source, or remove it from {config.source}"
    strange = sorted(path.name for path in config.store.glob("*.store") if path.name not in names)
    left = [f"{config.store / name} belongs to no source of {config.source}; it is kept, and not read" for name in strange]
    return DatasetResult(
        sources=results,
        repeats={str(entry.name): entry.repeats for entry in file.sources},
        notes=[*file.notes, *left],
        why_not_readable=why,
    )
