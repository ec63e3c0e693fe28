"""`ingest pack` from end to end: list the source, share it out, read, encode, write and commit each rank's share, sum up."""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from bucketline.errors import UsageError
from bucketline.ingest.packing.finish import PackResult, finish
from bucketline.ingest.packing.run import PackPlan, list_source, make_plan, target_of
from bucketline.ingest.packing.share import SharePacker, own_folder
from bucketline.ingest.parallel.items import ItemParts
from bucketline.ingest.parallel.ranks import PackRanks, RunFiles
from bucketline.ingest.parallel.signals import ECHO_S, Interrupts, Stopped, exit_code_of
from bucketline.ingest.partners.partner import planned_form
from bucketline.ingest.pipeline.model import Encoders, facts_without_weights
from bucketline.ingest.sources.dataset_file import source_from_json
from bucketline.store.folder import LocalFolder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from bucketline.ingest.config import PackConfig
    from bucketline.ingest.on_ray import Workers
    from bucketline.ingest.packing.run import ListedSource, Placed
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
            files=_files_of(config, rank, world_size, local_world_size),
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


def _files_of(config: Placed, rank: int, world_size: int, local_world_size: int) -> RunFiles | None:
    """Return the files of several ranks: at the store's URL if they are on several machines."""
    if world_size == 1:
        return None
    is_here = isinstance(config.place, Path) or local_world_size == world_size
    folder = LocalFolder(config.store) if is_here else config.objects(config.place)
    return RunFiles(folder, config.store, rank, world_size)


def pack_source(config: PackConfig, session: PackSession) -> PackResult | None:
    """Pack one source; return the result on rank 0, None on the others."""
    if session.workers is not None:
        from bucketline.ingest.on_ray import pack_on_ray

        result = pack_on_ray(config, session.workers, session.interrupts, session.num_packed)
        session.num_packed += result.packed
        return result
    ranks, target = session.ranks, target_of(config)
    with ExitStack() as held:
        if ranks.is_first:
            held.enter_context(target.held())
        listed = list_source(config, target, ranks.world_size) if ranks.is_first else None
        items = ItemParts(ranks.deal(None if listed is None else listed.parts))
        encoders = session.encoders = session.encoders or Encoders(config, session.local_rank, session.local_world_size)
        plan = ranks.tell("plan", _plan(config, session, target, listed, encoders), PackPlan)
        is_kept = ranks.is_first or ranks.shares_disk
        own = SharePacker(
            config,
            plan,
            source_from_json(plan.source) if listed is None else listed.source,
            ranks.rank,
            target if is_kept else held.enter_context(own_folder(config)),
            encoders,
            name=plan.name_of(f"r{ranks.rank:04d}"),
            ranks_on_machine=session.local_world_size,
            is_first=ranks.is_first,
        )
        try:
            own.pack(items, session.interrupts, ranks.check, ranks.title, is_kept=is_kept)
            if listed is None:
                own.commit()
            summaries = ranks.done(own.packer.account, own.publish_due)
            return None if listed is None else finish(config, target, listed, plan, own.newest, own.ready(), summaries)
        except KeyboardInterrupt as error:
            raise Stopped(exit_code_of(error), session.num_packed + own.packer.account.packed) from error
        finally:
            session.num_packed += own.packer.account.packed


def _plan(
    config: PackConfig, session: PackSession, target: StoreTarget, listed: ListedSource | None, encoders: Encoders
) -> PackPlan | None:
    """Make the plan on rank 0. Of a new store, all ranks load the encoders, at once; of others, if there is something to do."""
    existing, ranks = target.newest(), session.ranks
    if listed is None:
        if existing is None:
            encoders.load_early()
        return None
    if existing is not None:
        facts = facts_without_weights(config, encoders.model, existing)
    else:
        form = planned_form(config, encoders.model, listed.outline.listing, None)
        facts = encoders.facts(sees_images=form.sees_images)
    num_making = ranks.world_size if ranks.shares_disk else session.local_world_size
    return make_plan(config, target, listed, encoders.model, facts, num_making=num_making)
