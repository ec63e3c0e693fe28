"""`ingest pack` from end to end: agree on the source, pack each rank's slice, publish, summarise."""

from __future__ import annotations

import secrets
import time
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bucketline.command_line import counted
from bucketline.errors import StoreError
from bucketline.files.atomic_write import write_or_explain
from bucketline.files.disk_space import refuse_too_little_disk
from bucketline.files.paths import refuse_overlap
from bucketline.files.regular_file import read_regular
from bucketline.ingest.config import framing_of
from bucketline.ingest.encoders.text_columns import Padding
from bucketline.ingest.images.crop import DEFAULT_MAX_CROP, stored_max_crop
from bucketline.ingest.images.crop_loss import crop_losses_as_json
from bucketline.ingest.images.model_sizes import model_grid
from bucketline.ingest.listing_diff import NAMED, drops, not_in_source, unknown
from bucketline.ingest.other_options import refuse_other_options
from bucketline.ingest.parallel.item_parts import ItemParts, Outline, take_apart
from bucketline.ingest.parallel.ranks import PackRanks
from bucketline.ingest.parallel.shares import Share
from bucketline.ingest.parallel.signals import ECHO_S, Interrupts, Stopped, exit_code_of
from bucketline.ingest.pipeline.device import share_of_cores
from bucketline.ingest.pipeline.lazy_encoders import EncoderFacts, LazyEncoders, facts_of
from bucketline.ingest.pipeline.packed_index import StoredIds
from bucketline.ingest.pipeline.slice_packer import SlicePacker
from bucketline.ingest.pipeline.stage_timer import StageTimer, slowest_of
from bucketline.ingest.progress import packing_progress
from bucketline.ingest.sources.captions.caption_rules import recorded_in
from bucketline.ingest.sources.open_source import open_source
from bucketline.ingest.sources.source import caption_rest
from bucketline.ingest.sources.source_json import source_as_json, source_from_json
from bucketline.ingest.summary import (
    LONG_CAPTIONS,
    WITHOUT_CAPTION,
    RunSummary,
    by_reason,
    check_identity,
    joined,
    long_captions_as_lines,
    rejects_as_lines,
    without_caption_as_lines,
)
from bucketline.store import Store
from bucketline.store.commands.progress import bar_of_bytes
from bucketline.store.format.columns import CLASS_LABELS
from bucketline.store.format.hashing import sample_digest
from bucketline.store.format.manifest import Manifest  # noqa: TC001 - decoded by its annotation
from bucketline.store.format.manifest_entries import text_entry
from bucketline.store.format.safetensors_header import DTYPES
from bucketline.store.read.info import disk_bytes, joined_error
from bucketline.store.read.lost_files import files_of, refuse_lost_shards
from bucketline.store.shard.reader import as_keys
from bucketline.store.write.newest import newest_manifest
from bucketline.store.write.publish import Contents, publish
from bucketline.store.write.store_writer import writing
from bucketline.typed_json import decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from bucketline.ingest.config import PackConfig
    from bucketline.ingest.images.bucket_grid import Grid
    from bucketline.ingest.sources.source import Source
    from bucketline.store.format.quantised_text import TextError
    from bucketline.store.sync.working import WorkingStore
    from bucketline.typed_json import Json

TOKENS_PER_CHARACTER = 0.3  # of a caption, to estimate whether the store will fit on the disk
_MAX_LISTED_BYTES = 1 << 30  # of `long_captions.jsonl`
DISK_FACTOR = 1.1  # page rounding, sample records, sidecars
SHARDS_ON_DISK = 4  # of a process that sends them: one that is written, one twice while it is sealed, one that is sent


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recalled:
    """The message from rank 0 to the other ranks about what the store tells of the encoders."""

    is_known: bool  # they need not be loaded before there is something to encode
    on_shared_cores: bool  # if known: they ran on the CPU


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
    captions_cut: dict[str, int]  # by encoder: captions of packed images that it did not see to their end
    captions_cut_ids: list[str]  # at most ten
    captions_beyond: list[str]  # ids of samples with more captions than --max-captions
    captions_without_image: list[str]
    passed_over: list[str]  # images that are skipped on purpose, each with the reason
    rejected_by_reason: dict[str, int]
    not_in_source: int  # samples of the store whose images are no longer in the source; they are kept
    not_in_source_ids: list[str]  # at most ten
    pruned: int  # samples dropped because their images are no longer in the source
    pruned_ids: list[str]  # at most ten
    not_pruned: str | None  # why --prune kept some or all of what is no longer in the source
    not_pruned_beyond_limit: int  # samples that --prune kept because they are more than --max-prune
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
    encoders: LazyEncoders | None = None  # of the first source, and of the others
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
    working = working_store(config)
    with ExitStack() as held:
        source, outline, own = _agree_on_source(config, ranks, working, held)
        encoders = session.encoders = session.encoders or LazyEncoders(config, session.local_rank)
        recalled = ranks.from_first(lambda: _recall(config, encoders), encode, lambda value: decode(_Recalled, value))
        if not recalled.is_known:
            encoders.loaded()
        start = ranks.from_first(
            lambda: _Start(manifest=_prepare(config, session, recalled, outline[0], held, working), token=secrets.token_hex(4)),
            encode,
            lambda value: decode(_Start, value),
        )
        manifest = start.manifest
        run = f"g{manifest.generation + 1:06d}-{start.token}-r{ranks.rank:04d}"  # a name never used before
        sender = None if working is None else working.sender(manifest, run, is_first=ranks.is_first)
        on_shared_cores = recalled.on_shared_cores if recalled.is_known else encoders.on_shared_cores
        packer = SlicePacker(
            source=source,
            store=_opened(config, manifest, working),
            share=Share(rank=ranks.rank, world_size=ranks.world_size),
            config=config,
            grid=model_grid(config.grid, encoders.model, facts_of(manifest).downscale),
            encoders=lambda: encoders.loaded_for(config.store, manifest),
            stages=StageTimer(on_shared_cores=on_shared_cores),
            decode_threads=config.decode_threads or share_of_cores(session.local_world_size),
            shard_prefix=run,
            sender=sender,
        )
        try:
            with session.interrupts.between_images(ranks.check) as check, sender or nullcontext():
                with packing_progress(len(own), ranks, packer.stages) as on_image:
                    packer.run(own, on_image, check)
                if sender is not None:
                    with bar_of_bytes("send", sender.bytes_left) if ranks.is_first else _nothing_shown() as on_bytes:
                        sender.finish(check, on_bytes)
            report = _Report(account=packer.account, sealed=packer.sealed)
            reports = ranks.gather(report, encode, lambda value: decode(_Report, value), is_last=is_last)
            if reports is None:
                return None
            account = joined(report.account for report in reports)
            check_identity(outline[0].num_items, account)
            encoders.record(config.store, manifest)
            sealed = [name for own in reports for name in own.sealed]
            return _finish(config, manifest, outline[0], account, sealed, started, working, on_shared_cores=on_shared_cores)
        except KeyboardInterrupt as stop:
            raise Stopped(exit_code_of(stop), session.num_packed + packer.account.packed) from stop
        finally:
            session.num_packed += packer.account.packed


@contextmanager
def _nothing_shown() -> Iterator[Callable[[int], None]]:
    yield lambda _: None


def working_store(config: PackConfig) -> WorkingStore | None:
    """Return the folder that stands for a store in object storage; None for a store on a disk."""
    if isinstance(config.place, Path):
        return None
    from bucketline.store.sync.working import WorkingStore

    return WorkingStore(config.objects(config.place), config.store)


def _opened(config: PackConfig, manifest: Manifest, working: WorkingStore | None) -> Store:
    return Store(config.store, manifest) if working is None else working.open(manifest)


def _agree_on_source(
    config: PackConfig, ranks: PackRanks, working: WorkingStore | None, held: ExitStack
) -> tuple[Source, list[Outline], ItemParts]:
    """List the source on rank 0; return it, the outline of all items (on rank 0 only), and this rank's items."""

    def opened() -> Source:
        if working is not None:
            held.enter_context(working.held())
        return opened_source(config)

    source = ranks.from_first(opened, source_as_json, source_from_json)
    outline: list[Outline] = []

    def dealt() -> list[list[bytes]]:
        listing = source.listing()
        caption_rest(listing, config.default_caption)
        whole, items = take_apart(config.caption_rules.applied(listing), ranks.world_size)
        outline.append(whole)
        return [own.parts for own in items]

    return source, outline, ItemParts(ranks.deal(dealt))


def opened_source(config: PackConfig) -> Source:
    """Open the source, check that it does not overlap with the store, and check the store's shards. Rank 0 only."""
    source = open_source(config.source, config)
    for path in source.local_paths:
        refuse_overlap(path, config.store)
    if (manifest := newest_manifest(config.store)) is not None:
        refuse_lost_shards(config.store, manifest)  # with only an index, everything would look unchanged
    return source


def _recall(config: PackConfig, encoders: LazyEncoders) -> _Recalled:
    """Return whether the store records the model as it is now. Rank 0 only."""
    found = encoders.recall(config.store, newest_manifest(config.store))
    return _Recalled(is_known=found is not None, on_shared_cores=bool(found))


def _prepare(
    config: PackConfig,
    session: PackSession,
    recalled: _Recalled,
    outline: Outline,
    held: ExitStack,
    working: WorkingStore | None,
) -> Manifest:
    """Open or create the store, adopt the shards of an interrupted run, and check the free disk space. Rank 0 only.

    The store's manifest keeps its caption rules until the rows of other rules are published, in the same generation.
    """
    encoders = session.encoders
    assert encoders is not None
    existing = newest_manifest(config.store)
    facts = facts_of(existing) if recalled.is_known and existing is not None else encoders.facts()
    if facts.columns.tokens[0].name == CLASS_LABELS:
        from bucketline.ingest.encoders.families.class_labels import refuse_text_dtype

        config.caption_rules.refuse_for_classes(encoders.model.name)
        refuse_text_dtype(encoders.model, config.text_dtype)
    grid = model_grid(config.grid, encoders.model, facts.downscale)
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
    most_bytes = None if working is None else session.ranks.world_size * SHARDS_ON_DISK * (config.shard_size_mib << 20)
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


def _write_long_captions(store: Store, sealed: list[str], account: RunSummary) -> None:
    """Write `long_captions.jsonl`; the lines of samples that this run did not pack stay."""
    path = store.path / LONG_CAPTIONS
    try:
        listed = read_regular(path, _MAX_LISTED_BYTES)
    except OSError:
        listed = b""

    def is_replaced(sample_ids: list[str]) -> list[bool]:
        if not sample_ids:
            return []
        names, ids = [shard.name for shard in store.manifest.shards], StoredIds(store)
        at = ids.positions(as_keys([sample_digest(sample_id) for sample_id in sample_ids]))
        shards = ids.shards_of(np.maximum(at, 0)) if len(ids) else at
        return [bool(place < 0) or names[shard] in sealed for place, shard in zip(at.tolist(), shards.tolist(), strict=True)]

    write_or_explain(path, long_captions_as_lines(listed, is_replaced, account))


def _finish(
    config: PackConfig,
    manifest: Manifest,
    outline: Outline,
    account: RunSummary,
    sealed: list[str],
    started: float,
    working: WorkingStore | None,
    *,
    on_shared_cores: bool,
) -> PackResult:
    """Write the rejects and publish the new generation. Rank 0 only, under the store's lock."""
    dropping = drops(config, _opened(config, manifest, working), outline, account)
    rejected, pruned = dropping.rejected, dropping.pruned
    dropped = [*map(sample_digest, rejected), *pruned.digests]
    write_or_explain(config.store / "rejects.jsonl", rejects_as_lines(account))
    write_or_explain(config.store / WITHOUT_CAPTION, without_caption_as_lines(outline.without_caption, account))
    try:
        published = publish(config.store, manifest, sealed, dropped, config.caption_rules.recorded(manifest.rules))
    except OSError as error:
        raise StoreError(
            f"{config.store} cannot be written: {error.strerror}; what was packed is kept, rerun the command"
        ) from error
    store = _opened(config, published, working)
    _write_long_captions(store, sealed, account)
    gone = not_in_source(store, outline)
    gone_ids = gone.ids(NAMED)  # before what was packed leaves this machine
    used_bytes = disk_bytes(config.store)
    if working is not None:
        published = working.commit(published)
        used_bytes = sum(file.num_bytes for entry in published.shards for _, file in files_of(config.store, entry))
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
        captions_cut=account.num_cut,
        captions_cut_ids=list(dict.fromkeys(caption.id for caption in account.long_captions))[:NAMED],
        captions_beyond=account.captions_beyond,
        captions_without_image=outline.orphans,
        passed_over=outline.passed_over,
        rejected_by_reason=by_reason(account),
        not_in_source=len(gone),
        not_in_source_ids=gone_ids,
        pruned=len(pruned.digests),
        pruned_ids=pruned.ids,
        not_pruned=pruned.why_not,
        not_pruned_beyond_limit=pruned.num_refused,
        dropped=len(rejected),
        dropped_ids=rejected[:NAMED],
        kept_unreadable=len(account.kept),
        kept_unreadable_ids=account.kept[:NAMED],
        kept_beyond_limit=kept_beyond_limit,
        too_many_rejects=dropping.too_many_rejects,
        text_error=joined_error(published),
        payload_bytes=published.payload_bytes,
        disk_bytes=used_bytes,
        generation=published.generation,
        seconds=round(time.monotonic() - started, 3),
        stage_seconds=stages,
        slowest_stage=slowest_of(stages, on_shared_cores=on_shared_cores),
    )
