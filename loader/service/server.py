"""The service: stores that all clients share, and a thread for each client, whichever way it is sent batches."""

from __future__ import annotations

import gc
import socket
import threading
import time
from collections import Counter
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from bucketline.errors import DeliveryError, StoreError, UsageError
from bucketline.loader.collate.batch_builder import BatchBuilder
from bucketline.loader.collate.gather import Gather
from bucketline.loader.mixture import StoreArgument, WeightedStore, join, parse_stores
from bucketline.loader.plan.plan import plan_of, reserve_ring
from bucketline.loader.service import wire
from bucketline.loader.service.ring import RingClient
from bucketline.loader.service.sockets import is_loopback
from bucketline.loader.service.tcp import FrameClient
from bucketline.loader.service.wire import COUNTED, FullError, NamesRequest, Request, ServedManifest, StoresRequest
from bucketline.store.format.manifest import dump_manifest, generations
from bucketline.store.read.files import refuse_lost_shards
from bucketline.store.read.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from bucketline.loader.mixture import Mixture, StoreId
    from bucketline.loader.service.sockets import HostPort, Security
    from bucketline.store.remote.urls import RemoteOptions

END_S = 1.0  # for all clients to read the end of their iterations
Client: TypeAlias = RingClient | FrameClient
_STOPPED = DeliveryError(
    "the service was stopped; restart it, and iterate again: the next iteration continues at the same batch"
)


@dataclass(slots=True, kw_only=True, eq=False)
class OpenStores:
    """Open stores, joined as a client reads them, and their memory map."""

    stores: tuple[WeightedStore, ...]
    rows: Store | Mixture
    gather: Gather
    num_users: int = 0

    def is_superseded(self) -> bool:
        """Return True if a newer generation of one of the stores has been published."""
        return any(max(generations(s.store.path), default=-1) != s.store.manifest.generation for s in self.stores)

    def is_lost(self) -> bool:
        """Return True if the cache of one of the stores was removed."""
        return any(weighted.store.source is not None and weighted.store.source.is_removed for weighted in self.stores)


class ServedStores:
    """Opens generations of stores as clients request them, and lets go of superseded ones that nobody reads."""

    def __init__(self, stores: Sequence[Path | str], remote: RemoteOptions | None) -> None:
        """Open the newest generations, so that a store that cannot be opened fails early."""
        self._remote = remote
        self._arguments: dict[str, StoreArgument] = {}  # by the ids that clients name
        places: dict[str, Store] = {}
        self._sources: dict[str, Any] = {}  # of stores in object storage, by URL
        self._opened: dict[tuple[object, ...], OpenStores] = {}
        self._lock = threading.Lock()
        for argument in parse_stores(stores):
            store = self._open_store(argument, None)
            before = places.setdefault(store.manifest.store_id, store)
            self._arguments.setdefault(store.manifest.store_id, argument)
            if _place(before) != _place(store):  # generations of equal numbers could be different ones
                raise UsageError(
                    f"{before.place} and {store.place} are copies of one store ({store.manifest.store_id}); "
                    "start a service for each"
                )

    @property
    def places(self) -> list[str]:
        return [str(argument.path) for argument in self._arguments.values()]

    def fetched(self) -> dict[str, Any]:
        """Return what was fetched of each store in object storage, as JSON values."""
        return {url: {**asdict(source.stats()), "store_bytes": source.num_bytes} for url, source in self._sources.items()}

    def told(self, request: StoresRequest) -> list[ServedManifest]:
        """Return the manifests that a client requests."""
        manifests = []
        for store_id in self._arguments if request.store_id is None else [request.store_id]:
            argument = self._argument(store_id, f"the store {store_id}")
            store = self._open_store(argument, request.generation)
            if store.manifest.store_id != store_id:
                raise StoreError(
                    f"{argument.path} was replaced by another store ({store.manifest.store_id}, it was {store_id}); "
                    "restart the service"
                )
            if store.source is None:
                refuse_lost_shards(store.folder, store.manifest, sidecars=False)  # one stat per shard
            manifest = dump_manifest(store.manifest).decode()
            manifests.append(ServedManifest(place=str(store.place), repeats=argument.repeats, manifest=manifest))
        return manifests

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

    def open(self, requested: Sequence[StoreId], *, plain_reads: bool, using: ExitStack) -> OpenStores:
        """Return the generations of the stores that a client reads, opened once for all clients that read the same.

        They count as read until `using` ends.
        """
        if not requested:
            raise DeliveryError("0 stores were requested, expected 1 or more")
        arguments = [self._argument(request.store_id, request.path) for request in requested]
        with self._lock:
            key = (*((request.store_id, request.generation, request.repeats) for request in requested), plain_reads)
            if key not in self._opened or self._opened[key].is_lost():
                stores = tuple(
                    WeightedStore(store=self._open_store(argument, request.generation), repeats=request.repeats)
                    for argument, request in zip(arguments, requested, strict=True)
                )
                rows = join(stores, plain_reads=plain_reads)
                self._opened[key] = OpenStores(stores=stores, rows=rows, gather=Gather(rows, plain_reads=plain_reads))
            opened = self._opened[key]
            opened.num_users += 1
        using.callback(self._count_down, opened)
        for request, weighted in zip(requested, opened.stores, strict=True):
            if (digest := weighted.store.manifest.digest) != request.digest:
                raise StoreError(
                    f"generation {request.generation} of {weighted.store.place} has the digest {digest}, the "
                    f"client's of {request.path} has {request.digest}; these are two stores: use the same for both, and "
                    "restart a service whose store was replaced"
                )
        return opened

    def _count_down(self, opened: OpenStores) -> None:
        with self._lock:
            opened.num_users -= 1

    def let_go(self) -> None:
        """Unmap superseded generations that no client reads, so that removed files are freed.

        A client may still request one: as long as its files exist, it is opened again.
        """
        with self._lock:
            left = [key for key, opened in self._opened.items() if not opened.num_users and opened.is_superseded()]
            for key in left:
                del self._opened[key]
        if left:
            gc.collect()  # stores and their buckets know each other


def _place(store: Store) -> Path | str:
    return store.path.resolve() if store.source is None else store.source.url


class Service:
    """Reads stores for any number of clients. Pass each connection to `take_in`, or to `take_in_far` if it is over TCP."""

    def __init__(self, stores: Sequence[Path | str], remote: RemoteOptions | None = None) -> None:
        """Open the stores' newest generations, so that one that cannot be opened fails early. `remote`: see `Store.open`."""
        self._stores = ServedStores(stores, remote)
        self.let_go = self._stores.let_go
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self._clients: dict[Client, threading.Thread] = {}  # the oldest first
        self._reading: set[Client] = set()  # those that are sent batches
        self._past: Counter[str] = Counter()
        self._num_served = self._num_refused = 0
        self._security: Security | None = None  # of the clients over TCP, if the service listens

    def take_in(self, sock: socket.socket) -> None:
        """Answer a client on this machine, in a thread of its own."""
        self._take_in(RingClient(sock))

    @contextmanager
    def tcp_socket(self, address: HostPort, security: Security) -> Iterator[socket.socket]:
        """Listen for clients on other machines until the block ends; what is accepted goes to `take_in_far`."""
        host, port = address
        if security.token is None and not is_loopback(host):
            raise UsageError(
                f"--at tcp://{host}:{port} can be reached from other machines; give --token-file FILE, which clients must have "
                "too"
            )
        self._security = security
        try:
            sock = socket.create_server(address, family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        except OSError as error:
            raise UsageError(f"cannot listen at {host}:{port}: {error.strerror or error}") from error
        with sock:
            yield sock

    def take_in_far(self, sock: socket.socket) -> None:
        """Answer a client on another machine, in a thread of its own."""
        assert self._security is not None
        with suppress(OSError):  # one that has left
            self._take_in(FrameClient(sock, sock.getpeername()[0], self._security))

    def _take_in(self, client: Client) -> None:
        thread = threading.Thread(target=self._answer, args=(client,), name="bucketline-client", daemon=True)
        with self._lock:
            if self._stopped.is_set():  # without a word: a client over TCP tries again
                client.close()
                return
            self._make_room_for(client)
            try:
                thread.start()
                self._clients[client] = thread
            except RuntimeError as error:
                self._num_refused += 1
                client.refuse(FullError(f"the service has no thread for another client: {error}"))
                client.close()

    def _make_room_for(self, stranger: Client) -> None:
        """If strangers have all their slots, end the oldest connection of the host that has most. Call under the lock."""
        strangers = [client for client in self._clients if type(client) is type(stranger) and client.is_stranger]
        if len(strangers) >= stranger.max_strangers:
            num_of = Counter(client.host for client in strangers)
            oldest = max(strangers, key=lambda client: num_of[client.host])  # the first of these
            oldest.is_stranger = False
            oldest.shut()

    def _admit(self, client: Client) -> None:
        """Let a client that has proved that it has the token have a slot of its kind; a far one tries again if none is free."""
        with self._lock:
            client.is_stranger = False
            if sum(other.is_known and type(other) is type(client) for other in self._clients) >= client.max_clients:
                raise FullError(f"the service has {client.max_clients} clients, its maximum")
            client.is_known = True

    def stop(self) -> None:
        """End every client's iteration with an error that says so, and join every thread."""
        self._stopped.set()
        with self._lock:
            clients = dict(self._clients)
        for client in clients:
            client.stop(_STOPPED)
        until = time.monotonic() + END_S
        for thread in clients.values():
            thread.join(max(0.0, until - time.monotonic()))
        for client, thread in clients.items():
            client.shut()  # it does not read, or has the end
            thread.join()

    def stats(self) -> dict[str, Any]:
        """Return what was delivered to all clients since the service started, as JSON values."""
        with self._lock:
            total = sum((client.counted() for client in self._reading), self._past)
            clients = {"clients": len(self._reading), "clients_so_far": self._num_served, "refused": self._num_refused}
        counts = {**{name: total[name] for name in COUNTED}, "waited_s": total["waited_us"] / 1e6}
        return {"stores": self._stores.places, **clients, **counts, "fetched": self._stores.fetched()}

    def _answer(self, client: Client) -> None:
        try:
            with ExitStack() as using, closing(client):
                try:
                    client.admit()
                    message = client.request()
                    self._admit(client)
                    request = wire.parse_request(message)
                    if not isinstance(request, Request):
                        client.answer(self._told(request, using))
                        return
                    self._begin(client, request, using)
                except Exception as error:  # noqa: BLE001 - whatever a client sends, it gets the error, and the service continues
                    with self._lock:
                        self._num_refused += 1
                    client.refuse(error)
                    return
                if self._stopped.is_set():
                    client.stop(_STOPPED)
                self._run(client)
        finally:
            self.let_go()
            with self._lock:
                del self._clients[client]

    def _run(self, client: Client) -> None:
        with self._lock:
            self._reading.add(client)
            self._num_served += 1
        try:
            client.run()
        finally:
            with self._lock:
                self._reading.remove(client)
                self._past += client.counted()

    def _told(self, request: StoresRequest | NamesRequest, using: ExitStack) -> list[ServedManifest] | list[str]:
        if isinstance(request, StoresRequest):
            return self._stores.told(request)
        rows = self._stores.open(request.stores, plain_reads=True, using=using).rows
        return rows.ids_of([bytes.fromhex(digest) for digest in request.digests])

    def _begin(self, client: Client, request: Request, using: ExitStack) -> None:
        if not 0 <= request.rank < request.world_size:
            raise DeliveryError(f"rank is {request.rank} of {request.world_size} ranks")
        config = client.permitted(wire.sent(request.config))
        opened = self._stores.open(request.stores, plain_reads=config.plain_reads, using=using)
        plan = plan_of(opened.rows, config, request.world_size)
        if plan.digest != request.plan:
            raise DeliveryError(
                f"the client's plan has the digest {request.plan}, the service's {plan.digest}; use one version of bucketline"
            )
        builder = BatchBuilder(opened.rows, opened.gather, plan, config, request.rank, request.world_size)
        reserve_ring(builder, opened.rows, plan, request.rank, request.world_size)
        client.begin(builder, request)
