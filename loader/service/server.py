"""The service: opened stores that all clients share, and a session for each client."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from bucketline.errors import BucketlineError, DeliveryError, StoreError, UsageError
from bucketline.loader.collate.batch_builder import BatchBuilder
from bucketline.loader.collate.gather import Gather
from bucketline.loader.mixture import WeightedStore, join, parse_stores
from bucketline.loader.plan.cache_needs import reserve_ring
from bucketline.loader.plan.make_plan import plan_of
from bucketline.loader.prefetch.threads import depth_of
from bucketline.loader.service.protocol import Response, failure_as_json, parse_request, receive, send
from bucketline.loader.service.session import Session
from bucketline.loader.service.unix_socket import peer_uid
from bucketline.loader.stats import ClientCounts
from bucketline.store import Store
from bucketline.store.format.manifest import generations

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from bucketline.loader.history import StoreId
    from bucketline.loader.service.protocol import Request
    from bucketline.store.read.store import OpenShards
    from bucketline.store.remote.urls import RemoteOptions

_REQUEST_S = 10.0  # time limit for a client to send its request
_MAX_CLIENTS = 1024
_ENDED = "the service was stopped; restart it and iterate again: the next iteration continues at the same batch"


@dataclass(slots=True, kw_only=True, eq=False)
class _Open:
    """Open stores, joined as a client reads them, and their memory map."""

    shares: tuple[WeightedStore, ...]
    store: OpenShards
    gather: Gather
    num_users: int = 0

    def is_superseded(self) -> bool:
        """Return whether a newer generation of one of the stores has been published."""
        return any(max(generations(s.store.path), default=-1) != s.store.manifest.generation for s in self.shares)


class Service:
    """Reads stores for any number of clients. Pass each client's connection to `take_in`."""

    def __init__(self, stores: Sequence[Path | str], remote: RemoteOptions | None = None) -> None:
        """Open the stores' newest generations, so that a store that cannot be opened fails early. `remote`: see `Store.open`.

        Raises:
            UsageError: if two of them are copies of one store.
            StoreError: if a store cannot be opened.
        """
        opened = [Store.open(one.path, remote=remote) for one in parse_stores(stores)]
        self._paths = _by_id(opened)
        self._sources = {store.source.url: store.source for store in opened if store.source is not None}
        self._remote = remote
        self._opened: dict[tuple[object, ...], _Open] = {}
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._connections: set[socket.socket] = set()
        self._sessions: list[Session] = []
        self._clients = ClientCounts()
        self._begun = time.monotonic()
        self._is_stopped = False
        self.network: Callable[[], dict[str, Any]] | None = None  # the statistics of clients on other machines

    def take_in(self, sock: socket.socket) -> None:
        """Answer a client in a separate thread."""
        thread = threading.Thread(target=self._answer, args=(sock,), name="bucketline-client", daemon=True)
        with self._lock:
            is_full = len(self._threads) >= _MAX_CLIENTS
            if not is_full:
                self._threads.add(thread)
                self._connections.add(sock)
        if is_full:
            _refuse(sock, DeliveryError(f"the service has {_MAX_CLIENTS} clients, its maximum"))
            sock.close()
            return
        thread.start()

    def stop(self) -> None:
        """End every client's iteration with an error that says so, and join every thread."""
        with self._lock:
            self._is_stopped = True
            sessions, threads, connections = list(self._sessions), list(self._threads), list(self._connections)
        for session in sessions:
            session.stop(_ENDED)
        for sock in connections:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()

    def stats(self) -> dict[str, Any]:
        """Return what was delivered to each client, and to all clients since the service started.

        `network` has the same of clients on other machines, which are counted there only; None if the service does not listen.
        """
        return {
            "pid": os.getpid(),
            "seconds": time.monotonic() - self._begun,
            "stores": [str(path) for path in self._paths.values()],
            **self._clients.as_json(),
            "network": None if self.network is None else self.network(),
            "fetched": {url: {**asdict(one.stats()), "store_bytes": one.num_bytes} for url, one in self._sources.items()},
        }

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

    def _answer(self, sock: socket.socket) -> None:
        try:
            self._answer_and_serve(sock)
        finally:
            self.let_go()
            with self._lock:
                self._connections.discard(sock)
                self._threads.discard(threading.current_thread())

    def _answer_and_serve(self, sock: socket.socket) -> None:
        with sock, ExitStack() as using:
            try:
                _refuse_others(sock)
                message, _ = receive(sock, _REQUEST_S)
                if message.get("ask") == "stats":
                    send(sock, {"stats": self.stats()})
                    return
                session = self._grant(sock, parse_request(message), using)
            except Exception as error:  # noqa: BLE001 - whatever a client sends, it gets the error, and the service continues
                self._clients.refuse()
                _refuse(sock, error)
                return
            self._serve(session)

    def _grant(self, sock: socket.socket, wanted: Request, using: ExitStack) -> Session:
        """Open what a client requests, and answer it. `using` ends with its session."""
        if not wanted.stores or wanted.world_size < 1:
            raise DeliveryError(
                f"{len(wanted.stores)} stores on {wanted.world_size} ranks were requested, expected 1 or more of each"
            )
        store = self._open(wanted.stores, plain_reads=wanted.config.plain_reads, using=using)
        plan = plan_of(store.store, wanted.config, wanted.world_size)
        if plan.digest != wanted.plan:
            raise DeliveryError(
                f"the client's plan has the digest {wanted.plan}, the service's {plan.digest}; use one version of bucketline"
            )
        if not 0 <= wanted.rank < wanted.world_size:
            raise DeliveryError(f"rank is {wanted.rank} of {wanted.world_size} ranks")
        builder = BatchBuilder(store.store, plan, wanted.config, wanted.rank, wanted.world_size, gather=store.gather)
        reserve_ring(builder, store.store, plan, wanted.rank, wanted.world_size)
        depth = depth_of(wanted.config, builder.buffer_bytes)
        stores = tuple(str(self._paths[one.store_id]) for one in wanted.stores)
        session = Session(sock, wanted, builder, stores=stores, depth=depth)
        send(sock, asdict(Response(buffer_bytes=builder.buffer_bytes, depth=depth)), session.fd)
        return session

    def _serve(self, session: Session) -> None:
        with self._lock:
            is_stopped = self._is_stopped
            if not is_stopped:
                self._sessions.append(session)
        if is_stopped:
            session.stop(_ENDED)
            return
        try:
            with self._clients.client(session.who, session.stats):
                session.run()
        finally:
            with self._lock:
                self._sessions.remove(session)

    def _open(self, wanted: Sequence[StoreId], *, plain_reads: bool, using: ExitStack) -> _Open:
        """Return the generations of the stores that a client reads, opened once for all clients that read the same.

        It counts as read until `using` ends.
        """
        for one in wanted:
            if one.store_id not in self._paths:
                served = ", ".join(map(str, self._paths.values()))
                raise StoreError(
                    f"{one.path} is not among the stores that the service reads ({served}); start it with that store"
                )
        with self._lock:
            key = (*((one.store_id, one.generation, one.repeats) for one in wanted), plain_reads)
            if key not in self._opened:
                shares = tuple(
                    WeightedStore(
                        store=Store.open(self._paths[one.store_id], one.generation, remote=self._remote), repeats=one.repeats
                    )
                    for one in wanted
                )
                store = join(shares, plain_reads=plain_reads)
                self._opened[key] = _Open(shares=shares, store=store, gather=Gather(store, plain_reads=plain_reads))
            found = self._opened[key]
            found.num_users += 1
        using.callback(self._count_down, found)
        for one, share in zip(wanted, found.shares, strict=True):
            if share.store.manifest.digest != one.digest:
                raise StoreError(
                    f"generation {one.generation} of {share.store.place} has the digest {share.store.manifest.digest}, the "
                    f"client's of {one.path} has {one.digest}; these are two stores: use the same for both"
                )
        return found

    def _count_down(self, found: _Open) -> None:
        with self._lock:
            found.num_users -= 1


def _by_id(stores: Sequence[Store]) -> dict[str, Path | str]:
    """Return the places of stores by the ids that clients name; a place may be given twice.

    Raises:
        UsageError: if two places have one id: generations of equal numbers could be different ones.
    """
    found: dict[str, Store] = {}
    for store in stores:
        before = found.setdefault(store.manifest.store_id, store)
        if _place(before) != _place(store):
            raise UsageError(
                f"{before.place} and {store.place} are copies of one store ({store.manifest.store_id}); "
                "start a service for each"
            )
    return {store_id: store.place for store_id, store in found.items()}


def _place(store: Store) -> Path | str:
    return store.path.resolve() if store.source is None else store.source.url


def _refuse_others(sock: socket.socket) -> None:
    """Refuse processes of other users.

    Raises:
        DeliveryError: if the client belongs to another user than this process.
    """
    uid = peer_uid(sock)
    if uid != os.geteuid():
        raise DeliveryError(f"the service belongs to user {os.geteuid()}, you are user {uid}; start your own")


def _refuse(sock: socket.socket, error: Exception) -> None:
    with suppress(OSError, BucketlineError):
        send(sock, failure_as_json(error))
