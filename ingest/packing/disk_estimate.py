"""Estimate how much disk a pack needs, and refuse a disk that has less."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bucketline.command_line import counted
from bucketline.families.family import Padding
from bucketline.files.disk_space import refuse_too_little_disk
from bucketline.ingest.listing_diff import unknown
from bucketline.store.format.safetensors_header import DTYPES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from bucketline.ingest.config import PackConfig
    from bucketline.ingest.images.bucket_grid import Grid
    from bucketline.ingest.parallel.item_parts import Outline
    from bucketline.ingest.pipeline.model.encoder_facts import EncoderFacts
    from bucketline.store import Store

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
