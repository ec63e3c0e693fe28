"""`ingest pack` from end to end: agree on the source, pack each rank's slice, publish, summarise."""

from __future__ import annotations

import secrets
import sys
import time
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from bucketline.errors import UsageError
from bucketline.ingest.packing.finish import Packed, PackResult, finish
from bucketline.ingest.packing.meanwhile import Meanwhile
from bucketline.ingest.packing.prepare import opened_source, prepare
from bucketline.ingest.packing.target import PackTarget
from bucketline.ingest.parallel.item_parts import ItemParts, Outline, take_apart
from bucketline.ingest.parallel.ranks import PackRanks
from bucketline.ingest.parallel.shares import Share
from bucketline.ingest.parallel.signals import ECHO_S, Interrupts, Stopped, exit_code_of
from bucketline.ingest.pipeline.model.encoder_facts import facts_without_weights
from bucketline.ingest.pipeline.model.encoders import Encoders
from bucketline.ingest.pipeline.slice_worker import SliceWorker, run_name
from bucketline.ingest.progress import caption_progress, packing_progress
from bucketline.ingest.sources.source import caption_rest
from bucketline.ingest.sources.source_json import source_as_json, source_from_json
from bucketline.ingest.summary import RunSummary, check_identity, joined_summaries
from bucketline.store.commands.progress import bar_of_bytes
from bucketline.store.folder import LocalFolder
from bucketline.store.format.manifest import Manifest  # noqa: TC001 - decoded by its annotation
from bucketline.store.write.newest import newest_manifest
from bucketline.typed_json import decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from bucketline.ingest.config import PackConfig
    from bucketline.ingest.on_ray.cluster import Workers
    from bucketline.ingest.packing.target import Placed
    from bucketline.ingest.parallel.exchange import Exchange
    from bucketline.ingest.pipeline.model.encoder_facts import EncoderFacts
    from bucketline.ingest.sources.source import Source
    from bucketline.store.transfer.sender import ShardSender


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


def pack_images(
    config: PackConfig, *, rank: int, world_size: int, local_rank: int, local_world_size: int = 1
) -> PackResult | None:
    """Pack a source into a store; return the result on rank 0, None on the others.

    Raises:
        UsageError: if source and store overlap, or the options contradict each other.
        SourceError, ModelError, StoreError, FingerprintError, LockedError: naming the item, before anything is written.
        AccountError: if an image was lost or counted twice; nothing is published then.
        RankError: on rank 0 if another rank failed or is gone; on the others if rank 0 is gone.
        KeyboardInterrupt: after Ctrl-C or SIGTERM; as Stopped once packing has begun.
        SystemExit: on the others, if rank 0 reports the error.
    """
    workers = ray_workers(config, world_size)
    with pack_session(config, rank, world_size, local_rank, local_world_size, workers) as session:
        return pack_source(config, session)


@dataclass(slots=True, kw_only=True)
class PackSession:
    """The processes of a run, and what the sources that they pack in turn share."""

    interrupts: Interrupts
    ranks: PackRanks
    local_rank: int
    local_world_size: int
    encoders: Encoders | None = None  # of the first source, and of the others
    num_packed: int = 0  # by this rank, of sources that are finished
    workers: Workers | None = None  # of a Ray cluster, which pack instead of this process
    stdout: TextIO | None = None  # where results belong


def ray_workers(config: PackConfig, world_size: int) -> AbstractContextManager[Workers] | None:
    """Return the workers of `--engine ray`; None if ranks pack."""
    if config.engine is None:
        return None
    from bucketline.ingest.on_ray.cluster import cluster

    if world_size > 1:
        raise UsageError("--engine ray starts its own workers; run it without torchrun")
    return cluster(config)


@contextmanager
def pack_session(
    config: Placed,
    rank: int,
    world_size: int,
    local_rank: int,
    local_world_size: int,
    workers: AbstractContextManager[Workers] | None = None,
) -> Iterator[PackSession]:
    """Handle signals and connect the processes in this block; raises what `pack_images` does."""
    stdout = sys.stdout
    with (
        redirect_stdout(sys.stderr if workers else stdout),  # Ray prints what workers print, and which it has lost
        workers or nullcontext() as found,  # before the signals' handlers, since Ray sets its own
        Interrupts(echo_s=ECHO_S if world_size > 1 else 0.0) as interrupts,
        PackRanks(
            rank=rank,
            world_size=world_size,
            interrupts=interrupts,
            exchange=_exchange(config, rank, world_size, local_world_size),
        ) as ranks,
    ):
        yield PackSession(
            interrupts=interrupts,
            ranks=ranks,
            local_rank=local_rank,
            local_world_size=local_world_size,
            workers=found,
            stdout=stdout,
        )


def _exchange(config: Placed, rank: int, world_size: int, local_world_size: int) -> Exchange | None:
    """Return what carries messages between several ranks: at the store's URL if they are on several machines."""
    if world_size == 1:
        return None
    from bucketline.ingest.parallel.exchange import Exchange

    is_here = isinstance(config.place, Path) or local_world_size == world_size
    folder = LocalFolder(config.store) if is_here else config.objects(config.place)
    return Exchange(folder, config.store, rank, world_size)


def pack_source(config: PackConfig, session: PackSession, *, is_last: bool = True) -> PackResult | None:
    """Pack one source; `is_last` tells the other ranks that they may end. Otherwise as `pack_images`."""
    if session.workers is not None:
        return _pack_on_ray(config, session, session.workers)
    started = time.monotonic()
    ranks = session.ranks
    target = PackTarget(config)
    with ExitStack() as held:
        source, outline, own = _agree_on_source(config, ranks, target, held)
        encoders = session.encoders = session.encoders or Encoders(config, session.local_rank, session.local_world_size)
        if ranks.from_first(lambda: newest_manifest(config.store) is None, encode, bool):
            encoders.facts()  # on all ranks at once; those of a store that exists are loaded when there is something to encode
        start = ranks.from_first(
            lambda: _Start(
                manifest=prepare(
                    config,
                    encoders.model,
                    _facts(config, encoders),
                    outline[0],
                    held,
                    target,
                    num_making=ranks.world_size,
                ),
                token=secrets.token_hex(4),
            ),
            encode,
            lambda value: decode(_Start, value),
        )
        manifest = start.manifest
        worker = SliceWorker(
            config=config,
            source=source,
            store=target.open(manifest),
            encoders=encoders,
            workers_on_machine=session.local_world_size,
        )
        run = run_name(manifest, start.token, f"r{ranks.rank:04d}")
        sender = target.sender(manifest, run, is_first=ranks.is_first)
        meanwhile = Meanwhile(config.publish_every_s, ranks, target, manifest)
        packer = worker.packer(Share(rank=ranks.rank, world_size=ranks.world_size), run, sender=sender)
        try:
            meanwhile.begin(packer, packer.sealed if sender is None else sender.sent)
            with session.interrupts.between_images(ranks.check, meanwhile.check) as check, sender or nullcontext():
                if encoders.may_be_two_phases:
                    with caption_progress(len(own), ranks, lambda: encoders.phases) as (on_item, is_due):
                        packer.encode_captions(own, on_item, check, is_due)
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
            account = joined_summaries(report.account for report in reports)
            check_identity(outline[0].num_items, account)
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


def _pack_on_ray(config: PackConfig, session: PackSession, workers: Workers) -> PackResult:
    from bucketline.ingest.on_ray.pack import RayRun

    run = RayRun(config, workers, session.interrupts)
    try:
        with ExitStack() as held:
            return run.pack(held)
    except KeyboardInterrupt as stop:
        raise Stopped(exit_code_of(stop), session.num_packed + run.num_packed) from stop
    finally:
        session.num_packed += run.num_packed


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


def _facts(config: PackConfig, encoders: Encoders) -> EncoderFacts:
    existing = newest_manifest(config.store)
    return encoders.facts() if existing is None else facts_without_weights(config, encoders.model, existing)
