"""Before packing: open the source, open or create the store, and check that the disk has room."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bucketline.command_line import counted
from bucketline.files.disk_space import refuse_too_little_disk
from bucketline.files.paths import refuse_overlap
from bucketline.ingest.config import framing_of
from bucketline.ingest.encoders.text_columns import Padding
from bucketline.ingest.images.crop import DEFAULT_MAX_CROP, stored_max_crop
from bucketline.ingest.images.model_sizes import model_grid
from bucketline.ingest.listing_diff import unknown
from bucketline.ingest.other_options import refuse_other_options
from bucketline.ingest.sources.captions.caption_rules import recorded_in
from bucketline.ingest.sources.open_source import open_source
from bucketline.store import Store
from bucketline.store.commands.progress import bar_of_bytes
from bucketline.store.format.columns import CLASS_LABELS
from bucketline.store.format.manifest_entries import text_entry
from bucketline.store.format.safetensors_header import DTYPES
from bucketline.store.read.lost_files import refuse_lost_shards
from bucketline.store.write.newest import newest_manifest
from bucketline.store.write.publish import Contents
from bucketline.store.write.store_writer import writing

if TYPE_CHECKING:
    from contextlib import ExitStack

    from numpy.typing import NDArray

    from bucketline.ingest.config import PackConfig
    from bucketline.ingest.encoders.model_folder import ModelFolder
    from bucketline.ingest.images.bucket_grid import Grid
    from bucketline.ingest.importers.config import ImportConfig
    from bucketline.ingest.parallel.item_parts import Outline
    from bucketline.ingest.pipeline.lazy_encoders import EncoderFacts
    from bucketline.ingest.sources.source import Source
    from bucketline.store.format.manifest import Manifest
    from bucketline.store.sync.working import WorkingStore
    from bucketline.typed_json import Json


TOKENS_PER_CHARACTER = 0.3  # of a caption, to estimate whether the store will fit on the disk
DISK_FACTOR = 1.1  # page rounding, sample records, sidecars
SHARDS_ON_DISK = 4  # of a process that sends them: one that is written, one twice while it is sealed, one that is sent


def working_store(config: PackConfig | ImportConfig) -> WorkingStore | None:
    """Return the folder that stands for a store in object storage; None for a store on a disk."""
    if isinstance(config.place, Path):
        return None
    from bucketline.store.sync.working import WorkingStore

    return WorkingStore(config.objects(config.place), config.store)


def opened_store(config: PackConfig, manifest: Manifest, working: WorkingStore | None) -> Store:
    """Return a generation of the store; of one in object storage, what is only there is got when it is read."""
    return Store(config.store, manifest) if working is None else working.open(manifest)


def opened_source(config: PackConfig) -> Source:
    """Open the source, check that it does not overlap with the store, and check the store's shards."""
    source = open_source(config.source, config)
    for path in source.local_paths:
        refuse_overlap(path, config.store)
    if (manifest := newest_manifest(config.store)) is not None:
        refuse_lost_shards(config.store, manifest)  # with only an index, everything would look unchanged
    return source


def prepare(
    config: PackConfig,
    model: ModelFolder,
    facts: EncoderFacts,
    outline: Outline,
    held: ExitStack,
    working: WorkingStore | None,
    *,
    num_making: int,
) -> Manifest:
    """Open or create the store, adopt the shards of an interrupted run, and check the free disk space.

    The store stays locked until `held` is closed. Its manifest keeps its caption rules until the rows of other rules are
    published, in the same generation. `num_making`: processes that make shards on this disk; they send them if there is
    `working`.
    """
    existing = newest_manifest(config.store)
    if facts.columns.tokens[0].name == CLASS_LABELS:
        from bucketline.ingest.encoders.families.class_labels import refuse_text_dtype

        config.caption_rules.refuse_for_classes(model.name)
        refuse_text_dtype(model, config.text_dtype)
    grid = model_grid(config.grid, model, facts.downscale)
    contents = Contents(
        encoders={"vae": dict(facts.vae), "text_encoder": dict(facts.text)},
        rules=rules_of(config, grid, existing),
        max_captions=config.max_captions,
        text=text_entry(facts.columns),
    )
    is_recaptioned = False
    if existing is not None:
        refuse_other_options(config, existing, contents)
        is_recaptioned = config.caption_rules.difference(existing.rules) is not None
    most_bytes = None if working is None else num_making * SHARDS_ON_DISK * (config.shard_size_mib << 20)
    _refuse_too_large(config, facts, grid, outline, existing, most_bytes, is_recaptioned=is_recaptioned)
    manifest = held.enter_context(writing(config.store, contents))
    if working is not None:
        working.send_left(manifest, lambda total: bar_of_bytes("send", total))
    return manifest


def rules_of(config: PackConfig, grid: Grid, existing: Manifest | None) -> dict[str, Json]:
    """Return the rules that a run records; those of captions are the store's, since `--recaption` may change them."""
    return {
        **framing_of(config, grid, _max_crop(config, existing)).as_rules(),
        "flip": config.flip,
        "split": {"val_fraction": float(config.val_fraction), "by": config.split_by.value},
        **(config.caption_rules.as_json() if existing is None else recorded_in(existing.rules)),
    }


def _max_crop(config: PackConfig, existing: Manifest | None) -> float | None:
    """Return the limit that the option sets; without it, an existing store keeps its own, and a new one gets the default."""
    if config.max_crop is not None:
        return config.max_crop
    return DEFAULT_MAX_CROP if existing is None else stored_max_crop(existing.rules)


def _refuse_too_large(
    config: PackConfig,
    facts: EncoderFacts,
    grid: Grid,
    outline: Outline,
    manifest: Manifest | None,
    most_bytes: int | None,
    *,
    is_recaptioned: bool,
) -> None:
    """Check that the disk has room for the estimated size of the new images, or of all if their captions change.

    `most_bytes`: what is on the disk at a time if shards leave it; None if they stay.
    """
    is_new = np.ones(outline.num_items, dtype=bool)
    if manifest is not None and not is_recaptioned:
        is_new = unknown(Store(config.store, manifest), outline)
    num_new = int(is_new.sum())
    needed = estimate_bytes(config, facts, grid, num_new, outline.caption_chars[np.repeat(is_new, outline.num_captions)])
    if most_bytes is not None:
        needed = min(needed, most_bytes)
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
    num_tokens = len(caption_chars) * facts.max_tokens
    if facts.padding is Padding.VALID:
        lengths = 2 + (caption_chars * TOKENS_PER_CHARACTER).astype(np.int64)
        num_tokens = int(np.minimum(lengths, facts.max_tokens).sum())
    text_bytes = num_tokens * facts.columns.token_bytes + len(caption_chars) * facts.columns.entry_bytes
    total = int((num_items * row + text_bytes) * DISK_FACTOR)
    return total + min(total, config.shard_size_mib << 20)
