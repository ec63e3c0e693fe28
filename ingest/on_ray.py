"""`ingest pack --engine ray`: workers of a Ray cluster pack slices of the source, and the driver commits what they return."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import sys
import threading
import time
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError, RayTaskError

from bucketline.command_line import counted
from bucketline.errors import BucketlineError, RankError, UsageError
from bucketline.ingest.config import PackConfig
from bucketline.ingest.encoders.model_folder import open_model
from bucketline.ingest.packing.finish import finish
from bucketline.ingest.packing.run import PackRun, target_of
from bucketline.ingest.parallel.exchange import ItemParts
from bucketline.ingest.parallel.ranks import kept
from bucketline.ingest.pipeline.model import EncoderFacts, Encoders, facts_without_weights
from bucketline.ingest.pipeline.slice_worker import PackedSlice, PackPlan, slice_packer
from bucketline.ingest.progress import counting_progress
from bucketline.store.sync.working import AttemptStore, sender_to, take_attempt
from bucketline.store.write.publish import begin_attempts, remove_attempts
from bucketline.typed_json import decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import ExitStack

    from bucketline.ingest.encoders.model_folder import ModelFolder
    from bucketline.ingest.packing.finish import PackResult
    from bucketline.ingest.parallel.signals import Interrupts
    from bucketline.store import Store
    from bucketline.store.sync.working import PartStore
    from bucketline.store.transfer import ShardSender
    from bucketline.typed_json import Json

OBJECT_STORE_BYTES = 256 << 20  # of Ray on this machine: listings of the slices that are being packed
SLICES_PER_WORKER = (8, 32)  # at least, so that workers end together; at most, as each slice makes shards of its own
IMAGES_PER_SLICE = (512, 8192)  # enough to fill batches of every bucket; few enough that a lost worker costs little
MAX_ATTEMPTS = 5  # of a slice
MAX_FAILED_STARTS = 3  # in a row
CLOSE_S = 10.0
LAST_SLICE_S = 60.0  # to seal what a stopped worker has encoded
_POLL_S = 0.2
_SAY_EVERY_S = 30.0  # that workers are awaited


# ------------------------------------------------------------------ the cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """The number of workers and what each takes of the cluster."""

    least: int
    most: int
    cpus: float
    gpus: float

    def __str__(self) -> str:
        gpus = f" and {self.gpus:g} GPU" if self.gpus else ""
        return f"{self.cpus:g} CPU{gpus} each"


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
    return Workers(least=wanted.least or wanted.most or 1, most=most, cpus=cpus, gpus=gpus)


# ------------------------------------------------------------------ a worker


class _ToldToStop(KeyboardInterrupt):
    """The driver has told the worker to stop."""


class PackWorker:
    """The actor. One call of `pack` at a time; `stop` is answered meanwhile by another thread."""

    def __init__(self, config: PackConfig) -> None:
        self._config = config
        self._encoders: Encoders | None = None
        self._is_told = threading.Event()
        self._plan: PackPlan | None = None
        self._place: AttemptStore | PartStore | None = None
        self._store: Store | None = None

    def ready(self) -> str:
        """Return what messages call this worker."""
        return f"pid {os.getpid()} on {socket.gethostname()}"

    def facts(self) -> EncoderFacts:
        """Load the encoders and return their facts."""
        return self._opened().facts()

    def stop(self) -> None:
        """Have `pack` return what it has encoded so far."""
        self._is_told.set()

    def close(self) -> None:
        """Remove what the worker has on this machine's disk."""
        if self._place is not None:
            self._place.close()

    def _opened(self) -> Encoders:
        self._encoders = self._encoders or Encoders(self._config, 0)
        return self._encoders

    def pack(self, told: Json, attempt: Attempt, parts: list[bytes]) -> PackedSlice:
        """Pack a slice of the plan that is `told` into shards of its own, in its attempt's folder."""
        config, encoders, items = self._config, self._opened(), ItemParts(parts)
        if self._plan is None or self._place is None or self._store is None:
            plan = self._plan = decode(PackPlan, told)
            is_shared = isinstance(config.place, Path)
            self._place = AttemptStore(config.store, plan.manifest, plan.token) if is_shared else plan.parts(config)
            self._store = self._place.open()
        name = self._plan.name_of(attempt.name)
        place = self._place.begin(name)
        packer = slice_packer(config, self._plan, attempt.number, name, store=self._store, place=place, encoders=encoders)
        with packer.sender or nullcontext():
            try:
                if encoders.may_be_two_phases:
                    packer.encode_captions(items, lambda: None, self._check, lambda: encoders.phases.are_two)
                packer.run(items, lambda: None, self._check)
            except _ToldToStop:
                packer.seal_rest()
            if packer.sender is not None:
                packer.sender.finish(lambda: None)
        sent = self._place.finish(packer.folder, packer.sealed)
        return PackedSlice(account=packer.account, sealed=packer.sealed, sent=sent)

    def _check(self) -> None:
        if self._is_told.is_set():
            raise _ToldToStop


# ------------------------------------------------------------------ the pool


def num_slices(num_items: int, num_workers: int) -> int:
    """Return how many slices a source is cut into.

    >>> [num_slices(number, 2) for number in (0, 5, 400, 10_000, 100_000, 10_000_000)]
    [1, 5, 16, 20, 64, 1221]
    """
    least, most = (number * num_workers for number in SLICES_PER_WORKER)
    small, large = (-(-num_items // images) for images in IMAGES_PER_SLICE)
    return max(1, min(num_items, max(least, min(small, most), large)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A slice that a worker packs."""

    number: int  # of the slice
    attempt: int  # how often it was begun before

    @property
    def name(self) -> str:
        """A part of its shards' names."""
        return f"s{self.number:05d}-a{self.attempt}"


@dataclass(slots=True)
class _Member:
    """A worker, from its request on."""

    actor: Any
    call: Any  # the answer that is awaited; None if it is idle
    name: str = ""  # empty until it has started
    attempt: Attempt | None = None


class RayWorkers:
    """The workers of a run."""

    def __init__(self, config: PackConfig, workers: Workers, check: Callable[[], None]) -> None:
        """Request workers when they are needed; `check` is called several times a second, and may raise."""
        self._config, self._workers, self.check = config, workers, check
        self._members: list[_Member] = []
        self._waiting: list[Attempt] = []  # slices that no worker packs
        self._failed_starts = 0
        self._is_stopping = False
        self._has_begun = False
        self._say_at = time.monotonic() + _SAY_EVERY_S
        kind: Any = ray.remote(PackWorker)
        self._kind = kind.options(num_cpus=workers.cpus, num_gpus=workers.gpus, max_restarts=0, max_concurrency=2)

    @property
    def num_working(self) -> int:
        return sum(bool(member.name) for member in self._members)

    @property
    def _idle(self) -> list[_Member]:
        return [member for member in self._members if member.name and member.call is None]

    def ask(self, question: Callable[[Any], Any]) -> Any:  # noqa: ANN401 - Ray has no types
        """Return one worker's answer; another is asked if it is lost."""
        for _ in range(MAX_FAILED_STARTS):
            self._grow(1)
            while not (idle := self._idle):
                self._poll()
                self._grow(1)
            member = idle[0]
            member.call = question(member.actor)
            while member in self._members and member.call is not None:
                for found, answer in self._poll():
                    if found is member:
                        return answer
        raise RankError(f"{MAX_FAILED_STARTS} workers were lost one after the other; see Ray's logs for the reason")

    def pack(
        self, sizes: Sequence[int], begin: Callable[[Any, Attempt], Any], take: Callable[[Attempt, PackedSlice], None]
    ) -> None:
        """Have all slices packed, the largest first; `sizes`: the number of images of each.

        `begin` starts a slice on an actor, and `take` is called with each outcome.
        """
        order = sorted((number for number, size in enumerate(sizes) if size), key=lambda number: sizes[number])
        self._waiting = [Attempt(number=number, attempt=0) for number in order]
        num_left = len(order)
        while num_left:
            self._grow(min(self._workers.most, num_left))
            self._has_begun = self._has_begun or self.num_working >= min(self._workers.least, num_left)
            for member in self._idle if self._has_begun else ():
                if self._waiting:
                    member.attempt = self._waiting.pop()
                    member.call = begin(member.actor, member.attempt)
            for member, answer in self._poll():
                attempt, member.attempt = member.attempt, None
                if attempt is not None:
                    take(attempt, answer)
                    num_left -= 1

    def stop(self, take: Callable[[Attempt, PackedSlice], None]) -> None:
        """Have the workers end their slices where they are, and take what they have encoded."""
        self.check, self._is_stopping = lambda: None, True
        for member in self._members:
            with contextlib.suppress(RayError):
                member.actor.stop.remote()
        until = time.monotonic() + LAST_SLICE_S
        while any(member.attempt is not None for member in self._members) and time.monotonic() < until:
            with suppress(BucketlineError):  # of another worker that fails as well
                for member, answer in self._poll():
                    attempt, member.attempt = member.attempt, None
                    if attempt is not None:
                        take(attempt, answer)

    def close(self) -> None:
        """End all workers; those that are idle remove what they have on their disks."""
        with contextlib.suppress(RayError):
            ray.wait([member.actor.close.remote() for member in self._idle], num_returns=len(self._idle), timeout=CLOSE_S)
        for member in self._members:
            with contextlib.suppress(RayError):
                ray.kill(member.actor)
        self._members = []

    def _grow(self, wanted: int) -> None:
        while len(self._members) < wanted:
            actor = self._kind.remote(self._config)
            self._members.append(_Member(actor=actor, call=actor.ready.remote()))

    def _poll(self) -> list[tuple[_Member, Any]]:
        """Wait a moment; return the workers that have answered, with their answers, and forget those that are lost."""
        self.check()
        by_call = {member.call: member for member in self._members if member.call is not None}
        if not by_call:
            time.sleep(_POLL_S)
        answers = []
        done, _ = ray.wait(list(by_call), num_returns=1, timeout=_POLL_S)
        for call in done:
            member = by_call[call]
            try:
                answer = ray.get(call)
            except RayTaskError as error:
                member.call = member.attempt = None
                if isinstance(error.cause, BucketlineError):
                    raise error.cause from error
                raise RankError(f"the worker {member.name} failed: {error}; rerun the command to continue") from error
            except RayError as error:
                self._lose(member, error)
                continue
            member.call = None
            if member.name:
                answers.append((member, answer))
            else:
                member.name, self._failed_starts = str(answer), 0
        self._say_if_waiting()
        return answers

    def _lose(self, member: _Member, error: RayError) -> None:
        self._members.remove(member)
        with contextlib.suppress(RayError):
            ray.kill(member.actor)
        why = " ".join(str(error).split())[:500]
        if not member.name:
            self._failed_starts += 1
            if self._failed_starts == MAX_FAILED_STARTS:
                raise RankError(
                    f"workers do not start: {why}; every node needs bucketline[ingest,ray] of the same versions, and the model"
                ) from error
        if (lost := member.attempt) is not None and not self._is_stopping:
            if lost.attempt + 1 == MAX_ATTEMPTS:
                raise RankError(
                    f"slice {lost.number} lost its worker {MAX_ATTEMPTS} times, at last: {why}; if memory was short, use a "
                    "smaller --batch-size or fewer workers on a machine; rerun the command to continue"
                )
            self._waiting.append(Attempt(number=lost.number, attempt=lost.attempt + 1))
            what = f"slice {lost.number} is packed again by another"
            print(f"warning: the worker {member.name} was lost; {what}", file=sys.stderr, flush=True)

    def _say_if_waiting(self) -> None:
        if self._has_begun or time.monotonic() < self._say_at:
            return
        self._say_at = time.monotonic() + _SAY_EVERY_S
        free = ray.available_resources()
        print(
            f"waiting for {counted(self._workers.least, 'worker')} of {self._workers}, {self.num_working} have started; "
            f"free in the cluster: {free.get('CPU', 0):g} CPU, {free.get('GPU', 0):g} GPU",
            file=sys.stderr,
            flush=True,
        )


# ------------------------------------------------------------------ the driver


class RayRun:
    """The packing of one source."""

    def __init__(self, config: PackConfig, workers: Workers, interrupts: Interrupts) -> None:
        self._config, self._interrupts, self._workers = config, interrupts, workers
        self._target = target_of(config)
        self._run: PackRun | None = None
        self._num_published = 0  # shards of the run
        self._sender: ShardSender | None = None  # of a store in object storage: keeps what workers have sent

    @property
    def num_packed(self) -> int:
        """Number of images whose shards are in the store."""
        return 0 if self._run is None else self._run.num_packed

    def pack(self, held: ExitStack) -> PackResult:
        """Pack the source; the store stays locked until `held` is closed. Raises what `ingest.pack.pack` does."""
        config, target = self._config, self._target
        most = self._workers.most
        run = self._run = PackRun.listed(config, target, held, lambda listing: num_slices(len(listing.items), most))
        model = open_model(config.model, config.model_config)
        own = self._for_workers()
        pool = RayWorkers(own, self._workers, self._interrupts.check)
        try:
            plan = run.begin(model, self._facts(pool, model), held, num_making=0)
            self._sender = sender_to(target, plan.manifest, plan.name_of("driver"), is_first=True)
            with self._sender or nullcontext():
                self._pack_slices(pool, run, plan)
        finally:
            pool.close()
        remove_attempts(config.store)
        return finish(run)

    def _for_workers(self) -> PackConfig:
        """Return the configuration as a worker needs it, without the command's own class."""
        plain = PackConfig(**{field.name: getattr(self._config, field.name) for field in fields(PackConfig)})
        return replace(plain, decode_threads=plain.decode_threads or max(1, int(self._workers.cpus)))

    def _facts(self, pool: RayWorkers, model: ModelFolder) -> EncoderFacts:
        """Return the facts of the encoders; for a new store, a worker loads them."""
        if (existing := self._target.newest()) is not None:
            return facts_without_weights(self._config, model, existing)
        facts = pool.ask(lambda actor: actor.facts.remote())
        assert isinstance(facts, EncoderFacts)
        return facts

    def _pack_slices(self, pool: RayWorkers, run: PackRun, plan: PackPlan) -> None:
        begin_attempts(self._config.store, plan.token)
        told, num_shown, every = ray.put(encode(plan)), 0, self._config.publish_every
        every_s = every and every.seconds
        publish_at = math.inf if every_s is None else time.monotonic() + every_s
        what = f"pack ({counted(self._workers.most, 'worker')})"
        with (
            counting_progress(what, run.outline.num_items) as advance,
            self._interrupts.between_images(lambda: None) as check,
        ):

            def on_poll() -> None:
                nonlocal num_shown, publish_at
                num_done = sum(account.total for account in run.accounts.values())
                for _ in range(num_shown, num_done):
                    advance()
                num_shown = max(num_shown, num_done)
                check()
                if time.monotonic() >= publish_at:
                    publish_at = time.monotonic() + (every_s or 0)
                    if len(run.sealed) > self._num_published:
                        run.publish(run.sealed[self._num_published :])
                        self._num_published = len(run.sealed)

            def take(attempt: Attempt, packed: PackedSlice) -> None:
                take_attempt(self._config.store, plan.token, plan.name_of(attempt.name), packed.sealed, packed.sent)
                if self._sender is not None:
                    self._sender.keep(packed.sealed)
                run.take(attempt.number, packed)

            pool.check = on_poll
            try:
                pool.pack(
                    [len(own) for own in run.slices],
                    lambda actor, attempt: actor.pack.remote(told, attempt, run.slices[attempt.number].parts),
                    take,
                )
            except BaseException as error:
                with suppress(BucketlineError):
                    pool.stop(take)
                if isinstance(error, BucketlineError):
                    raise type(error)(f"{error} (the other workers have stopped, {kept(run.num_packed)})") from error
                raise
            on_poll()
