"""The stores that a service reads: manifests for clients that plan, and each generation opened once for all that read it."""

from __future__ import annotations

import gc
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from bucketline.errors import DeliveryError, StoreError, UsageError
from bucketline.loader.collate.gather import Gather
from bucketline.loader.mixture import StoreArgument, WeightedStore, join, parse_stores
from bucketline.store import Store
from bucketline.store.format.manifest import generation_path, generations
from bucketline.store.read.lost_files import refuse_lost_shards

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import ExitStack
    from pathlib import Path

    from bucketline.loader.mixture import StoreId
    from bucketline.loader.service.wire import WantedStore
    from bucketline.store.read.store import OpenShards
    from bucketline.store.remote.urls import RemoteOptions


@dataclass(slots=True, kw_only=True, eq=False)
class OpenStores:
    """Open stores, joined as a client reads them, and their memory map."""

    shares: tuple[WeightedStore, ...]
    store: OpenShards
    gather: Gather
    num_users: int = 0

    def is_superseded(self) -> bool:
        """Return True if a newer generation of one of the stores has been published."""
        return any(max(generations(s.store.path), default=-1) != s.store.manifest.generation for s in self.shares)

    def is_lost(self) -> bool:
        """Return True if the cache of one of the stores was removed."""
        return any(share.store.source is not None and share.store.source.is_removed for share in self.shares)


class ServedStores:
    """Opens generations of stores as clients request them, and lets go of superseded ones that nobody reads."""

    def __init__(self, stores: Sequence[Path | str], remote: RemoteOptions | None) -> None:
        """Open the newest generations, so that a store that cannot be opened fails early."""
        self._remote = remote
        self._arguments: dict[str, StoreArgument] = {}  # by the ids that clients name
        self._newest: dict[str, Store] = {}
        for argument in parse_stores(stores):
            store = Store.open(argument.path, remote=remote)
            before = self._newest.setdefault(store.manifest.store_id, store)
            self._arguments.setdefault(store.manifest.store_id, argument)
            if _place(before) != _place(store):  # generations of equal numbers could be different ones
                raise UsageError(
                    f"{before.place} and {store.place} are copies of one store ({store.manifest.store_id}); "
                    "start a service for each"
                )
        self._files = {store_id: _manifest_file(store) for store_id, store in self._newest.items()}  # of those on disks
        self._looked_at = dict.fromkeys(self._newest, 0.0)  # of those in object storage
        self._sources = {store.source.url: store.source for store in self._newest.values() if store.source is not None}
        self._opened: dict[tuple[object, ...], OpenStores] = {}
        self._lock, self._looking = threading.Lock(), threading.Lock()

    @property
    def places(self) -> list[str]:
        return [str(one.path) for one in self._arguments.values()]

    def fetched(self) -> dict[str, Any]:
        """Return what was fetched of each store in object storage, as JSON values."""
        return {url: {**asdict(one.stats()), "store_bytes": one.num_bytes} for url, one in self._sources.items()}

    def at(self, wanted: Sequence[WantedStore]) -> list[WeightedStore]:
        """Return stores at the generations that a client names, for their manifests; all at their newest if it names none."""
        named = [(one.store_id, one.generation) for one in wanted] or [(store_id, None) for store_id in self._arguments]
        found = []
        for store_id, generation in named:
            argument = self._argument(store_id, f"the store {store_id}")
            store = self._at_newest(store_id) if generation is None else self._open_store(argument, generation)
            if store.source is None:
                refuse_lost_shards(store.folder, store.manifest, sidecars=False)  # one stat per shard
            found.append(WeightedStore(store=store, repeats=argument.repeats))
        return found

    def _at_newest(self, store_id: str) -> Store:
        """Return a store at its newest generation. Clients that ask together share one look at object storage."""
        asked, argument = time.monotonic(), self._arguments[store_id]
        with self._looking:
            held = self._newest[store_id]
            if held.source is None:
                is_same = self._files[store_id] == _manifest_file(held)
                is_newest = is_same and max(generations(held.path), default=None) == held.manifest.generation
            else:
                is_newest = self._looked_at[store_id] >= asked
            if not is_newest:
                self._looked_at[store_id] = time.monotonic()
                newest = self._open_store(argument, None)
                if newest.manifest.store_id != store_id:
                    raise StoreError(
                        f"{argument.path} was replaced by another store ({newest.manifest.store_id}, it was {store_id}); "
                        "restart the service"
                    )
                self._newest[store_id], self._files[store_id] = newest, _manifest_file(newest)
            return self._newest[store_id]

    def _open_store(self, argument: StoreArgument, generation: int | None) -> Store:
        store = Store.open(argument.path, generation, remote=self._remote, reads_rows=generation is not None)
        if store.source is not None:
            self._sources[store.source.url] = store.source
        return store

    def _argument(self, store_id: str, called: str) -> StoreArgument:
        if store_id not in self._arguments:
            raise StoreError(
                f"{called} is not among the stores that the service reads ({', '.join(self.places)}); "
                "start it with that store, or again if the store at its path is another one since"
            )
        return self._arguments[store_id]

    def open(self, wanted: Sequence[StoreId], *, plain_reads: bool, using: ExitStack) -> OpenStores:
        """Return the generations of the stores that a client reads, opened once for all clients that read the same.

        They count as read until `using` ends.
        """
        if not wanted:
            raise DeliveryError("0 stores were requested, expected 1 or more")
        arguments = [self._argument(one.store_id, one.path) for one in wanted]
        with self._lock:
            key = (*((one.store_id, one.generation, one.repeats) for one in wanted), plain_reads)
            if key not in self._opened or self._opened[key].is_lost():
                shares = tuple(
                    WeightedStore(store=self._open_store(argument, one.generation), repeats=one.repeats)
                    for argument, one in zip(arguments, wanted, strict=True)
                )
                store = join(shares, plain_reads=plain_reads)
                self._opened[key] = OpenStores(shares=shares, store=store, gather=Gather(store, plain_reads=plain_reads))
            found = self._opened[key]
            found.num_users += 1
        using.callback(self._count_down, found)
        for one, share in zip(wanted, found.shares, strict=True):
            if share.store.manifest.digest != one.digest:
                raise StoreError(
                    f"generation {one.generation} of {share.store.place} has the digest {share.store.manifest.digest}, the "
                    f"client's of {one.path} has {one.digest}; these are two stores: use the same for both, and "
                    "restart a service whose store was replaced"
                )
        return found

    def _count_down(self, found: OpenStores) -> None:
        with self._lock:
            found.num_users -= 1

    def let_go(self) -> None:
        """Unmap superseded generations that no client reads, so that removed files are freed.

        A client may still request one: as long as its files exist, it is opened again.
        """
        with self._lock:
            left = [key for key, found in self._opened.items() if not found.num_users and found.is_superseded()]
            for key in left:
                del self._opened[key]
        if left:
            gc.collect()  # stores and their buckets know each other


def _manifest_file(store: Store) -> tuple[int, int, int] | None:
    """Return what is another one once a store on a disk was replaced at its path."""
    with suppress(OSError):
        found = generation_path(store.path, store.manifest.generation).stat()
        return found.st_dev, found.st_ino, found.st_mtime_ns
    return None


def _place(store: Store) -> Path | str:
    return store.path.resolve() if store.source is None else store.source.url
