"""`ingest pack` from end to end: agree on the source, pack and commit each rank's slice, drop, summarise."""

from __future__ import annotations

import sys
from contextlib import ExitStack, closing, contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from bucketline.errors import BucketlineError, UsageError
from bucketline.ingest.packing.finish import Meanwhile, PackResult, finish
from bucketline.ingest.packing.run import PackRun, target_of
from bucketline.ingest.parallel.exchange import ItemParts
from bucketline.ingest.parallel.ranks import PackRanks
from bucketline.ingest.parallel.signals import ECHO_S, Interrupts, Stopped, exit_code_of
from bucketline.ingest.pipeline.model import Encoders, facts_without_weights
from bucketline.ingest.pipeline.slice_worker import PackedSlice, PackPlan, slice_packer
from bucketline.ingest.progress import caption_progress, packing_progress
from bucketline.store.commands.look import bar_of_bytes
from bucketline.store.folder import LocalFolder
from bucketline.store.sync.working import WorkingStore, sender_to

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from bucketline.ingest.config import PackConfig
    from bucketline.ingest.on_ray import Workers
    from bucketline.ingest.packing.run import Placed
    from bucketline.ingest.parallel.exchange import Exchange
    from bucketline.ingest.pipeline.model import EncoderFacts
    from bucketline.ingest.pipeline.slice_packer import SlicePacker
    from bucketline.store.transfer import ShardSender
    from bucketline.store.write.publish import StoreTarget


def pack_images(
    config: PackConfig, *, rank: int, world_size: int, local_rank: int, local_world_size: int = 1
) -> PackResult | None:
    """Pack a source into a store; return the result on rank 0, None on the others."""
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
    from bucketline.ingest.on_ray import cluster

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
    ranks, target, runs = session.ranks, target_of(config), list[PackRun]()
    with ExitStack() as held:

        def listed() -> list[list[bytes]]:
            runs.append(PackRun.listed(config, target, held, lambda _: ranks.world_size))
            return [own.parts for own in runs[0].slices]

        own = ItemParts(ranks.deal(listed))
        encoders = session.encoders = session.encoders or Encoders(config, session.local_rank, session.local_world_size)
        if ranks.from_first(lambda: target.newest() is None, bool):
            encoders.facts()  # on all ranks at once; those of a store that exists are loaded when there is something to encode

        def planned() -> PackPlan:
            num_making = ranks.world_size if ranks.shares_disk else session.local_world_size
            with ExitStack() as locked:  # for a moment: from then on each rank locks the store for its commits
                return runs[0].begin(encoders.model, _facts(config, target, encoders), locked, num_making=num_making)

        plan = ranks.from_first(planned, PackPlan)
        run, name = next(iter(runs), None), plan.name_of(f"r{ranks.rank:04d}")
        own_disk = None  # of a rank on another machine
        if ranks.is_first or ranks.shares_disk:
            store = target.open(plan.manifest)
            place = target.path, sender_to(target, plan.manifest, name, is_first=ranks.is_first)
        else:
            own_disk = held.enter_context(closing(plan.parts(config)))
            store, place = own_disk.open(), own_disk.begin(name)
        packer = slice_packer(
            config,
            plan,
            ranks.rank,
            name,
            store=store,
            place=place,
            encoders=encoders,
            workers_on_machine=session.local_world_size,
        )
        own_target = target if own_disk is None else WorkingStore(own_disk.objects, packer.folder, own_disk.path / "cache")
        rules = {**plan.manifest.rules, **config.caption_rules.as_json()}

        def publish(names: list[str]) -> None:
            if run is not None:
                run.publish(names)
            else:
                own_target.publish(plan.manifest, names, rules=rules)

        meanwhile = Meanwhile(config.publish_every and config.publish_every.seconds, packer, publish)
        try:
            found = _pack_slice(session, packer, own, meanwhile, encoders, is_last=is_last)
            if run is None or found is None:
                return None
            for number, one in enumerate(found):
                run.take(number, one)
            run.sealed = meanwhile.ready()  # the other ranks' are committed
            return finish(run)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise Stopped(exit_code_of(error), session.num_packed + packer.account.packed) from error
            raise
        finally:
            session.num_packed += packer.account.packed


def _pack_slice(
    session: PackSession, packer: SlicePacker, items: ItemParts, meanwhile: Meanwhile, encoders: Encoders, *, is_last: bool
) -> list[PackedSlice] | None:
    """Pack the slice of this rank; return those of all ranks on rank 0."""
    ranks = session.ranks
    with (
        session.interrupts.between_images(ranks.check, meanwhile.check) as check,
        packer.sender or nullcontext(),
    ):
        try:
            if encoders.may_be_two_phases:
                with caption_progress(len(items), ranks, lambda: encoders.phases) as (on_item, is_due):
                    packer.encode_captions(items, on_item, check, is_due)
            with packing_progress(len(items), ranks, "pack", lambda: f"bottleneck: {packer.stages.slowest}") as on_image:
                packer.run(items, on_image, check)
            _send_rest(packer.sender, check, is_shown=ranks.is_first)
        except BaseException:
            if not (ranks.is_first or ranks.shares_disk):  # the next run does not see this disk
                with suppress(BucketlineError):
                    packer.seal_rest()
                    if packer.sender is not None:
                        packer.sender.finish(lambda: None)
                    meanwhile.commit()
            raise
        if not ranks.is_first:  # whose shards come with what is to be dropped, once all ranks are known to have committed
            meanwhile.commit()
    packed = PackedSlice(account=packer.account, sealed=packer.sealed, sent=[])
    return ranks.gather(packed, is_last=is_last, meanwhile=meanwhile.publish_due)


def _send_rest(sender: ShardSender | None, check: Callable[[], None], *, is_shown: bool) -> None:
    """Wait until all shards are sent, if there is a sender, and show the bytes that are left; raises what `finish` does."""
    if sender is not None:
        shown = bar_of_bytes("send", sender.bytes_left) if is_shown and sender.bytes_left else nullcontext(lambda _: None)
        with shown as on_bytes:
            sender.finish(check, on_bytes)


def _pack_on_ray(config: PackConfig, session: PackSession, workers: Workers) -> PackResult:
    from bucketline.ingest.on_ray import RayRun

    run = RayRun(config, workers, session.interrupts)
    try:
        with ExitStack() as held:
            return run.pack(held)
    except KeyboardInterrupt as stop:
        raise Stopped(exit_code_of(stop), session.num_packed + run.num_packed) from stop
    finally:
        session.num_packed += run.num_packed


def _facts(config: PackConfig, target: StoreTarget, encoders: Encoders) -> EncoderFacts:
    existing = target.newest()
    return encoders.facts() if existing is None else facts_without_weights(config, encoders.model, existing)
