"""`ingest pack --dry-run`: compare a source with a store, and say what a pack would do. Writes nothing, loads no encoder."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bucketline.ingest.encoders.model_folder import open_model
from bucketline.ingest.encoders.text.registry import text_family_of
from bucketline.ingest.encoders.text_columns import text_spec
from bucketline.ingest.encoders.vae import refuse_latents
from bucketline.ingest.images.model_sizes import latent_sizes, model_grid
from bucketline.ingest.images.rejects import RejectedError
from bucketline.ingest.listing_diff import SampleChanges, sample_changes
from bucketline.ingest.other_options import recorded_rules, refuse_other_options
from bucketline.ingest.packing.prepare import opened_source
from bucketline.ingest.packing.target import newest_store
from bucketline.ingest.parallel.item_parts import take_apart
from bucketline.ingest.pipeline.image_reader import Change, ImageReader
from bucketline.ingest.pipeline.model.encoder_facts import NOT_COMPARED, facts_without_weights
from bucketline.ingest.pipeline.packed_index import PackedIndex
from bucketline.ingest.progress import look_at, look_limits
from bucketline.ingest.summary import RunSummary, by_reason
from bucketline.store import Store
from bucketline.store.format.columns import LatentKind
from bucketline.store.format.schema import Schema, bucket_name, text_entry
from bucketline.store.write.publish import new_manifest, stored_manifest

if TYPE_CHECKING:
    from bucketline.ingest.config import PackConfig
    from bucketline.ingest.encoders.model_folder import ModelFolder
    from bucketline.ingest.images.bucket_grid import Grid
    from bucketline.ingest.sources.source import SourceItem


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
    outline, (items,) = take_apart(config.listing_of(source), 1)
    reader = ImageReader(source, store, PackedIndex(store), config, grid)
    account, changes, buckets = RunSummary(), Counter[Change](), Counter[str]()

    def look(item: SourceItem) -> tuple[Change, str | None]:
        compared = reader.compare(item)
        if compared.change in (Change.NONE, Change.TEXT):
            return compared.change, None
        size = reader.placed(item, compared).bucket
        return compared.change, bucket_name(compared.split, size.height_px, size.width_px)

    for item, found in look_at("compare", source, items, look, look_limits(source, config.decode_threads)):
        if isinstance(found, RejectedError):
            account.reject(item.id, found, is_stored=reader.has(item.id))
        else:
            changes[found[0]] += 1
            buckets.update([found[1]] if found[1] is not None else [])
    _, of_samples = sample_changes(config, store, outline, account)
    return DryRun(
        found=outline.num_items,
        new=changes[Change.NEW],
        changed=changes[Change.CONTENT],
        moved=changes[Change.SPLIT],
        recaptioned=changes[Change.TEXT],
        unchanged=changes[Change.NONE],
        rejected=len(account.rejects),
        rejected_by_reason=by_reason(account),
        buckets=dict(sorted(buckets.items())),
        **of_samples,
        pending_shards=len(list((config.store / "pending").glob("*.lmdb"))),
        not_compared=NOT_COMPARED,
        notes=outline.listing.notes,
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
