"""The stores of a service, as a client without them sees them: manifests, which plans are made of, and samples' names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from bucketline.errors import DeliveryError
from bucketline.loader.mixture import WeightedStore
from bucketline.loader.service.wire import (
    NamesRequest,
    StoresRequest,
    StoresResponse,
    WantedStore,
    message_of,
    parsed,
    receive_bytes,
)
from bucketline.store import Store
from bucketline.store.format.manifest import MAX_MANIFEST_BYTES, Manifest, parse_manifest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bucketline.loader.history import StoreId
    from bucketline.loader.service.links import Link
    from bucketline.store.remote.urls import RemoteOptions

_MAX_NAMES_BYTES = 1 << 26


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

    def reopened(self, generation: int | None = None, remote: RemoteOptions | None = None) -> Store:
        """Return the store at another generation that the service has."""
        del remote  # the service's own
        return served_shares(self._link, [WantedStore(store_id=self.manifest.store_id, generation=generation)])[0].store


def served_shares(link: Link, wanted: Sequence[WantedStore] = ()) -> tuple[WeightedStore, ...]:
    """Return the stores that a service has, all at their newest generation, or those that are wanted.

    Raises:
        DeliveryError: if its answer is not that of a service.
        StoreError: if a generation is gone.
    """
    answer = link.ask(message_of(StoresRequest(wanted=tuple(wanted))))
    try:
        told = parsed(StoresResponse, answer.message, f"the answer of {answer.name}").stores
        shares = []
        for one in told:
            if not 0 < one.manifest_bytes <= MAX_MANIFEST_BYTES:
                raise DeliveryError(f"the answer of {answer.name} is invalid: a manifest of {one.manifest_bytes} bytes")
            data = receive_bytes(answer.sock, one.manifest_bytes, link.silence_s)
            manifest = parse_manifest(data, f"the manifest of {one.place} from {answer.name}")
            shares.append(WeightedStore(store=ServedStore(one.place, manifest, link), repeats=one.repeats))
    finally:
        answer.close()
    found = [(share.store.manifest.store_id, share.store.manifest.generation) for share in shares]
    asked = [(one.store_id, one.generation or number) for one, (_, number) in zip(wanted, found, strict=False)]
    if not shares or (wanted and asked != found):
        raise DeliveryError(f"the answer of {answer.name} is invalid: it has other stores than were requested")
    return tuple(shares)


def served_names(link: Link, stores: Sequence[StoreId], digests: Sequence[bytes]) -> list[str]:
    """Return sample ids by their digests, of the stores that a service has.

    Raises:
        StoreError: if a row is of another store.
    """
    answer = link.ask(message_of(NamesRequest(stores=tuple(stores), digests=tuple(digest.hex() for digest in digests))))
    try:
        count = answer.message.get("bytes")
        if type(count) is not int or not 0 < count <= _MAX_NAMES_BYTES:
            raise DeliveryError(f"the answer of {answer.name} is invalid: names of {count!r:.100} bytes")
        names = json.loads(receive_bytes(answer.sock, count, link.silence_s))
    except (ValueError, RecursionError) as error:
        raise DeliveryError(f"the answer of {answer.name} is invalid: {error}") from error
    finally:
        answer.close()
    if not isinstance(names, list) or len(names) != len(digests) or any(not isinstance(name, str) for name in names):
        raise DeliveryError(f"the answer of {answer.name} is invalid: its names are not those of {len(digests)} rows")
    return names
