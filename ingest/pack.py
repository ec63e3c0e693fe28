"""The whole of `ingest pack`: agree, pack each rank's slice, publish, account."""

from __future__ import annotations

import dataclasses
import secrets
import shutil
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketline.allocator import keep_freed_memory
from bucketline.errors import StoreError
from bucketline.ingest.account import Account, by_reason, check_identity, joined, rejects_as_lines
from bucketline.ingest.again import RejectLimit
from bucketline.ingest.crop_loss import crop_losses_as_json
from bucketline.ingest.device import chosen_device, share_of_cores
from bucketline.ingest.encoders.captions import CaptionEncoder, Padding, TextSettings
from bucketline.ingest.encoders.families import load_caption_encoder
from bucketline.ingest.encoders.model_folder import ModelFolder, open_model
from bucketline.ingest.encoders.vae import Latents, VaeEncoder
from bucketline.ingest.framing import framing_of
from bucketline.ingest.interrupts import interrupts_between_images
from bucketline.ingest.model_sizes import model_grid
from bucketline.ingest.paths import refuse_overlap
from bucketline.ingest.progress import packing_progress
from bucketline.ingest.ranks import Ranks, rank_of
from bucketline.ingest.slice_packer import SlicePacker
from bucketline.ingest.sources.choose import open_source
from bucketline.ingest.stages import Stages, slowest_of
from bucketline.store import Store
from bucketline.store.digests import sample_digest
from bucketline.store.durable import write_or_explain
from bucketline.store.info import disk_bytes
from bucketline.store.manifest import (
    MANIFEST,
    Manifest,
    TextEntry,
    check_fingerprint,
    column_entries,
    newest_intact,
    write_manifest,
)
from bucketline.store.publish import Contents, adopt, lock_store, new_manifest, newest_manifest, prepare_store, publish
from bucketline.store.sealed_shard import KEY, as_keys

if TYPE_CHECKING:
    import torch

    from bucketline.ingest.config import PackConfig
    from bucketline.ingest.grids import Grid
    from bucketline.ingest.sources.source import Listing, Source, SourceItem

TOKENS_PER_CHARACTER = 0.3  # of a caption; only to see whether the store will fit
NAMED = 10  # ids that a summary names of those that it counts
DISK_FACTOR = 1.1  # page rounding, sample records, sidecars


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoders:
    """What turns pictures and captions into columns."""

    vae: VaeEncoder
    text: CaptionEncoder
    grid: Grid


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a run did; `ingest pack --json` prints it."""

    found: int
    packed: int
    unchanged: int
    rejected: int
    without_caption: int
    enlarged: int
    crop_loss: dict[str, dict[str, float]]  # of the images packed, by bucket: how many, the share cropped away (mean, max)
    captions_truncated: int
    captions_beyond: list[str]  # ids of samples with more captions than --max-captions
    captions_without_image: list[str]
    passed_over: list[str]  # images of the source that are not packed on purpose, each with the reason
    rejected_by_reason: dict[str, int]
    not_in_source: int  # samples of the store whose images are no longer in the source; they stay
    not_in_source_ids: list[str]  # the first ten of them
    pruned: int  # samples that were dropped because their images are no longer in the source
    pruned_ids: list[str]  # the first ten of them
    too_many_rejects: bool  # more than --max-rejects
    payload_bytes: int
    disk_bytes: int
    generation: int
    seconds: float
    stage_seconds: dict[str, float]  # of the encoding threads: waited for decoded pictures, encoded, waited for the writer
    slowest_stage: str  # decode, encode or write


def pack(config: PackConfig, *, rank: int, world_size: int, local_rank: int, local_world_size: int = 1) -> Summary | None:
    """Pack a source into a store; the summary on rank 0, None on the others.

    Raises:
        UsageError: where source and store overlap, or the configuration makes no sense.
        SourceError, ModelError, StoreError, FingerprintError, LockedError: naming the item, before anything is written.
        AccountError: where an image was lost or counted twice; nothing is published then.
    """
    started = time.monotonic()
    with Ranks(rank=rank, world_size=world_size) as ranks, ExitStack() as held:
        source, listing = ranks.from_first(lambda: _listed(config))
        device = chosen_device(config.device, local_rank)
        encoders = load_encoders(config, open_model(config.model), device)
        manifest, token = ranks.from_first(lambda: (_prepare(config, encoders, listing, held), secrets.token_hex(4)))
        own = [item for item in listing.items if rank_of(item.id, world_size) == rank]
        packer = SlicePacker(
            source=source,
            store=Store(config.store, manifest),
            config=config,
            grid=encoders.grid,
            vae=encoders.vae,
            text=encoders.text,
            stages=Stages(on_shared_cores=device.type == "cpu"),
            decode_threads=config.decode_threads or share_of_cores(local_world_size),
            shard_prefix=f"g{manifest.generation + 1:06d}-{token}-r{rank:04d}",  # a name that no shard has had
        )
        with packing_progress(len(own), ranks, packer.stages) as on_image, interrupts_between_images() as check:
            packer.run(own, on_image, check)
        reports = ranks.gather((packer.account, packer.sealed))
        account = joined(account for account, _ in reports)
        check_identity(len(listing.items), account)
        if not ranks.is_first:
            return None
        return _finish(config, manifest, listing, account, [name for _, sealed in reports for name in sealed], started)


def _listed(config: PackConfig) -> tuple[Source, Listing]:
    """Open and list the source, after it has been compared with the store. On rank 0 alone."""
    source = open_source(config.source)
    for path in source.local_paths:
        refuse_overlap(path, config.store)
    return source, source.listing()


def load_encoders(config: PackConfig, model: ModelFolder, device: torch.device) -> Encoders:
    """Load what the model folder has.

    Raises:
        ModelError: where a part is missing or cannot be loaded.
        UsageError: where the grid does not suit the VAE, or an option does not suit the model.
    """
    if device.type == "cpu":
        keep_freed_memory()
    latents, encode_dtype = Latents(config.latents), config.encode_dtype
    vae = VaeEncoder(model, device, config.dtype, latents=latents, encode_dtype=encode_dtype)
    settings = TextSettings(stored_dtype=config.dtype, encode_dtype=encode_dtype, max_tokens=config.max_tokens)
    text = load_caption_encoder(model, device, settings)
    return Encoders(vae=vae, text=text, grid=model_grid(config.grid, model, vae.downscale))


def _prepare(config: PackConfig, encoders: Encoders, listing: Listing, held: ExitStack) -> Manifest:
    """Open or make the store, adopt what an interrupted run left, and see that what is to come fits. On rank 0 alone."""
    _refuse_foreign_folder(config)
    text = encoders.text.columns
    contents = Contents(
        encoders={"vae": encoders.vae.provenance, "text_encoder": encoders.text.provenance},
        rules={
            **framing_of(config, encoders.grid).as_rules(),
            "flip": config.flip,
            "split": {"val_fraction": float(config.val_fraction), "by": config.split_by.value},
        },
        max_captions=config.max_captions,
        text=TextEntry(header_bytes=text.header_bytes, tokens=column_entries(text.tokens), fixed=column_entries(text.fixed)),
    )
    manifest = newest_manifest(config.store)
    if manifest is not None:
        check_fingerprint(manifest, contents.encoders, contents.rules, contents.max_captions)
    _refuse_too_little_disk(config, encoders, listing, manifest)
    prepare_store(config.store)
    held.enter_context(lock_store(config.store))
    manifest = newest_manifest(config.store)  # again: the lock is ours only now
    if manifest is not None:
        check_fingerprint(manifest, contents.encoders, contents.rules, contents.max_captions)
    if manifest is None or not (config.store / MANIFEST).exists():  # new, or lost between two writes of a crash
        manifest = write_manifest(config.store, manifest or new_manifest(contents))
    return publish(config.store, manifest, adopt(config.store, manifest), ())


def _refuse_foreign_folder(config: PackConfig) -> None:
    if config.store.exists() and not config.store.is_dir():
        raise StoreError(f"{config.store} is a file; expected a store's folder, or a path where there is nothing")
    if config.store.is_dir() and not (config.store / MANIFEST).exists():
        own = ("shards", "pending", "generations")
        strange = sorted(path.name for path in config.store.iterdir() if path.name not in own and path.suffix != ".tmp")
        if strange and newest_intact(config.store) is None:
            raise StoreError(
                f"{config.store} is not a store and not empty (it has {strange[0]!r}); choose a path where there is nothing"
            )


def _refuse_too_little_disk(config: PackConfig, encoders: Encoders, listing: Listing, manifest: Manifest | None) -> None:
    """Estimate what the run will write for images that the store does not have yet, and look at the free disk."""
    items = listing.items if manifest is None else _unknown(Store(config.store, manifest), listing.items)
    needed = estimate_bytes(config, encoders, items)
    folder = next(path for path in (config.store, *config.store.absolute().parents) if path.exists())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise StoreError(
            f"{config.store} will take about {needed >> 20} MiB for {len(items)} new images, "
            f"{free >> 20} MiB are free; make room, choose another disk, or a smaller --grid"
        )


def _unknown(store: Store, items: list[SourceItem]) -> list[SourceItem]:
    keys = as_keys([sample_digest(item.id) for item in items])
    known = np.zeros(len(items), dtype=bool)
    for shard in store.shards:
        known |= shard.positions(keys) >= 0
    return [item for item, is_known in zip(items, known, strict=True) if not is_known]


def not_in_source(store: Store, items: list[SourceItem]) -> list[str]:
    """Name the live samples of a store that the source no longer has."""
    listed = np.sort(as_keys([sample_digest(item.id) for item in items]))
    gone: list[str] = []
    for ordinal, shard in enumerate(store.shards):
        keys = shard.index.slice("digest", 0, shard.entry.samples)
        strange = ~np.isin(keys.reshape(-1).view(KEY), listed)
        live = [digest.tobytes() for digest in keys[strange] if shard.find(digest.tobytes()) is not None]
        gone.extend(store.record_of(ordinal, digest).id for digest in live)
    return sorted(gone)


def estimate_bytes(config: PackConfig, encoders: Encoders, items: list[SourceItem]) -> int:
    """Estimate the store's size while it is made: rows of the largest bucket, tokens by length, one shard twice."""
    item_bytes = {"F32": 4}.get(config.dtype, 2)
    pixels = max(size.height_px * size.width_px for size in encoders.grid.sizes) // encoders.vae.downscale**2
    row = encoders.vae.stored_channels * pixels * item_bytes * (2 if config.flip else 1) + 512
    text, text_bytes = encoders.text, 0
    for item in items:
        for caption in item.captions:
            length = text.max_tokens
            if text.padding is Padding.VALID:
                length = min(length, 2 + int(len(caption) * TOKENS_PER_CHARACTER))
            text_bytes += length * text.columns.token_bytes + text.columns.caption_bytes
    total = int((len(items) * row + text_bytes) * DISK_FACTOR)
    return total + min(total, config.shard_size_mib << 20)


def _finish(
    config: PackConfig, manifest: Manifest, listing: Listing, account: Account, sealed: list[str], started: float
) -> Summary:
    """Publish the new generation and write down the rejects. On rank 0 alone, under the store's lock."""
    too_many = not RejectLimit.parse(config.max_rejects).allows(len(account.rejects), found=len(listing.items))
    # a source that is half broken may also have lost images that are only out of reach
    pruned = not_in_source(Store(config.store, manifest), listing.items) if config.prune and not too_many else []
    dropped = [sample_digest(sample_id) for sample_id in (*account.dropped, *pruned)]
    write_or_explain(config.store / "rejects.jsonl", rejects_as_lines(account))
    try:
        published = publish(config.store, manifest, sealed, dropped)
    except OSError as error:
        raise StoreError(
            f"{config.store} cannot be written: {error.strerror}; what was packed is kept, run the same command again"
        ) from error
    gone = not_in_source(Store(config.store, published), listing.items)
    stages = {stage: round(seconds, 3) for stage, seconds in account.stage_seconds.items()}
    return Summary(
        found=len(listing.items),
        packed=account.packed,
        unchanged=account.unchanged,
        rejected=len(account.rejects),
        without_caption=account.without_caption,
        enlarged=account.enlarged,
        crop_loss=crop_losses_as_json(account.crop_losses),
        captions_truncated=account.captions_truncated,
        captions_beyond=account.captions_beyond,
        captions_without_image=listing.orphans,
        passed_over=listing.passed_over,
        rejected_by_reason=by_reason(account),
        not_in_source=len(gone),
        not_in_source_ids=gone[:NAMED],
        pruned=len(pruned),
        pruned_ids=pruned[:NAMED],
        too_many_rejects=too_many,
        payload_bytes=published.payload_bytes,
        disk_bytes=disk_bytes(config.store),
        generation=published.generation,
        seconds=round(time.monotonic() - started, 3),
        stage_seconds=stages,
        slowest_stage=slowest_of(stages, on_shared_cores=chosen_device(config.device, 0).type == "cpu"),
    )


def as_json(summary: Summary) -> dict[str, Any]:
    """Give the summary as `--json` prints it."""
    return dataclasses.asdict(summary)
