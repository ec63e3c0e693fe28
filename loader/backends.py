"""Backends that fill a loader's batches: threads of this process, or a service. Their state is per process."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from bucketline.errors import DeliveryError
from bucketline.loader.collate.batch_builder import BatchBuilder
from bucketline.loader.collate.buffer_pool import BufferPool
from bucketline.loader.prefetch.cuda_copy import CudaCopier
from bucketline.loader.prefetch.stream import depth_of
from bucketline.loader.prefetch.threads import ThreadStream
from bucketline.loader.service.child_process import ChildService
from bucketline.loader.service.client import ServiceStream
from bucketline.loader.service.protocol import PROTOCOL, Request, StoreOf
from bucketline.loader.service.unix_socket import checked_path, connected

if TYPE_CHECKING:
    import socket
    from pathlib import Path

    import torch

    from bucketline.loader.config import LoaderConfig
    from bucketline.loader.mixture import WeightedStore
    from bucketline.loader.plan.plan import Plan
    from bucketline.loader.prefetch.stream import BatchStream, Cursor
    from bucketline.store.read.store import OpenShards

AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The source of a loader's batches, and the rank and device that they are for."""

    store: OpenShards
    shares: tuple[WeightedStore, ...]  # the stores that make up `store`
    plan: Plan
    config: LoaderConfig
    rank: int
    world_size: int
    device: torch.device


class Backend(Protocol):
    """Starts iterations."""

    def begin(self, cursor: Cursor) -> BatchStream:
        """Start an iteration.

        Raises:
            DeliveryError: if a service cannot be reached.
        """

    def close(self) -> None:
        """Release everything kept between iterations, except memory."""


class ThreadBackend:
    """Fills batches with threads of this process, into buffers that are allocated once."""

    def __init__(self, reading: Reading) -> None:
        self._config, self._device = reading.config, reading.device
        self._builder = BatchBuilder(reading.store, reading.plan, reading.config, reading.rank, reading.world_size)
        self._depth = depth_of(self._config, self._builder.buffer_bytes)
        self._pid = -1

    def begin(self, cursor: Cursor) -> BatchStream:
        """Start threads."""
        if self._pid != os.getpid():  # first use in this process: a parent's buffers stay the parent's
            self._pid = os.getpid()
            on_cuda = self._device.type == "cuda"
            self._pool = BufferPool(self._builder.buffer_bytes, self._depth + 1 + self._config.threads, pinned=on_cuda)
            self._copier = CudaCopier(self._device) if on_cuda else None
        return ThreadStream(
            self._builder, self._pool, self._copier, cursor=cursor, depth=self._depth, threads=self._config.threads
        )

    def close(self) -> None:
        """Do nothing: an iteration's threads end with it."""


class ServiceBackend:
    """Requests batches from a service: one at a socket path, or a private child process."""

    def __init__(self, reading: Reading, service: Path | str) -> None:
        self._reading = reading
        self._path = None if service == AUTO else checked_path(service)
        self._private: ChildService | None = None

    def begin(self, cursor: Cursor) -> BatchStream:
        """Connect and send the request."""
        reading = self._reading
        stores = [
            StoreOf(
                store_id=share.store.manifest.store_id,
                generation=share.store.manifest.generation,
                digest=share.store.manifest.digest,
                path=str(share.store.path.absolute()),
                repeats=share.repeats,
            )
            for share in reading.shares
        ]
        wanted = Request(
            protocol=PROTOCOL,
            stores=tuple(stores),
            config=reading.config,
            rank=reading.rank,
            world_size=reading.world_size,
            plan=reading.plan.digest,
            step=cursor.step,
            micro_step=cursor.micro_step,
            num_steps=cursor.num_steps,
            is_pinned=reading.device.type == "cuda",
            pid=os.getpid(),
        )
        if self._path is not None:
            return self._served(connected(self._path), f"the service at {self._path}", wanted)
        try:
            private = self._own()
            return self._served(private.connect(), private.name, wanted)
        except DeliveryError:
            if self._private is None or not self._private.has_ended():
                raise
        private = self._own()  # the previous one was killed a moment ago
        return self._served(private.connect(), private.name, wanted)

    def _served(self, sock: socket.socket, name: str, wanted: Request) -> ServiceStream:
        try:
            return ServiceStream(sock, name, wanted, CudaCopier(self._reading.device) if wanted.is_pinned else None)
        except BaseException:
            sock.close()
            raise

    def _own(self) -> ChildService:
        """Return this process's private service; start one if there is none or it has died."""
        private = self._private
        if private is None or private.pid != os.getpid() or not private.is_alive():
            if private is not None:
                private.stop()
            private = self._private = ChildService([share.store.path.absolute() for share in self._reading.shares])
        return private

    def close(self) -> None:
        """End the private service."""
        if self._private is not None:
            self._private.stop()
            self._private = None
