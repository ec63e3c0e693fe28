"""A worker of the cluster: an actor that loads the model once, and packs one slice after another."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bucketline.errors import BucketlineError
from bucketline.ingest.parallel.item_parts import ItemParts
from bucketline.ingest.parallel.shares import Share
from bucketline.ingest.pipeline.model.encoders import Encoders
from bucketline.ingest.pipeline.slice_worker import SliceWorker, run_name
from bucketline.ingest.sources.source_json import source_from_json
from bucketline.store import Store
from bucketline.store.format.manifest import Manifest
from bucketline.store.sync.parts import PartStore
from bucketline.store.write.attempts import begin_attempt, seal_rest
from bucketline.typed_json import decode

if TYPE_CHECKING:
    from bucketline.ingest.config import PackConfig
    from bucketline.ingest.on_ray.slices import Attempt
    from bucketline.ingest.pipeline.model.encoder_facts import EncoderFacts
    from bucketline.ingest.pipeline.slice_packer import SlicePacker
    from bucketline.ingest.summary import RunSummary
    from bucketline.store.sync.parts import SentShard
    from bucketline.store.transfer.sender import ShardSender
    from bucketline.typed_json import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTask:
    """The settings that all slices of a source share."""

    config: PackConfig
    source: Json
    manifest: Json  # of the generation that the run continues
    num_slices: int
    token: str  # in the names of the run's shards
    lists: dict[str, bytes]  # of dropped rows, if the store is in object storage


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSlice:
    """The outcome of an attempt; nothing of it counts before the driver has taken its shards."""

    account: RunSummary
    sealed: list[str]  # names of its shards, in its attempt's folder
    sent: list[SentShard]  # the same, if the store is in object storage
    is_whole: bool  # False if the worker was told to stop


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFailure:
    """An error that a worker reports, by the name of its class; raised by the driver."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The progress of the slice that a worker packs."""

    num_done: int  # images
    slowest: str  # stage


def attempt_name(manifest: Manifest, token: str, attempt: Attempt) -> str:
    """Return what the names of an attempt's shards begin with, and its folder's name."""
    return run_name(manifest, token, attempt.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Maker:
    """The parts by which a worker packs slices of one source."""

    worker: SliceWorker
    part: PartStore | None  # of a store in object storage

    @classmethod
    def of(cls, run: RunTask, encoders: Encoders) -> _Maker:
        config, manifest = run.config, decode(Manifest, run.manifest)
        part = None
        if not isinstance(config.place, Path):
            parent = config.store.with_name(f"{config.store.name}.workers")
            part = PartStore(config.objects(config.place), parent, manifest, run.lists)
        worker = SliceWorker(
            config=config,
            source=source_from_json(run.source),
            store=Store(config.store, manifest) if part is None else part.open(),
            encoders=encoders,
        )
        return cls(worker=worker, part=part)

    def begin(self, run: RunTask, name: str) -> tuple[Path, ShardSender | None]:
        """Return the folder of an attempt and, if the store is in object storage, what sends its shards."""
        if self.part is not None:
            return self.part.begin(name)
        return begin_attempt(run.config.store, run.token, name), None


class _ToldToStop(KeyboardInterrupt):
    """The driver has told the worker to stop."""


class PackWorker:
    """The actor. One call of `pack` at a time; `status` and `stop` are answered meanwhile by another thread."""

    def __init__(self, config: PackConfig) -> None:
        self._config = config
        self._encoders: Encoders | None = None
        self._is_told = threading.Event()
        self._num_done = 0
        self._packer: SlicePacker | None = None
        self._maker: _Maker | None = None

    def ready(self) -> str:
        """Return what messages call this worker."""
        return f"pid {os.getpid()} on {socket.gethostname()}"

    def facts(self) -> EncoderFacts | WorkerFailure:
        """Load the encoders and return their facts."""
        try:
            return self._opened(self._config).facts()
        except BucketlineError as error:
            return _failure(error)

    def pack(self, run: RunTask, attempt: Attempt, parts: list[bytes]) -> PackedSlice | WorkerFailure:
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

    def close(self) -> None:
        """Remove what the worker has on this machine's disk."""
        if self._maker is not None and self._maker.part is not None:
            self._maker.part.close()

    def _opened(self, config: PackConfig) -> Encoders:
        self._encoders = self._encoders or Encoders(config, 0)
        return self._encoders

    def _packed(self, run: RunTask, attempt: Attempt, items: ItemParts) -> PackedSlice:
        maker = self._maker = self._maker or _Maker.of(run, self._opened(run.config))
        name = attempt_name(maker.worker.store.manifest, run.token, attempt)
        folder, sender = maker.begin(run, name)
        packer = self._packer = maker.worker.packer(Share(rank=attempt.number, world_size=run.num_slices), name, folder, sender)
        is_whole = True
        with sender or nullcontext():
            try:
                encoders = maker.worker.encoders
                if encoders.may_be_two_phases:
                    packer.encode_captions(items, lambda: None, self._check, lambda: encoders.phases.are_two)
                packer.run(items, self._count, self._check)
                sealed = packer.sealed
            except _ToldToStop:
                is_whole = False
                rest = seal_rest(folder)
                sealed = [*packer.sealed, *rest]
                if sender is not None:
                    for shard in rest:
                        sender.put(shard)
            if sender is not None:
                sender.finish(lambda: None)
        return PackedSlice(
            account=packer.account,
            sealed=sealed,
            sent=maker.part.finish(folder, sealed) if maker.part is not None else [],
            is_whole=is_whole,
        )

    def _count(self) -> None:
        self._num_done += 1

    def _check(self) -> None:
        if self._is_told.is_set():
            raise _ToldToStop


def _failure(error: BucketlineError) -> WorkerFailure:
    return WorkerFailure(kind=type(error).__name__, message=str(error))
