"""`ingest pack` from end to end: agree on the source, pack each rank's slice, publish, summarise."""

from __future__ import annotations

import secrets
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bucketline.allocator import keep_freed_memory
from bucketline.command_line import counted
from bucketline.errors import FingerprintError, StoreError
from bucketline.files.atomic_write import write_or_explain
from bucketline.files.disk_space import refuse_too_little_disk
from bucketline.files.paths import refuse_overlap
from bucketline.ingest.config import framing_of
from bucketline.ingest.encoders.families.class_labels import refuse_text_dtype
from bucketline.ingest.encoders.families.registry import load_caption_encoder
from bucketline.ingest.encoders.model_folder import ModelFolder, open_model
from bucketline.ingest.encoders.text_columns import CaptionEncoder, Padding, TextSettings
from bucketline.ingest.encoders.vae import VaeEncoder
from bucketline.ingest.images.crop import DEFAULT_MAX_CROP, stored_max_crop
from bucketline.ingest.images.crop_loss import crop_losses_as_json
from bucketline.ingest.images.model_sizes import model_grid
from bucketline.ingest.listing_diff import NAMED, Pruning, not_in_source, pruning, unknown
from bucketline.ingest.parallel.item_parts import ItemParts, Outline, take_apart
from bucketline.ingest.parallel.ranks import PackRanks
from bucketline.ingest.parallel.shares import Share
from bucketline.ingest.parallel.signals import ECHO_S, Interrupts, Stopped, exit_code_of
from bucketline.ingest.pipeline.device import chosen_device, share_of_cores
from bucketline.ingest.pipeline.slice_packer import SlicePacker
from bucketline.ingest.pipeline.stage_timer import StageTimer, slowest_of
from bucketline.ingest.progress import packing_progress
from bucketline.ingest.rules import RejectLimit
from bucketline.ingest.sources.captions.caption_rules import recorded_in
from bucketline.ingest.sources.open_source import open_source
from bucketline.ingest.sources.source import caption_rest
from bucketline.ingest.sources.source_json import source_as_json, source_from_json
from bucketline.ingest.summary import (
    WITHOUT_CAPTION,
    RunSummary,
    by_reason,
    check_identity,
    joined,
    rejects_as_lines,
    without_caption_as_lines,
)
from bucketline.store import Store
from bucketline.store.format.columns import CLASS_LABELS, LatentKind
from bucketline.store.format.hashing import sample_digest
from bucketline.store.format.manifest import Manifest, text_entry
from bucketline.store.format.safetensors_header import DTYPES
from bucketline.store.read.info import disk_bytes, joined_error
from bucketline.store.read.lost_files import refuse_lost_shards
from bucketline.store.write.newest import newest_manifest
from bucketline.store.write.publish import Contents, publish
from bucketline.store.write.store_writer import stored_manifest, writing
from bucketline.typed_json import decode, encode

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from numpy.typing import NDArray

    from bucketline.ingest.config import PackConfig
    from bucketline.ingest.images.bucket_grid import Grid
    from bucketline.ingest.sources.source import Source
    from bucketline.store.format.quantised_text import TextError

TOKENS_PER_CHARACTER = 0.3  # of a caption, to estimate whether the store will fit on the disk
DISK_FACTOR = 1.1  # page rounding, sample records, sidecars


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoders:
    """The encoders that turn images and captions into columns, and the grid."""

    vae: VaeEncoder
    text: CaptionEncoder
    grid: Grid


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """The message from rank 0 to the other ranks when the store is ready."""

    manifest: Manifest
    token: str  # in the names of the run's shards


@dataclass(frozen=True, slots=True, kw_only=True)
class _Report:
    """The message from a rank to rank 0 when it has finished."""

    account: RunSummary
    sealed: list[str]  # names of its shards


@dataclass(frozen=True, slots=True, kw_only=True)
class PackResult:
    """Result of a run, as `ingest pack --json` prints it."""

    found: int
    packed: int
    latents_kept: int  # packed images whose captions or mtime changed, with latents reused from the store
    recaptioned: str | None  # the first caption rule that --recaption changed, with both values
    captions_as_before: int  # samples that --recaption kept with captions of the rules before, because it could not read them
    unchanged: int
    rejected: int
    without_caption: int
    captions_from: dict[str, int]  # number of images per origin of their captions
    notes: list[str]  # what was left out of the source, or may be a misunderstanding
    enlarged: int
    crop_loss: dict[str, dict[str, float]]  # by bucket, of packed images: count, share cropped away (mean, max)
    captions_truncated: int
    captions_beyond: list[str]  # ids of samples with more captions than --max-captions
    captions_without_image: list[str]
    passed_over: list[str]  # images that are skipped on purpose, each with the reason
    rejected_by_reason: dict[str, int]
    not_in_source: int  # samples of the store whose images are no longer in the source; they are kept
    not_in_source_ids: list[str]  # at most ten
    pruned: int  # samples dropped because their images are no longer in the source
    pruned_ids: list[str]  # at most ten
    not_pruned: str | None  # why --prune kept some or all of what is no longer in the source
    dropped: int  # samples dropped because their images are now rejected
    dropped_ids: list[str]  # at most ten
    kept_unreadable: int  # samples whose images or captions could not be read; they are kept
    kept_unreadable_ids: list[str]  # at most ten
    kept_beyond_limit: int  # samples kept although their images are rejected, because there are too many rejects
    too_many_rejects: bool  # more than --max-rejects
    text_error: TextError | None  # of the store's captions, if their tokens are quantised
    payload_bytes: int
    disk_bytes: int
    generation: int
    seconds: float
    stage_seconds: dict[str, float]  # of the encoding threads: wait for decoded images, encode, wait for the writer
    slowest_stage: str  # decode, encode or write


def pack(config: PackConfig, *, rank: int, world_size: int, local_rank: int, local_world_size: int = 1) -> PackResult | None:
    """Pack a source into a store; return the result on rank 0, None on the others.

    Raises:
        UsageError: if source and store overlap, or the options contradict each other.
        SourceError, ModelError, StoreError, FingerprintError, LockedError: naming the item, before anything is written.
        AccountError: if an image was lost or counted twice; nothing is published then.
        RankError: on rank 0 if another rank failed or is gone; on the others if rank 0 is gone.
        KeyboardInterrupt: after Ctrl-C or SIGTERM; as Stopped once packing has begun.
        SystemExit: on the others, if rank 0 reports the error.
    """
    with pack_session(rank, world_size, local_rank, local_world_size) as session:
        return pack_source(config, session)


@dataclass(slots=True, kw_only=True)
class PackSession:
    """The processes of a run, and what the sources that they pack in turn share."""

    interrupts: Interrupts
    ranks: PackRanks
    local_rank: int
    local_world_size: int
    encoders: Encoders | None = None  # loaded for the first source
    num_packed: int = 0  # by this rank, of sources that are finished


@contextmanager
def pack_session(rank: int, world_size: int, local_rank: int, local_world_size: int) -> Iterator[PackSession]:
    """Handle signals and connect the processes in this block; raises what `pack` does."""
    with (
        Interrupts(echo_s=ECHO_S if world_size > 1 else 0.0) as interrupts,
        PackRanks(rank=rank, world_size=world_size, local_world_size=local_world_size, interrupts=interrupts) as ranks,
    ):
        yield PackSession(interrupts=interrupts, ranks=ranks, local_rank=local_rank, local_world_size=local_world_size)


def pack_source(config: PackConfig, session: PackSession, *, is_last: bool = True) -> PackResult | None:
    """Pack one source; `is_last` tells the other ranks that they may end. Otherwise as `pack`."""
    started = time.monotonic()
    ranks = session.ranks
    with ExitStack() as held:
        source, outline, own = _agree_on_source(config, ranks)
        device = chosen_device(config.device, session.local_rank)
        if session.encoders is None:
            session.encoders = load_encoders(config, open_model(config.model, config.model_config), device)
        encoders = session.encoders
        start = ranks.from_first(
            lambda: _Start(manifest=_prepare(config, encoders, outline[0], held), token=secrets.token_hex(4)),
            encode,
            lambda value: decode(_Start, value),
        )
        manifest = start.manifest
        packer = SlicePacker(
            source=source,
            store=Store(config.store, manifest),
            share=Share(rank=ranks.rank, world_size=ranks.world_size),
            config=config,
            grid=encoders.grid,
            vae=encoders.vae,
            text=encoders.text,
            stages=StageTimer(on_shared_cores=device.type == "cpu"),
            decode_threads=config.decode_threads or share_of_cores(session.local_world_size),
            shard_prefix=f"g{manifest.generation + 1:06d}-{start.token}-r{ranks.rank:04d}",  # a name never used before
        )
        try:
            with (
                packing_progress(len(own), ranks, packer.stages) as on_image,
                session.interrupts.between_images(ranks.check) as check,
            ):
                packer.run(own, on_image, check)
            report = _Report(account=packer.account, sealed=packer.sealed)
            reports = ranks.gather(report, encode, lambda value: decode(_Report, value), is_last=is_last)
            if reports is None:
                return None
            account = joined(report.account for report in reports)
            check_identity(outline[0].num_items, account)
            return _finish(config, manifest, outline[0], account, [name for own in reports for name in own.sealed], started)
        except KeyboardInterrupt as stop:
            raise Stopped(exit_code_of(stop), session.num_packed + packer.account.packed) from stop
        finally:
            session.num_packed += packer.account.packed


def _agree_on_source(config: PackConfig, ranks: PackRanks) -> tuple[Source, list[Outline], ItemParts]:
    """List the source on rank 0; return it, the outline of all items (on rank 0 only), and this rank's items."""
    source = ranks.from_first(lambda: _opened(config), source_as_json, source_from_json)
    outline: list[Outline] = []

    def dealt() -> list[list[bytes]]:
        listing = source.listing()
        caption_rest(listing, config.default_caption)
        whole, items = take_apart(config.caption_rules.applied(listing), ranks.world_size)
        outline.append(whole)
        return [own.parts for own in items]

    return source, outline, ItemParts(ranks.deal(dealt))


def _opened(config: PackConfig) -> Source:
    """Open the source, check that it does not overlap with the store, and check the store's shards. Rank 0 only."""
    source = open_source(config.source, config)
    for path in source.local_paths:
        refuse_overlap(path, config.store)
    if (manifest := newest_manifest(config.store)) is not None:
        refuse_lost_shards(config.store, manifest)  # with only an index, everything would look unchanged
    return source


def load_encoders(config: PackConfig, model: ModelFolder, device: torch.device) -> Encoders:
    """Load the VAE and the text encoders of a model folder, and choose the grid.

    Raises:
        ModelError: if a part is missing or cannot be loaded.
        UsageError: if the grid does not suit the VAE, or an option does not suit the model.
    """
    if device.type == "cpu":
        keep_freed_memory()
    latents, encode_dtype = LatentKind(config.latents), config.encode_dtype
    vae = VaeEncoder(model, device, config.dtype, latents=latents, encode_dtype=encode_dtype)
    settings = TextSettings(
        stored_dtype=config.text_dtype or config.dtype, encode_dtype=encode_dtype, max_tokens=config.max_tokens
    )
    text = load_caption_encoder(model, device, settings)
    if text.columns.tokens[0].name == CLASS_LABELS:
        config.caption_rules.refuse_for_classes(model.name)
        refuse_text_dtype(model, config.text_dtype)
    return Encoders(vae=vae, text=text, grid=model_grid(config.grid, model, vae.downscale))


def _prepare(config: PackConfig, encoders: Encoders, outline: Outline, held: ExitStack) -> Manifest:
    """Open or create the store, adopt the shards of an interrupted run, and check the free disk space. Rank 0 only.

    The store's manifest keeps its caption rules until the rows of other rules are published, in the same generation.
    """
    stored = newest_manifest(config.store)
    contents = Contents(
        encoders={"vae": encoders.vae.provenance, "text_encoder": encoders.text.provenance},
        rules={
            **framing_of(config, encoders.grid, _max_crop(config)).as_rules(),
            "flip": config.flip,
            "split": {"val_fraction": float(config.val_fraction), "by": config.split_by.value},
            **(config.caption_rules.as_json() if stored is None else recorded_in(stored.rules)),  # compared below
        },
        max_captions=config.max_captions,
        text=text_entry(encoders.text.columns),
    )
    existing = stored_manifest(config.store, contents)
    difference = None if existing is None else config.caption_rules.difference(existing.rules)
    if difference and not config.recaption:
        field, before, now = difference
        raise FingerprintError(
            f"the store was made with {field} = {before!s:.200}, this run has {now!s:.200}; use the settings the store was "
            "made with, or add --recaption to encode the captions again (the stored latents are kept)"
        )
    _refuse_too_large(config, encoders, outline, existing, is_recaptioned=difference is not None)
    return held.enter_context(writing(config.store, contents))


def _max_crop(config: PackConfig) -> float | None:
    """Return the limit that the option sets; without it, an existing store keeps its own, and a new one gets the default."""
    if config.max_crop is not None:
        return config.max_crop
    manifest = newest_manifest(config.store)
    return DEFAULT_MAX_CROP if manifest is None else stored_max_crop(manifest.rules)


def _refuse_too_large(
    config: PackConfig, encoders: Encoders, outline: Outline, manifest: Manifest | None, *, is_recaptioned: bool
) -> None:
    """Check that the disk has room for the estimated size of the new images, or of all if their captions change."""
    is_new = np.ones(outline.num_items, dtype=bool)
    if manifest is not None and not is_recaptioned:
        is_new = unknown(Store(config.store, manifest), outline)
    num_new = int(is_new.sum())
    needed = estimate_bytes(config, encoders, num_new, outline.caption_chars[np.repeat(is_new, outline.num_captions)])
    folder = next(path for path in (config.store, *config.store.absolute().parents) if path.exists())
    what = f"packing {counted(num_new, 'new image')} into {config.store}"
    if is_recaptioned:
        what = f"writing {counted(num_new, 'image')} again, with other captions, to {config.store}"
    refuse_too_little_disk(folder, needed, what, "choose another disk, or a smaller --grid")


def estimate_bytes(config: PackConfig, encoders: Encoders, num_items: int, caption_chars: NDArray[np.int32]) -> int:
    """Estimate the peak disk usage: rows of the largest bucket, tokens by caption length, one shard twice."""
    pixels = max(size.height_px * size.width_px for size in encoders.grid.sizes) // encoders.vae.downscale**2
    row = encoders.vae.stored_channels * pixels * DTYPES[config.dtype].itemsize * (2 if config.flip else 1) + 512
    text, num_tokens = encoders.text, len(caption_chars) * encoders.text.max_tokens
    if text.padding is Padding.VALID:
        lengths = 2 + (caption_chars * TOKENS_PER_CHARACTER).astype(np.int64)
        num_tokens = int(np.minimum(lengths, text.max_tokens).sum())
    text_bytes = num_tokens * text.columns.token_bytes + len(caption_chars) * text.columns.caption_bytes
    total = int((num_items * row + text_bytes) * DISK_FACTOR)
    return total + min(total, config.shard_size_mib << 20)


def _finish(
    config: PackConfig, manifest: Manifest, outline: Outline, account: RunSummary, sealed: list[str], started: float
) -> PackResult:
    """Write the rejects and publish the new generation. Rank 0 only, under the store's lock."""
    too_many = not RejectLimit.parse(config.max_rejects).allows(len(account.rejects), found=outline.num_items)
    pruned = Pruning(digests=[], ids=[], why_not=None)
    if config.prune:
        pruned = pruning(Store(config.store, manifest), config.source, outline, account, too_many=too_many)
    rejected = [] if too_many else account.dropped
    dropped = [*map(sample_digest, rejected), *pruned.digests]
    write_or_explain(config.store / "rejects.jsonl", rejects_as_lines(account))
    write_or_explain(config.store / WITHOUT_CAPTION, without_caption_as_lines(outline.without_caption, account))
    try:
        published = publish(config.store, manifest, sealed, dropped, config.caption_rules.recorded(manifest.rules))
    except OSError as error:
        raise StoreError(
            f"{config.store} cannot be written: {error.strerror}; what was packed is kept, rerun the command"
        ) from error
    gone = not_in_source(Store(config.store, published), outline)
    kept_beyond_limit = len(account.dropped) - len(rejected)
    change = config.caption_rules.difference(manifest.rules)
    stages = {stage: round(seconds, 3) for stage, seconds in account.stage_seconds.items()}
    return PackResult(
        found=outline.num_items,
        packed=account.packed,
        latents_kept=account.latents_kept,
        recaptioned=change and f"{change[0]} = {change[1]!s:.200}, now {change[2]!s:.200}",
        captions_as_before=len(gone) + len(account.kept) + kept_beyond_limit if change else 0,
        unchanged=account.unchanged,
        rejected=len(account.rejects),
        without_caption=account.without_caption,
        captions_from=outline.captions_from,
        notes=outline.notes,
        enlarged=account.enlarged,
        crop_loss=crop_losses_as_json(account.crop_losses),
        captions_truncated=account.captions_truncated,
        captions_beyond=account.captions_beyond,
        captions_without_image=outline.orphans,
        passed_over=outline.passed_over,
        rejected_by_reason=by_reason(account),
        not_in_source=len(gone),
        not_in_source_ids=gone.ids(NAMED),
        pruned=len(pruned.digests),
        pruned_ids=pruned.ids,
        not_pruned=pruned.why_not,
        dropped=len(rejected),
        dropped_ids=rejected[:NAMED],
        kept_unreadable=len(account.kept),
        kept_unreadable_ids=account.kept[:NAMED],
        kept_beyond_limit=kept_beyond_limit,
        too_many_rejects=too_many,
        text_error=joined_error(published),
        payload_bytes=published.payload_bytes,
        disk_bytes=disk_bytes(config.store),
        generation=published.generation,
        seconds=round(time.monotonic() - started, 3),
        stage_seconds=stages,
        slowest_stage=slowest_of(stages, on_shared_cores=chosen_device(config.device, 0).type == "cpu"),
    )
