"""`ingest pack --engine ray`: the workers of a Ray cluster are the ranks of a pack, and the driver adds up what they return.

A rank is a task of Ray, which runs it again elsewhere if its worker is lost: it then finds what that one had committed.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import socket
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError, RayTaskError

from bucketline.errors import BucketlineError, RankError, StoreError, UsageError
from bucketline.ingest.config import PackConfig
from bucketline.ingest.encoders.model_folder import open_model
from bucketline.ingest.packing.finish import finish
from bucketline.ingest.packing.run import list_source, make_plan, target_of
from bucketline.ingest.packing.share import SharePacker, own_folder
from bucketline.ingest.parallel.items import ItemParts
from bucketline.ingest.parallel.ranks import kept
from bucketline.ingest.parallel.signals import Interrupts, Stopped, exit_code_of
from bucketline.ingest.partners.partner import planned_form
from bucketline.ingest.pipeline.model import EncoderFacts, Encoders, facts_without_weights
from bucketline.ingest.sources.dataset_file import source_from_json
from bucketline.store.write.publish import LocalTarget, changing, newest_manifest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from bucketline.ingest.packing.finish import PackResult
    from bucketline.ingest.packing.run import PackPlan
    from bucketline.ingest.summary import RunSummary
    from bucketline.store.write.publish import StoreTarget

OBJECT_STORE_BYTES = 256 << 20  # of Ray on this machine: listings of the shares that are being packed
MOST_RETRIES = 4  # of a rank whose worker is lost
LAST_WORDS_S = 60.0  # to commit what a stopped worker has encoded
_POLL_S = 0.2


# ------------------------------------------------------------------ the cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """The number of workers and what each takes of the cluster."""

    most: int
    cpus: float
    gpus: float


@contextmanager
def cluster(config: PackConfig) -> Iterator[Workers]:
    """Connect to the cluster of `--engine ray:ADDRESS`, or start Ray on this machine, and shut it down after the block."""
    options = {"log_to_driver": True, "logging_level": logging.ERROR, "namespace": "bucketline"}
    if not (address := config.engine and config.engine.address):
        wanted, cores = config.workers, len(os.sched_getaffinity(0))
        cpus = max(cores, math.ceil((wanted.most or 0) * (wanted.cpus or 1)))
        ray.init(address="local", include_dashboard=False, num_cpus=cpus, object_store_memory=OBJECT_STORE_BYTES, **options)
    else:
        try:
            ray.init(address=address, **options)
        except (ConnectionError, ValueError, TimeoutError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            raise UsageError(
                f"--engine {config.engine}: no Ray cluster can be used there ({reason:.300}); start one with "
                "`ray start --head`, or --engine ray to start Ray on this machine"
            ) from error
    try:
        yield workers_of(config, ray.cluster_resources())
    finally:
        ray.shutdown()


def workers_of(config: PackConfig, resources: Mapping[str, float]) -> Workers:
    """Return the workers that the options request, in a cluster of these resources."""
    total_cpus, total_gpus = resources.get("CPU", 0.0), resources.get("GPU", 0.0)
    wanted = config.workers
    gpus, cpus, most = wanted.gpus, wanted.cpus, wanted.most
    if gpus is None:
        gpus = 1.0 if total_gpus >= 1 and config.device != "cpu" else 0.0
    if cpus is None:
        cpus = float(max(1, int(total_cpus * gpus // total_gpus))) if gpus and total_gpus else 1.0
    if most is None:
        room = [total // each for total, each in ((total_cpus, cpus), (total_gpus, gpus)) if each]
        most = max(1, int(min(room, default=1)))
    return Workers(most=most, cpus=cpus, gpus=gpus)


# ------------------------------------------------------------------ a worker


def pack_rank(config: PackConfig, plan: PackPlan, rank: int, parts: list[bytes]) -> RunSummary:
    """Pack and commit the share of one rank; if the driver stops it, what it has encoded so far. Ray calls this in a worker."""
    with ExitStack() as held:
        interrupts = held.enter_context(Interrupts())
        is_on_disk, target = isinstance(config.place, Path), _opened(config, held)
        plan = replace(plan, manifest=target.newest() or plan.manifest)  # which has what a lost worker of this rank committed
        encoders, source = Encoders(config, 0), source_from_json(plan.source)
        name = plan.name_of(f"r{rank:04d}-{secrets.token_hex(4)}")  # never that of a lost worker
        own = SharePacker(config, plan, source, rank, target, encoders, name=name)
        with suppress(KeyboardInterrupt):
            own.pack(ItemParts(parts), interrupts, _nothing, None if rank else "pack (rank 0)", is_kept=is_on_disk)
        own.commit()
        return own.packer.account


def _opened(config: PackConfig, held: ExitStack) -> StoreTarget:
    """Return the store as a worker sees it; on a disk, what a lost worker left there is adopted."""
    if not isinstance(config.place, Path):
        return held.enter_context(own_folder(config))
    if newest_manifest(config.store) is None:
        raise StoreError(
            f"{config.store} is not on {socket.gethostname()}; a store in a folder must be on a disk that all machines share "
            "under the same path: choose such a folder, or a URL"
        )
    with changing(config.store):
        return LocalTarget(config.store)


def _nothing() -> None:
    """Ranks on Ray do not look for one another: Ray does."""


def load_facts(config: PackConfig, *, sees_images: bool) -> EncoderFacts:
    """Load the encoders and return their facts. Ray calls this in a worker."""
    return Encoders(config, 0).facts(sees_images=sees_images)


# ------------------------------------------------------------------ the driver


def pack_on_ray(config: PackConfig, workers: Workers, interrupts: Interrupts, num_before: int) -> PackResult:
    """Pack one source, after others with `num_before` images. Raises what `ingest.pack.pack_source` does."""
    target = target_of(config)
    with target.held():
        listed = list_source(config, target, workers.most)
        model, existing, own = open_model(config.model, config.model_config), target.newest(), _for_workers(config, workers)
        if existing is not None:
            facts = facts_without_weights(config, model, existing)
        else:
            found: list[EncoderFacts] = []
            form = planned_form(config, model, listed.outline.listing, None)
            _results([_task(load_facts, workers).remote(own, sees_images=form.sees_images)], interrupts, found)
            facts = found[0]
        plan = make_plan(config, target, listed, model, facts, num_making=0)
        task = _task(pack_rank, workers)
        calls = [task.remote(own, plan, rank, parts) for rank, parts in enumerate(listed.parts) if parts]
        summaries: list[RunSummary] = []
        try:
            _pack(calls, interrupts, summaries)
            return finish(config, target, listed, plan, plan.manifest, (), summaries)
        except KeyboardInterrupt as error:
            num_packed = sum(summary.packed for summary in summaries)
            raise Stopped(exit_code_of(error), num_before + num_packed) from error


def _for_workers(config: PackConfig, workers: Workers) -> PackConfig:
    """Return the configuration as a worker needs it, without the command's own class."""
    plain = PackConfig(**{field.name: getattr(config, field.name) for field in fields(PackConfig)})
    return replace(plain, decode_threads=plain.decode_threads or max(1, int(workers.cpus)))


def _task(function: Any, workers: Workers) -> Any:  # noqa: ANN401 - Ray has no types
    task: Any = ray.remote(function)
    return task.options(num_cpus=workers.cpus, num_gpus=workers.gpus, max_retries=MOST_RETRIES)


def _pack(calls: list[Any], interrupts: Interrupts, summaries: list[RunSummary]) -> None:
    """Wait for all ranks, whose summaries are added; if one fails or a signal comes, have the others commit what they have."""
    try:
        _results(calls, interrupts, summaries)
    except BaseException as error:
        left = calls[len(summaries) :]
        for call in left:
            ray.cancel(call, force=False)
        done, _ = ray.wait(left, num_returns=len(left), timeout=LAST_WORDS_S) if left else ([], [])
        for call in done:
            with suppress(RayError):  # the first error is the one to raise
                summaries.append(ray.get(call))
        if isinstance(error, BucketlineError):
            num_packed = sum(summary.packed for summary in summaries)
            raise type(error)(f"{error} (the other workers have stopped, {kept(num_packed)})") from error
        raise


def _results(calls: list[Any], interrupts: Interrupts, results: list[Any]) -> None:
    """Add what calls return, in the order in which they end; `calls` is put into that order."""
    with interrupts.between_images() as check:
        while len(results) < len(calls):
            check()
            left = calls[len(results) :]
            for call in ray.wait(left, timeout=_POLL_S)[0]:
                at = calls.index(call)
                calls[at], calls[len(results)] = calls[len(results)], call
                try:
                    results.append(ray.get(call))
                except RayTaskError as error:
                    if isinstance(error.cause, BucketlineError):
                        raise error.cause from error
                    raise RankError(f"a worker failed: {error}; rerun the command to continue") from error
                except RayError as error:
                    why = " ".join(str(error).split())[:500]
                    raise RankError(
                        f"a rank lost its worker {MOST_RETRIES + 1} times, or it could not start: {why}; every node needs "
                        "bucketline[ingest,ray] of the same versions, and the model; if memory was short, use a smaller "
                        "--batch-size or fewer workers on a machine; rerun the command to continue"
                    ) from error
