"""The loader: batches of one bucket each, in the plan's order, prefetched by threads of this process or by a service.

with Loader("photos.store", LoaderConfig(batch_size=8), device=torch.device("cuda")) as loader:
    for batch in loader:
        ...
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from bucketline.errors import StateError, StoreError, UsageError
from bucketline.loader.batch import Batch, as_fields
from bucketline.loader.collate.batch_builder import BatchBuilder
from bucketline.loader.collate.buffer_pool import carve
from bucketline.loader.collate.columns import latent_kind
from bucketline.loader.config import Shuffle
from bucketline.loader.mixture import WeightedStore, join, open_shares
from bucketline.loader.plan.cache_needs import reserve_ring
from bucketline.loader.plan.cursor import Cursor
from bucketline.loader.plan.plan import asked_window, plan_of
from bucketline.loader.prefetch.threads import QueueStats, ThreadBackend
from bucketline.loader.service.client import AUTO, ServiceBackend
from bucketline.loader.service.protocol import PROTOCOL, Request, StoreOf
from bucketline.loader.state import (
    STATE_VERSION,
    LoaderState,
    as_json,
    check_state,
    global_batch_of,
    name_stores,
    saved_choices,
)
from bucketline.loader.stats import LoaderStats, Meter
from bucketline.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from bucketline.loader.collate.buffer_pool import FilledBuffer
    from bucketline.loader.config import LoaderConfig
    from bucketline.loader.mixture import Stores
    from bucketline.loader.prefetch.threads import ThreadStream
    from bucketline.loader.service.client import ServiceStream
    from bucketline.store.format.columns import LatentKind
    from bucketline.store.read.store import OpenShards


class Loader:
    """An iterable of one rank's micro-batches. It has one iterator at a time: a second one ends the first.

    A loader may be passed to a forked or spawned process. That process iterates independently, from the state at that time.
    """

    def __init__(
        self,
        stores: Stores,
        config: LoaderConfig,
        *,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str | None = None,
        service: Path | str | None = None,
    ) -> None:
        """Make a plan over the stores' generations. No row is read before iteration starts.

        `stores` is one store (open, its path or its URL) or several. A `WeightedStore` sets how often a pass reads a store's
        rows. Stores in object storage are reached and cached as `config` says.

        `service`: the socket of a `loader serve` that reads this store, or "auto" for a child process that does. Without it,
        threads of this process read. The batches are the same.

        Raises:
            UsageError: if `rank` is not below `world_size`, a store is given twice, or the socket's path is too long.
            PlanError: if the plan has no step, or the lanes of `lines` do not divide a global batch.
            StoreError: if a store cannot be opened.
            FingerprintError: if two stores were packed with different settings.
        """
        if not 0 <= rank < world_size:
            raise UsageError(f"rank is {rank} of {world_size} ranks, expected 0 to {world_size - 1}")
        self.shares = open_shares(stores, config.remote())
        self._rows = store = join(self.shares, plain_reads=config.plain_reads)
        chosen = ("lanes", "shuffle_window") if config.shuffle is Shuffle.LINES else ()
        self._chosen = [name for name in chosen if getattr(config, name) is None]  # a state may set them
        self.device = torch.device(device or "cpu")
        if self.device.type not in ("cpu", "cuda"):
            raise UsageError(f"device is {self.device}, expected cpu or cuda")
        self._rank, self._world_size, self._service = rank, world_size, service
        self._set_plan(config)
        self._marks, self._global_batch = name_stores(self.shares), global_batch_of(self.plan)
        num_steps = None if config.epochs is None else self.plan.steps_before(config.epochs)
        self._cursor = Cursor(step=0, micro_step=0, num_steps=num_steps)
        self._latent_kind = latent_kind(store)
        self._backend = self._backend_of(store)
        self._stream: ThreadStream | ServiceStream | None = None
        self._meter, self._queue_stats = Meter(), QueueStats(ready=0, depth=0, buffers=0)

    def _set_plan(self, config: LoaderConfig) -> None:
        """Make the plan; the configuration then names the lanes and the window that it has."""
        self.plan = plan = plan_of(self._rows, config, self._world_size)
        if self._chosen:
            window = config.shuffle_window or asked_window(self._rows, config, plan.buckets, self._world_size)
            config = replace(config, lanes=plan.lanes, shuffle_window=window)
        self.config = config

    def _backend_of(self, store: OpenShards) -> ThreadBackend | ServiceBackend:
        if self._service is None:
            builder = BatchBuilder(store, self.plan, self.config, self._rank, self._world_size)
            reserve_ring(builder, store, self.plan, self.config.split, self._rank, self._world_size)
            return ThreadBackend(builder, self.device)
        return self._service_backend(self._service)

    def _service_backend(self, service: Path | str) -> ServiceBackend:
        request = Request(
            protocol=PROTOCOL,
            stores=tuple(map(StoreOf.of, self.shares)),
            config=self.config,
            rank=self._rank,
            world_size=self._world_size,
            plan=self.plan.digest,
            cursor=self._cursor,
            is_pinned=self.device.type == "cuda",
            pid=os.getpid(),
        )
        return ServiceBackend(service, request, self.device)

    def __iter__(self) -> Iterator[Batch]:
        """Continue from the current state. After the last of `epochs`, the next iteration starts over."""
        self._end()
        if self._cursor.step == self._cursor.num_steps:
            self._cursor = self._cursor.at(0)
        self._meter = Meter()
        stream, pid = self._begin(), os.getpid()
        try:
            while True:
                if os.getpid() != pid:  # the loop continues in a process that was forked inside it
                    stream, pid = self._begin(), os.getpid()
                asked = time.perf_counter()
                if (delivered := stream.next()) is None:
                    return
                filled = delivered[0]
                batch = _batch_of(*delivered, self._latent_kind)
                self._meter.note(asked, filled)
                after = self._cursor.after(filled.step, filled.micro_step, self.config.accumulation)
                del delivered, filled  # or the generator would hold the buffer until the next one
                self._cursor = after  # last, so that Ctrl-C before this skips no batch
                yield batch
                del batch
        finally:
            if self._stream is stream:
                self._end()
            else:  # it has already ended, and its counts were saved
                stream.close()

    def _begin(self) -> ThreadStream | ServiceStream:
        sources = [share.store.source for share in self.shares if share.store.source is not None]
        if isinstance(self._backend, ThreadBackend) and any(source.is_inherited for source in sources):
            self._backend = self._service_backend(AUTO)  # object storage cannot be read in a forked process
        self._stream = self._backend.begin(self._cursor)
        return self._stream

    def __len__(self) -> int:
        """Return the number of micro-batches in all `epochs`.

        Raises:
            TypeError: if the loader is endless.
        """
        if self._cursor.num_steps is None:
            raise TypeError("a loader with epochs=None has no length")
        return self._cursor.num_steps * self.config.accumulation

    def set_epoch(self, epoch: int) -> None:
        """Move to the first step of an epoch, counted from 0. The next iteration starts there and continues past its end.

        Raises:
            UsageError: if the loader ends before that epoch.
        """
        if epoch < 0 or (self.config.epochs is not None and epoch >= self.config.epochs):
            expected = "0 or more" if self.config.epochs is None else f"0 to {self.config.epochs - 1}"
            raise UsageError(f"epoch is {epoch}, expected {expected}")
        self._end()
        self._cursor = self._cursor.at(self.plan.steps_before(epoch))

    def names(self, batch: Batch) -> list[str]:
        """Return the sample ids of a batch's rows (paths in the source, with extension), `[B]`; reads each sample's record.

        Raises:
            StoreError: if a row is of another store.
        """
        return [self._name(digest.tobytes()) for digest in batch.ids.cpu().numpy()]

    def _name(self, digest: bytes) -> str:
        if (found := self._rows.find_digest(digest)) is None:
            raise StoreError(f"{self._rows.where} has no sample with the digest {digest.hex()}: the batch is of another store")
        return found[1].id

    def stats(self) -> LoaderStats:
        """Return what the current iteration has delivered and how long the caller waited; takes microseconds."""
        queue_stats = self._queue_stats if self._stream is None else self._stream.queue_stats()
        sources = {id(share.store.source): share.store.source for share in self.shares if share.store.source is not None}
        return self._meter.stats(queue_stats, tuple(source.stats() for source in sources.values()))

    def state_dict(self) -> dict[str, object]:
        """Return the state as JSON values, under 1 KB. It counts the micro-batches that the caller has consumed."""
        return as_json(self._state())

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Resume from a saved state at the next iteration, with its lanes and window if the configuration names none.

        Raises:
            StateError: if it belongs to another plan; the message names the field, its saved and its current value.
        """
        self._end()
        saved = {name: value for name, value in saved_choices(state, self.plan).items() if name in self._chosen}
        if any(getattr(self.config, name) != value for name, value in saved.items()):
            self._set_plan(replace(self.config, **saved))  # type: ignore[arg-type]
            self._backend.close()
            self._backend = self._backend_of(self._rows)
        found = check_state(state, self._state())
        if self._cursor.num_steps is not None and found.step > self._cursor.num_steps:
            raise StateError(
                f"the state is at step {found.step}, this loader ends after {self._cursor.num_steps} steps; give more epochs"
            )
        self._cursor = self._cursor.at(found.step, found.micro_step)

    def _state(self) -> LoaderState:
        return LoaderState(
            version=STATE_VERSION,
            step=self._cursor.step,
            micro_step=self._cursor.micro_step,
            accumulation=self.config.accumulation,
            world_size=self._world_size,
            global_batch=self._global_batch,
            settings=self.config.deciding(),
            stores=self._marks,
            plan=self.plan.digest,
        )

    def _end(self) -> None:
        """End the current iteration."""
        if self._stream is not None:
            stream, self._stream = self._stream, None
            self._queue_stats = stream.queue_stats()
            stream.close()

    def close(self) -> None:
        """End the current iteration and a private service. Threads and processes are gone when this returns.

        Batches still held stay valid, and a later iteration resumes where this one stopped.
        """
        self._end()
        self._backend.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if "_stream" in self.__dict__:
            self.close()

    def __reduce__(self) -> tuple[object, ...]:
        """Return what another process needs to resume from this state; a spawned process opens the store itself."""
        stores = [(share.store.absolute, share.store.manifest.generation, share.repeats) for share in self.shares]
        ranks = (self._rank, self._world_size, self.device, self._service)
        return _again, (stores, self.config, ranks, self.state_dict())


def _again(
    stores: list[tuple[Path | str, int, int]],
    config: LoaderConfig,
    ranks: tuple[int, int, torch.device, Path | str | None],
    state: dict[str, object],
) -> Loader:
    """Rebuild another process's loader, in its state."""
    rank, world_size, device, service = ranks
    shares = [
        WeightedStore(store=Store.open(path, generation, remote=config.remote()), repeats=repeats)
        for path, generation, repeats in stores
    ]
    loader = Loader(shares, config, rank=rank, world_size=world_size, device=device, service=service)
    loader.load_state_dict(state)
    return loader


def _batch_of(filled: FilledBuffer, flat: Tensor, latent_kind: LatentKind) -> Batch:
    """Make a batch from a filled buffer's description and its bytes on the caller's device."""
    return Batch(
        step=filled.step,
        micro_step=filled.micro_step,
        epoch=filled.epoch,
        bucket=filled.bucket,
        latent_kind=latent_kind,
        **as_fields(carve(flat, filled.fields)),
    )
