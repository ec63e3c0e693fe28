"""The stores that a server reads, each of their generations opened once for all clients that read it."""

from __future__ import annotations

import gc
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from bucketline.errors import BucketlineError, StoreError
from bucketline.loader.mixture import WeightedStore, open_shares, parse_stores
from bucketline.store import Store
from bucketline.store.format.manifest import generations

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from bucketline.store.remote.urls import RemoteOptions


class ServedStores:
    """Opens the stores' newest generations for new clients, and older ones for states that name them.

    A generation that was superseded lives as long as a client reads it, so that removed files are freed.
    """

    def __init__(self, stores: Sequence[Path | str], remote: RemoteOptions | None) -> None:
        """Open the newest generations, so that a store that cannot be opened fails early.

        Raises:
            UsageError: if a store is given twice.
            StoreError: if a store cannot be opened.
        """
        self._arguments, self._remote = parse_stores(stores), remote
        self._newest = open_shares([str(one) for one in stores], remote)
        self._opened: WeakValueDictionary[tuple[int, int], Store] = WeakValueDictionary()  # by number and generation
        for number, one in enumerate(self._newest):
            self._opened[number, one.store.manifest.generation] = one.store
        self._opening = threading.Lock()
        self._looked_at = time.monotonic()

    def newest(self) -> tuple[WeightedStore, ...]:
        """Return the stores at their newest generations. Clients that arrive together share one look at the stores.

        Raises:
            StoreError: if one cannot be read.
        """
        asked = time.monotonic()
        with self._opening:
            if self._looked_at <= asked:
                looked_at = time.monotonic()
                found = tuple(self._open(*one) for one in enumerate(self._newest_numbers()))
                if tuple(one.store.manifest.generation for one in found) != self._held():
                    self._newest = open_shares(found, self._remote)  # which checks them
                self._looked_at = looked_at
            return self._newest

    def at(self, wanted: tuple[int, ...]) -> tuple[WeightedStore, ...]:
        """Return the stores at these generations, one for each; at the newest ones if there are none.

        Raises:
            StoreError: if there is another number of stores, or a generation is gone.
        """
        if not wanted:
            return self.newest()
        if len(wanted) != len(self._arguments):
            raise StoreError(f"the state has {len(wanted)} stores, the server {len(self._arguments)}; use the same stores")
        opened = [self._opened.get(one) for one in enumerate(wanted)]
        if all(opened):  # whatever is being opened now
            return tuple(self._weighted(number, store) for number, store in enumerate(opened) if store is not None)
        with self._opening:
            return tuple(self._open(*one) for one in enumerate(wanted))

    def let_go(self) -> None:
        """Turn to newer generations of the stores on disks, and free what nobody reads any more."""
        if any(number not in (None, held) for number, held in zip(self._newest_numbers(), self._held(), strict=True)):
            with suppress(BucketlineError, OSError):  # the next client is told, or finds it readable
                self.newest()
        current = set(enumerate(self._held()))
        if any(key not in current for key in list(self._opened)):
            gc.collect()  # stores and their buckets know each other

    def _held(self) -> tuple[int, ...]:
        return tuple(one.store.manifest.generation for one in self._newest)

    def _newest_numbers(self) -> list[int | None]:
        """Return each store's newest generation, or None if only opening it tells."""
        stores = [one.store for one in self._newest]
        return [max(generations(store.path), default=None) if store.source is None else None for store in stores]

    def _open(self, number: int, generation: int | None) -> WeightedStore:
        store = None if generation is None else self._opened.get((number, generation))
        if store is None:
            store = Store.open(self._arguments[number].path, generation, remote=self._remote, reads_rows=True)
            store = self._opened.setdefault((number, store.manifest.generation), store)
        return self._weighted(number, store)

    def _weighted(self, number: int, store: Store) -> WeightedStore:
        return WeightedStore(store=store, repeats=self._arguments[number].repeats)
