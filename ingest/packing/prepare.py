"""Before packing: open the source, open or create the store, and check that the disk has room."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bucketline.files.paths import refuse_overlap
from bucketline.ingest.config import framing_of
from bucketline.ingest.images.crop import DEFAULT_MAX_CROP, stored_max_crop
from bucketline.ingest.images.model_sizes import model_grid
from bucketline.ingest.other_options import refuse_other_options
from bucketline.ingest.packing.disk_estimate import SHARDS_ON_DISK, refuse_small_disk
from bucketline.ingest.packing.packed_model import note_model
from bucketline.ingest.sources.captions.caption_rules import recorded_in
from bucketline.ingest.sources.objects.place import refuse_overlapping_urls
from bucketline.ingest.sources.objects.source import ObjectSource
from bucketline.ingest.sources.open_source import open_source
from bucketline.store.format.columns import CLASS_LABELS
from bucketline.store.format.schema import Schema, text_entry

if TYPE_CHECKING:
    from contextlib import ExitStack

    from bucketline.ingest.config import PackConfig
    from bucketline.ingest.encoders.model_folder import ModelFolder
    from bucketline.ingest.images.bucket_grid import Grid
    from bucketline.ingest.parallel.item_parts import Outline
    from bucketline.ingest.pipeline.model.encoder_facts import EncoderFacts
    from bucketline.ingest.sources.source import Source
    from bucketline.store.format.manifest import Manifest
    from bucketline.store.write.publish import StoreTarget
    from bucketline.typed_json import Json


def opened_source(config: PackConfig) -> Source:
    """Open the source, and check that it does not overlap with the store."""
    source = open_source(config.source, config)
    for path in source.local_paths:
        refuse_overlap(path, config.store)
    if isinstance(source, ObjectSource) and isinstance(config.place, str):
        refuse_overlapping_urls(source.folder_url, config.place)
    return source


def prepare(
    config: PackConfig,
    model: ModelFolder,
    facts: EncoderFacts,
    outline: Outline,
    held: ExitStack,
    target: StoreTarget,
    *,
    num_making: int,
) -> Manifest:
    """Open or create the store, adopt the shards of an interrupted run, and check the free disk space.

    The store stays locked until `held` is closed. Its manifest keeps its caption rules until the rows of other rules are
    published, in the same generation. `num_making`: processes that make shards on this disk; they send them if the store
    is in object storage.
    """
    existing = target.newest()
    if facts.text.get("family") == CLASS_LABELS:
        from bucketline.ingest.encoders.text.class_labels import refuse_text_dtype

        config.caption_rules.refuse_for_classes(model.name)
        refuse_text_dtype(model, config.text_dtype)
    grid = model_grid(config.grid, model, facts.downscale)
    contents = Schema(
        encoders={"vae": dict(facts.vae), "text_encoder": dict(facts.text)},
        rules=rules_of(config, grid, existing),
        max_captions=config.max_captions,
        text=text_entry(facts.columns),
    )
    is_recaptioned = False
    if existing is not None:
        refuse_other_options(config, existing, contents)
        is_recaptioned = config.caption_rules.difference(existing.rules) is not None
    most_bytes = num_making * SHARDS_ON_DISK * config.shard_size.num_bytes if isinstance(config.place, str) else None
    store = None if existing is None else target.open(existing)
    refuse_small_disk(config, facts, grid, outline, store, most_bytes, is_recaptioned=is_recaptioned)
    manifest = held.enter_context(target.writing(contents))
    if existing is None:
        note_model(config, is_compared=True)  # so that an interrupted run is continued without it
    return manifest


def rules_of(config: PackConfig, grid: Grid, existing: Manifest | None) -> dict[str, Json]:
    """Return the rules that a run records; those of captions are the store's, since `--recaption` may change them."""
    return {
        **framing_of(config, grid, _max_crop(config, existing)).as_rules(),
        "flip": config.flip,
        "split": config.held_out.as_json(),
        **(config.caption_rules.as_json() if existing is None else recorded_in(existing.rules)),
    }


def _max_crop(config: PackConfig, existing: Manifest | None) -> float | None:
    """Return the limit that the option sets; without it, an existing store keeps its own, and a new one gets the default."""
    if config.max_crop is not None:
        return config.max_crop
    return DEFAULT_MAX_CROP if existing is None else stored_max_crop(existing.rules)
