"""`ingest pack` from end to end: agree on the source, pack each rank's slice, publish, summarise."""

from __future__ import annotations

import secrets
import time
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.files.paths import refuse_overlap
from bucketline.ingest.config import framing_of
from bucketline.ingest.images.crop import DEFAULT_MAX_CROP, stored_max_crop
from bucketline.ingest.images.model_sizes import model_grid
from bucketline.ingest.other_options import refuse_other_options
from bucketline.ingest.packing.disk_estimate import SHARDS_ON_DISK, refuse_too_large
from bucketline.ingest.packing.finish import Packed, PackResult, finish
from bucketline.ingest.packing.meanwhile import Meanwhile
from bucketline.ingest.packing.target import PackTarget
from bucketline.ingest.parallel.item_parts import ItemParts, Outline, take_apart
from bucketline.ingest.parallel.ranks import PackRanks
from bucketline.ingest.parallel.shares import Share
from bucketline.ingest.parallel.signals import ECHO_S, Interrupts, Stopped, exit_code_of
from bucketline.ingest.pipeline.device import share_of_cores
from bucketline.ingest.pipeline.lazy_encoders import LazyEncoders, facts_of
from bucketline.ingest.pipeline.slice_packer import SlicePacker
from bucketline.ingest.pipeline.stage_timer import StageTimer
from bucketline.ingest.progress import packing_progress
from bucketline.ingest.sources.captions.caption_rules import recorded_in
from bucketline.ingest.sources.objects.place import refuse_overlapping_urls
from bucketline.ingest.sources.objects.source import ObjectSource
from bucketline.ingest.sources.open_source import open_source
from bucketline.ingest.sources.source import caption_rest
from bucketline.ingest.sources.source_json import source_as_json, source_from_json
from bucketline.ingest.summary import (
    RunSummary,
    check_identity,
    joined,
)
from bucketline.store.commands.progress import bar_of_bytes
from bucketline.store.format.columns import CLASS_LABELS
from bucketline.store.format.manifest import Manifest  # noqa: TC001 - decoded by its annotation
from bucketline.store.format.manifest_entries import text_entry
from bucketline.store.read.lost_files import refuse_lost_shards
from bucketline.store.write.newest import newest_manifest
from bucketline.store.write.publish import Contents
from bucketline.store.write.store_writer import writing
from bucketline.typed_json import decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bucketline.ingest.config import PackConfig
    from bucketline.ingest.images.bucket_grid import Grid
    from bucketline.ingest.sources.source import Source
    from bucketline.store.sync.sender import ShardSender
    from bucketline.typed_json import Json


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
    target = PackTarget(config)
    with ExitStack() as held:
        source, outline, own = _agree_on_source(config, ranks, target, held)
        encoders = session.encoders = session.encoders or LazyEncoders(config, session.local_rank)
        recalled = ranks.from_first(lambda: _recall(config, encoders), encode, lambda value: decode(_Recalled, value))
        if not recalled.is_known:
            encoders.loaded()
        start = ranks.from_first(
            lambda: _Start(manifest=_prepare(config, session, recalled, outline[0], held, target), token=secrets.token_hex(4)),
            encode,
            lambda value: decode(_Start, value),
        )
        manifest = start.manifest
        run = f"g{manifest.generation + 1:06d}-{start.token}-r{ranks.rank:04d}"  # a name never used before
        sender = target.sender(manifest, run, is_first=ranks.is_first)
        meanwhile = Meanwhile(config.publish_every_s, ranks, target, manifest)
        on_shared_cores = recalled.on_shared_cores if recalled.is_known else encoders.on_shared_cores
        packer = SlicePacker(
            source=source,
            store=target.open(manifest),
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
            meanwhile.begin(packer, packer.sealed if sender is None else sender.sent)
            with session.interrupts.between_images(ranks.check, meanwhile.check) as check, sender or nullcontext():
                with packing_progress(len(own), ranks, packer.stages) as on_image:
                    packer.run(own, on_image, check)
                if sender is not None:
                    with _sending(sender, is_shown=ranks.is_first) as on_bytes:
                        sender.finish(check, on_bytes)
                meanwhile.finish()
            report = _Report(account=packer.account, sealed=packer.sealed)
            reports = ranks.gather(
                report, encode, lambda value: decode(_Report, value), is_last=is_last, meanwhile=meanwhile.publish_due
            )
            if reports is None:
                return None
            account = joined(report.account for report in reports)
            check_identity(outline[0].num_items, account)
            encoders.record(config.store, manifest)
            return finish(
                Packed(
                    config=config,
                    target=target,
                    manifest=manifest,
                    newest=meanwhile.manifest,
                    num_meanwhile=meanwhile.num_published,
                    outline=outline[0],
                    account=account,
                    sealed=[name for own in reports for name in own.sealed],
                    seconds=time.monotonic() - started,
                    on_shared_cores=on_shared_cores,
                )
            )
        except KeyboardInterrupt as stop:
            raise Stopped(exit_code_of(stop), session.num_packed + packer.account.packed) from stop
        finally:
            session.num_packed += packer.account.packed


@contextmanager
def _sending(sender: ShardSender, *, is_shown: bool) -> Iterator[Callable[[int], None]]:
    """Show the bytes that are still to be sent, and yield what takes those that are."""
    if is_shown and sender.bytes_left:
        with bar_of_bytes("send", sender.bytes_left) as on_bytes:
            yield on_bytes
    else:
        yield lambda _: None


def _agree_on_source(
    config: PackConfig, ranks: PackRanks, target: PackTarget, held: ExitStack
) -> tuple[Source, list[Outline], ItemParts]:
    """List the source on rank 0; return it, the outline of all items (on rank 0 only), and this rank's items."""

    def opened() -> Source:
        held.enter_context(target.held())
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
    if isinstance(source, ObjectSource) and isinstance(config.place, str):
        refuse_overlapping_urls(source.folder_url, config.place)
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
    target: PackTarget,
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
    most_bytes = session.ranks.world_size * SHARDS_ON_DISK * (config.shard_size_mib << 20) if target.is_remote else None
    refuse_too_large(config, facts, grid, outline, existing, most_bytes, is_recaptioned=is_recaptioned)
    manifest = held.enter_context(writing(config.store, contents))
    target.send_left(manifest)
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
