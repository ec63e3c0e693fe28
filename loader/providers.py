"""Who fills a loader's batches: this process's threads, or a service. What they keep between iterations is per process."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from bucketline.errors import DeliveryError
from bucketline.loader.delivery import depth_of
from bucketline.loader.device import CudaCopier
from bucketline.loader.filler import Filler
from bucketline.loader.in_process import InProcess
from bucketline.loader.ring import Ring
from bucketline.loader.service.client import Served
from bucketline.loader.service.listening import checked_path, connected
from bucketline.loader.service.private import PrivateService
from bucketline.loader.service.protocol import PROTOCOL, StoreOf, Wanted

if TYPE_CHECKING:
    import socket
    from pathlib import Path

    import torch

    from bucketline.loader.config import LoaderConfig
    from bucketline.loader.delivery import Beginning, Delivery
    from bucketline.loader.plan import Plan
    from bucketline.loader.stores import StoreShare
    from bucketline.store.reader import OpenShards

AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a loader reads, and for whom."""

    store: OpenShards
    shares: tuple[StoreShare, ...]  # that `store` is made of
    plan: Plan
    config: LoaderConfig
    rank: int
    world_size: int
    device: torch.device


class Provider(Protocol):
    """Begins iterations."""

    def begin(self, beginning: Beginning) -> Delivery:
        """Begin an iteration.

        Raises:
            DeliveryError: where a service cannot be reached.
        """

    def close(self) -> None:
        """Let go of what is kept between iterations but memory."""


class InProcessProvider:
    """Fills with threads of this process, into slabs that are made once."""

    def __init__(self, reading: Reading) -> None:
        self._config, self._device = reading.config, reading.device
        self._filler = Filler(reading.store, reading.plan, reading.config, reading.rank, reading.world_size)
        self._depth = depth_of(self._config, self._filler.slab_bytes)
        self._pid = -1

    def begin(self, beginning: Beginning) -> Delivery:
        """Start threads."""
        if self._pid != os.getpid():  # the first time here: what a parent process made is the parent's
            self._pid = os.getpid()
            on_cuda = self._device.type == "cuda"
            self._ring = Ring(self._filler.slab_bytes, self._depth + 1 + self._config.threads, pinned=on_cuda)
            self._copier = CudaCopier(self._device) if on_cuda else None
        return InProcess(
            self._filler, self._ring, self._copier, beginning=beginning, depth=self._depth, threads=self._config.threads
        )

    def close(self) -> None:
        """Do nothing: an iteration's threads end with it."""


class ServiceProvider:
    """Asks a service, the one at a path or a private one."""

    def __init__(self, reading: Reading, service: Path | str) -> None:
        self._reading = reading
        self._path = None if service == AUTO else checked_path(service)
        self._private: PrivateService | None = None

    def begin(self, beginning: Beginning) -> Delivery:
        """Connect, and say what is wanted."""
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
        wanted = Wanted(
            protocol=PROTOCOL,
            stores=tuple(stores),
            config=reading.config,
            rank=reading.rank,
            world_size=reading.world_size,
            plan=reading.plan.digest,
            step=beginning.step,
            micro_step=beginning.micro_step,
            num_steps=beginning.num_steps,
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
        private = self._own()  # the one before was killed a moment ago
        return self._served(private.connect(), private.name, wanted)

    def _served(self, sock: socket.socket, name: str, wanted: Wanted) -> Served:
        try:
            return Served(sock, name, wanted, CudaCopier(self._reading.device) if wanted.is_pinned else None)
        except BaseException:
            sock.close()
            raise

    def _own(self) -> PrivateService:
        """Give this process's private service, started where there is none or it has died."""
        private = self._private
        if private is None or private.pid != os.getpid() or not private.is_alive():
            if private is not None:
                private.stop()
            private = self._private = PrivateService([share.store.path.absolute() for share in self._reading.shares])
        return private

    def close(self) -> None:
        """End the private service."""
        if self._private is not None:
            self._private.stop()
            self._private = None
