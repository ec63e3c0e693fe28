"""Before packing: open the source, open or create the store, and check that the disk has room."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bucketline.command_line import counted
from bucketline.families.family import Padding
from bucketline.files.disk_space import refuse_too_little_disk
from bucketline.files.paths import refuse_overlap
from bucketline.ingest.images.model_sizes import model_grid
from bucketline.ingest.listing_diff import unknown
from bucketline.ingest.other_options import CAPTION_OPTIONS, recorded_rules, refuse_other_options
from bucketline.ingest.packing.packed_model import note_model
from bucketline.ingest.sources.objects.place import refuse_overlapping_urls
from bucketline.ingest.sources.objects.source import ObjectSource
from bucketline.ingest.sources.open_source import open_source
from bucketline.store.format.columns import CLASS_LABELS
from bucketline.store.format.safetensors_header import DTYPES
from bucketline.store.format.schema import Schema, text_entry

if TYPE_CHECKING:
    from contextlib import ExitStack

    from numpy.typing import NDArray

    from bucketline.ingest.config import PackConfig
    from bucketline.ingest.encoders.model_folder import ModelFolder
    from bucketline.ingest.images.bucket_grid import Grid
    from bucketline.ingest.parallel.item_parts import Outline
    from bucketline.ingest.pipeline.model.encoder_facts import EncoderFacts
    from bucketline.ingest.sources.source import Source
    from bucketline.store import Store
    from bucketline.store.format.manifest import Manifest
    from bucketline.store.write.publish import StoreTarget


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
        rules=recorded_rules(config, grid.name),
        max_captions=config.max_captions,
        text=text_entry(facts.columns),
    )
    is_recaptioned = False
    if existing is not None:
        refuse_other_options(config, existing, contents.encoders, contents.rules)
        contents.rules.update({name: existing.rules.get(name) for name in CAPTION_OPTIONS})
        is_recaptioned = config.caption_rules.difference(existing.rules) is not None
    most_bytes = num_making * SHARDS_ON_DISK * config.shard_size.num_bytes if isinstance(config.place, str) else None
    store = None if existing is None else target.open(existing)
    refuse_small_disk(config, facts, grid, outline, store, most_bytes, is_recaptioned=is_recaptioned)
    manifest = held.enter_context(target.writing(contents))
    if existing is None:
        note_model(config, is_compared=True)  # so that an interrupted run is continued without it
    return manifest


TOKENS_PER_CHARACTER = 0.3  # of a caption, to estimate whether the store will fit on the disk
DISK_FACTOR = 1.1  # page rounding, sample records, sidecars
SHARDS_ON_DISK = 4  # of a process that sends them: one that is written, one twice while it is sealed, one that is sent


def refuse_small_disk(
    config: PackConfig,
    facts: EncoderFacts,
    grid: Grid,
    outline: Outline,
    store: Store | None,
    most_bytes: int | None,
    *,
    is_recaptioned: bool,
) -> None:
    """Check that the disk has room for the estimated size of the new images, or of all if their captions change.

    `most_bytes`: what is on the disk at a time if shards leave it; None if they stay.
    """
    is_new = np.ones(outline.num_items, dtype=bool)
    if store is not None and not is_recaptioned:
        is_new = unknown(store, outline)
    num_new = int(is_new.sum())
    caption_chars = outline.caption_chars[np.repeat(is_new, outline.num_captions)]
    needed = estimate_bytes(config, facts, grid, num_new, caption_chars)
    if most_bytes is not None:
        needed = min(needed, most_bytes)
    if facts.is_text_first:
        needed += int(_text_bytes(facts, caption_chars) * DISK_FACTOR)
    folder = next(path for path in (config.store, *config.store.absolute().parents) if path.exists())
    what = f"packing {counted(num_new, 'new image')} into {config.store}"
    if is_recaptioned:
        what = f"writing {counted(num_new, 'image')} again, with other captions, to {config.store}"
    refuse_too_little_disk(folder, needed, what, "choose another disk, or a smaller --grid")


def estimate_bytes(
    config: PackConfig, facts: EncoderFacts, grid: Grid, num_items: int, caption_chars: NDArray[np.int32]
) -> int:
    """Estimate the peak disk usage: rows of the largest bucket, tokens by caption length, one shard twice."""
    pixels = max(size.height_px * size.width_px for size in grid.sizes) // facts.downscale**2
    row = facts.stored_channels * pixels * DTYPES[config.dtype].itemsize * (2 if config.flip else 1) + 512
    total = int((num_items * row + _text_bytes(facts, caption_chars)) * DISK_FACTOR)
    return total + min(total, config.shard_size.num_bytes)


def _text_bytes(facts: EncoderFacts, caption_chars: NDArray[np.int32]) -> int:
    num_tokens = len(caption_chars) * facts.max_tokens
    if facts.padding is Padding.VALID:
        lengths = 2 + (caption_chars * TOKENS_PER_CHARACTER).astype(np.int64)
        num_tokens = int(np.minimum(lengths, facts.max_tokens).sum())
    return num_tokens * facts.columns.token_bytes + len(caption_chars) * facts.columns.entry_bytes
