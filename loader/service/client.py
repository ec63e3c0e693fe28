"""The client: what a loader requests of a service, which is batches, and without stores here also manifests and names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from bucketline.errors import DeliveryError, UsageError
from bucketline.loader.mixture import WeightedStore
from bucketline.loader.prefetch.stream import Buffers, CudaCopier
from bucketline.loader.service import wire
from bucketline.loader.service.child import ChildLink
from bucketline.loader.service.ring import RingStream
from bucketline.loader.service.sockets import connected
from bucketline.loader.service.tcp import FrameReceiver, TcpLink
from bucketline.loader.service.wire import Answer, NamesRequest, Request, ServedManifest, StoresRequest
from bucketline.store.format.manifest import Manifest, parse_manifest
from bucketline.store.read.store import Store

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from bucketline.loader.mixture import StoreId
    from bucketline.loader.plan.epoch_steps import Cursor
    from bucketline.loader.prefetch.stream import Stream
    from bucketline.loader.service.sockets import ServiceAddress
    from bucketline.store.remote.urls import RemoteArguments


class UnixLink:
    """A client's way to a service at a socket of this machine."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def ask(self, message: Mapping[str, Any]) -> Answer:
        return wire.ask(connected(self._path), f"the service at {self._path}", message)


Link: TypeAlias = UnixLink | ChildLink | TcpLink


def link_to(address: ServiceAddress, stores: Sequence[str] = (), remote: RemoteArguments | None = None) -> Link:
    """Return the way to a service; a child process reads `stores` of this machine."""
    if isinstance(address.place, tuple):
        return TcpLink(address)
    if address.place is not None:
        return UnixLink(address.place)
    if not stores or remote is None:
        raise UsageError("stores is None with service auto, a process that reads the stores of this machine; name them")
    return ChildLink(stores, remote)


class ServiceBackend:
    """Requests batches from a service."""

    def __init__(self, link: Link, request: Request, device: torch.device) -> None:
        """Start nothing. `request` is sent with each iteration's own cursor."""
        self.link, self._request, self._device = link, request, device
        self._buffers = Buffers(device)

    def turn_to(self, request: Request) -> None:
        """Request other batches from the same service, from the next iteration on."""
        self._request = request

    def begin(self, cursor: Cursor) -> Stream | RingStream:
        """Connect and send the request."""
        request = replace(self._request, cursor=cursor)
        answer = self.link.ask(wire.message_of(request))
        try:
            if isinstance(self.link, TcpLink):
                return FrameReceiver(self.link, request, answer, self._buffers).stream
            return RingStream(answer, CudaCopier(self._device) if self._device.type == "cuda" else None)
        except BaseException:
            answer.close()
            raise

    def close(self) -> None:
        """End a child process."""
        if isinstance(self.link, ChildLink):
            self.link.close()


class ServedStore(Store):
    """A store that a service reads, for plans here: its manifest, and none of its files."""

    def __init__(self, where: str, manifest: Manifest, link: Link) -> None:
        super().__init__(Path(where), manifest, plain_reads=True)
        self.where, self._place, self._link = where, where, link

    @property
    def place(self) -> Path | str:
        return self._place

    @property
    def absolute(self) -> Path | str:
        return self._place

    @property
    def is_local(self) -> bool:
        return False

    def reopened(self, generation: int | None = None) -> Store:
        """Return the store at another generation that the service has."""
        return served_stores(self._link, StoresRequest(store_id=self.manifest.store_id, generation=generation))[0].store


def _told(link: Link, request: StoresRequest | NamesRequest) -> Answer:
    """Return the answer to what is not a request for batches; the connection is closed."""
    answer = link.ask(wire.message_of(request))
    answer.close()
    return answer


def served_stores(link: Link, request: StoresRequest) -> tuple[WeightedStore, ...]:
    answer, stores = _told(link, request), []
    for where, repeats, text in answer.parsed(tuple[ServedManifest, ...]):
        data = text.encode(errors="replace")  # JSON can have half a surrogate pair, which is not text
        manifest = parse_manifest(data, f"the manifest of {where} from {answer.name}")
        stores.append(WeightedStore(store=ServedStore(where, manifest, link), repeats=repeats))
    manifests = [weighted.store.manifest for weighted in stores]
    is_requested = request.store_id is None or [request.store_id] == [manifest.store_id for manifest in manifests]
    if not stores or not is_requested or request.generation not in (None, manifests[0].generation):
        raise DeliveryError(f"the answer of {answer.name} is invalid: it has other stores than were requested")
    return tuple(stores)


def served_names(link: Link, stores: Sequence[StoreId], digests: Sequence[bytes]) -> list[str]:
    """Return sample ids by their digests, of the stores that a service has."""
    answer = _told(link, NamesRequest(stores=tuple(stores), digests=tuple(digest.hex() for digest in digests)))
    names = list(answer.parsed(tuple[str, ...]))
    if len(names) != len(digests):
        raise DeliveryError(f"the answer of {answer.name} is invalid: it has {len(names)} names of {len(digests)} rows")
    return names
