"""A worker of the cluster: an actor that loads the model once, and packs one slice after another."""

from __future__ import annotations

import os
import socket
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.errors import BucketlineError
from bucketline.ingest.parallel.item_parts import ItemParts
from bucketline.ingest.parallel.shares import Share
from bucketline.ingest.pipeline.lazy_encoders import EncoderFacts, LazyEncoders
from bucketline.ingest.pipeline.slice_worker import SliceWorker, run_name
from bucketline.ingest.sources.source_json import source_from_json
from bucketline.store import Store
from bucketline.store.format.manifest import Manifest
from bucketline.store.write.attempts import begin_attempt, seal_rest
from bucketline.typed_json import decode

if TYPE_CHECKING:
    from bucketline.ingest.config import PackConfig
    from bucketline.ingest.on_ray.slices import Attempt
    from bucketline.ingest.pipeline.slice_packer import SlicePacker
    from bucketline.ingest.summary import RunSummary
    from bucketline.typed_json import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTask:
    """The settings that all slices of a source share."""

    config: PackConfig
    source: Json
    manifest: Json  # of the generation that the run continues
    on_shared_cores: bool  # the encoders run on the CPU
    num_slices: int
    token: str  # in the names of the run's shards


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSlice:
    """The outcome of an attempt; nothing of it counts before the driver has taken its shards."""

    account: RunSummary
    sealed: list[str]  # names of its shards, in its attempt's folder
    is_whole: bool  # False if the worker was told to stop
    has_loaded: bool  # the encoders were loaded, and are those that the store was made with


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedFacts:
    """The facts of a worker's encoders."""

    facts: EncoderFacts
    on_shared_cores: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An error that a worker reports, by the name of its class; raised by the driver."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The progress of the slice that a worker packs."""

    num_done: int  # images
    slowest: str  # stage


class _ToldToStop(KeyboardInterrupt):
    """The driver has told the worker to stop."""


class PackWorker:
    """The actor. One call of `pack` at a time; `status` and `stop` are answered meanwhile by another thread."""

    def __init__(self, config: PackConfig) -> None:
        self._config = config
        self._encoders: LazyEncoders | None = None
        self._is_told = threading.Event()
        self._num_done = 0
        self._packer: SlicePacker | None = None
        self._of: tuple[RunTask, SliceWorker] | None = None

    def ready(self) -> str:
        """Return what messages call this worker."""
        return f"pid {os.getpid()} on {socket.gethostname()}"

    def facts(self) -> LoadedFacts | Failure:
        """Load the encoders and return their facts."""
        try:
            encoders = self._opened(self._config)
            return LoadedFacts(facts=encoders.facts(), on_shared_cores=encoders.on_shared_cores)
        except BucketlineError as error:
            return _failure(error)

    def pack(self, run: RunTask, attempt: Attempt, parts: list[bytes]) -> PackedSlice | Failure:
        """Pack a slice into shards of its own, in its attempt's folder."""
        self._num_done = 0
        try:
            return self._packed(run, attempt, ItemParts(parts))
        except BucketlineError as error:
            return _failure(error)

    def status(self) -> Status:
        packer = self._packer
        return Status(num_done=self._num_done, slowest=packer.stages.slowest if packer else "")

    def stop(self) -> None:
        """Have `pack` return what it has encoded so far."""
        self._is_told.set()

    def _opened(self, config: PackConfig) -> LazyEncoders:
        self._encoders = self._encoders or LazyEncoders(config, 0)
        return self._encoders

    def _packed(self, run: RunTask, attempt: Attempt, items: ItemParts) -> PackedSlice:
        worker, encoders = self._worker_of(run), self._opened(run.config)
        folder = begin_attempt(run.config.store, run.token, attempt.name)
        share = Share(rank=attempt.number, world_size=run.num_slices)
        name = run_name(worker.store.manifest, run.token, attempt.name)
        packer = self._packer = worker.packer(share, name, folder)
        is_whole = True
        try:
            packer.run(items, self._count, self._check)
            sealed = packer.sealed
        except _ToldToStop:
            is_whole = False
            sealed = [*packer.sealed, *seal_rest(folder)]
        return PackedSlice(account=packer.account, sealed=sealed, is_whole=is_whole, has_loaded=encoders.is_loaded)

    def _worker_of(self, run: RunTask) -> SliceWorker:
        if self._of is None or self._of[0] != run:
            manifest = decode(Manifest, run.manifest)
            worker = SliceWorker(
                config=run.config,
                source=source_from_json(run.source),
                store=Store(run.config.store, manifest),
                encoders=self._opened(run.config),
                on_shared_cores=run.on_shared_cores,
            )
            self._of = run, worker
        return self._of[1]

    def _count(self) -> None:
        self._num_done += 1

    def _check(self) -> None:
        if self._is_told.is_set():
            raise _ToldToStop


def _failure(error: BucketlineError) -> Failure:
    return Failure(kind=type(error).__name__, message=str(error))
