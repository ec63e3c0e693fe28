"""A worker of the cluster: an actor that loads the model once, and packs one slice after another."""

from __future__ import annotations

import os
import socket
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bucketline.errors import BucketlineError
from bucketline.ingest.parallel.item_parts import ItemParts
from bucketline.ingest.pipeline.model.encoders import Encoders
from bucketline.ingest.pipeline.slice_worker import PackedSlice, PackPlan, SliceWorker
from bucketline.store.sync.parts import AttemptStore
from bucketline.typed_json import decode

if TYPE_CHECKING:
    from bucketline.ingest.config import PackConfig
    from bucketline.ingest.on_ray.slices import Attempt
    from bucketline.ingest.pipeline.model.encoder_facts import EncoderFacts
    from bucketline.ingest.pipeline.stage_timer import StageTimer
    from bucketline.store.sync.parts import PartStore
    from bucketline.typed_json import Json


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


class _ToldToStop(KeyboardInterrupt):
    """The driver has told the worker to stop."""


class PackWorker:
    """The actor. One call of `pack` at a time; `status` and `stop` are answered meanwhile by another thread."""

    def __init__(self, config: PackConfig) -> None:
        self._config = config
        self._encoders: Encoders | None = None
        self._is_told = threading.Event()
        self._num_done = 0
        self._stages: StageTimer | None = None
        self._place: AttemptStore | PartStore | None = None
        self._worker: SliceWorker | None = None

    def ready(self) -> str:
        """Return what messages call this worker."""
        return f"pid {os.getpid()} on {socket.gethostname()}"

    def facts(self) -> EncoderFacts | WorkerFailure:
        """Load the encoders and return their facts."""
        try:
            return self._opened().facts()
        except BucketlineError as error:
            return _failure(error)

    def pack(self, plan: Json, attempt: Attempt, parts: list[bytes]) -> PackedSlice | WorkerFailure:
        """Pack a slice into shards of its own, in its attempt's folder."""
        self._num_done = 0
        try:
            return self._packed(plan, attempt, ItemParts(parts))
        except BucketlineError as error:
            return _failure(error)

    def status(self) -> Status:
        return Status(num_done=self._num_done, slowest=self._stages.slowest if self._stages else "")

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

    def _begin(self, plan: PackPlan) -> tuple[SliceWorker, AttemptStore | PartStore]:
        config = self._config
        is_shared = isinstance(config.place, Path)
        place = AttemptStore(config.store, plan.manifest, plan.token) if is_shared else plan.parts(config)
        return SliceWorker(config, plan, place.open(), place.begin, self._opened()), place

    def _packed(self, plan: Json, attempt: Attempt, items: ItemParts) -> PackedSlice:
        if self._worker is None or self._place is None:
            self._worker, self._place = self._begin(decode(PackPlan, plan))
        encoders = self._worker.encoders
        packer, own = self._worker.slice(attempt.number, self._worker.plan.name_of(attempt.name))
        self._stages = packer.stages
        with own.sending():
            try:
                if encoders.may_be_two_phases:
                    packer.encode_captions(items, lambda: None, self._check, lambda: encoders.phases.are_two)
                packer.run(items, self._count, self._check)
            except _ToldToStop:
                own.seal_rest()
            own.send()
        sent = self._place.finish(own.folder, own.sealed)
        return PackedSlice(account=own.account, sealed=own.sealed, sent=sent)

    def _count(self) -> None:
        self._num_done += 1

    def _check(self) -> None:
        if self._is_told.is_set():
            raise _ToldToStop


def _failure(error: BucketlineError) -> WorkerFailure:
    return WorkerFailure(kind=type(error).__name__, message=str(error))
