"""The client: what a loader requests of a service, which is batches, and without stores here also manifests and names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bucketline.errors import DeliveryError
from bucketline.loader.mixture import WeightedStore
from bucketline.loader.prefetch.cuda_copy import CudaCopier
from bucketline.loader.prefetch.delivery import Buffers
from bucketline.loader.service.frame_stream import FrameStream
from bucketline.loader.service.links import Servers
from bucketline.loader.service.ring_stream import RingStream
from bucketline.loader.service.wire import (
    NamesRequest,
    NamesResponse,
    StoresRequest,
    StoresResponse,
    WantedStore,
    message_of,
)
from bucketline.store import Store
from bucketline.store.format.manifest import Manifest, parse_manifest

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from bucketline.loader.mixture import StoreId
    from bucketline.loader.plan.epoch_steps import Cursor
    from bucketline.loader.service.links import Link
    from bucketline.loader.service.wire import Request


class ServiceBackend:
    """Requests batches from a service."""

    def __init__(self, link: Link, request: Request, device: torch.device) -> None:
        """Start nothing. `request` is sent with each iteration's own cursor."""
        self.link, self._request, self._device = link, request, device
        self._buffers = Buffers(device)

    def turn_to(self, request: Request) -> None:
        """Request other batches from the same service, from the next iteration on."""
        self._request = request

    def begin(self, cursor: Cursor) -> RingStream | FrameStream:
        """Connect and send the request."""
        request = replace(self._request, cursor=cursor)
        answer = self.link.ask(message_of(request))
        try:
            if isinstance(self.link, Servers):
                return FrameStream(self.link, request, answer, self._buffers)
            return RingStream(answer, CudaCopier(self._device) if request.is_pinned else None)
        except BaseException:
            answer.close()
            raise

    def close(self) -> None:
        """End a private service."""
        self.link.close()


class ServedStore(Store):
    """A store that a service reads, for plans here: its manifest, and none of its files."""

    def __init__(self, place: str, manifest: Manifest, link: Link) -> None:
        super().__init__(Path(place), manifest, plain_reads=True)
        self.where, self._place, self._link = place, place, link

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
        return served_shares(self._link, [WantedStore(store_id=self.manifest.store_id, generation=generation)])[0].store


def served_shares(link: Link, wanted: Sequence[WantedStore] = ()) -> tuple[WeightedStore, ...]:
    """Return the stores that a service has, all at their newest generation, or those that are wanted."""
    shares, answer = [], link.told(StoresRequest(wanted=tuple(wanted)))
    for one in answer.parsed(StoresResponse).stores:
        data = one.manifest.encode(errors="replace")  # JSON can have half a surrogate pair, which is not text
        manifest = parse_manifest(data, f"the manifest of {one.place} from {answer.name}")
        shares.append(WeightedStore(store=ServedStore(one.place, manifest, link), repeats=one.repeats))
    found = [(share.store.manifest.store_id, share.store.manifest.generation) for share in shares]
    asked = [(one.store_id, one.generation or number) for one, (_, number) in zip(wanted, found, strict=False)]
    if not shares or (wanted and asked != found):
        raise DeliveryError(f"the answer of {answer.name} is invalid: it has other stores than were requested")
    return tuple(shares)


def served_names(link: Link, stores: Sequence[StoreId], digests: Sequence[bytes]) -> list[str]:
    """Return sample ids by their digests, of the stores that a service has."""
    answer = link.told(NamesRequest(stores=tuple(stores), digests=tuple(digest.hex() for digest in digests)))
    names = list(answer.parsed(NamesResponse).names)
    if len(names) != len(digests):
        raise DeliveryError(f"the answer of {answer.name} is invalid: it has {len(names)} names of {len(digests)} rows")
    return names
