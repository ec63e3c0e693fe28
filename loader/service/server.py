"""The service: stores that all clients share, and a thread for each client, whichever way it is sent batches."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import Counter
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from bucketline.errors import DeliveryError, UsageError
from bucketline.loader.collate.batch_builder import BatchBuilder
from bucketline.loader.plan.cache_needs import reserve_ring
from bucketline.loader.plan.make_plan import plan_of
from bucketline.loader.service import wire
from bucketline.loader.service.address import address_of, expect_token
from bucketline.loader.service.frame_client import FrameClient
from bucketline.loader.service.ring_client import RingClient
from bucketline.loader.service.served_stores import ServedStores
from bucketline.loader.service.wire import (
    NamesRequest,
    NamesResponse,
    Request,
    ServedManifest,
    StatsRequest,
    StatsResponse,
    StoresRequest,
    StoresResponse,
    parse_request,
    sent,
)
from bucketline.loader.stats import ClientCounts
from bucketline.store.format.manifest import dump_manifest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from bucketline.loader.mixture import WeightedStore
    from bucketline.loader.service.client_connection import Client
    from bucketline.loader.service.sockets import Security
    from bucketline.loader.service.wire import AnyRequest
    from bucketline.store.remote.urls import RemoteOptions

END_S = 1.0  # for all clients to read the end of their iterations
_STOPPED = DeliveryError(
    "the service was stopped; restart it, or name another, and iterate again: the next iteration continues at the same batch"
)


class Service:
    """Reads stores for any number of clients. Pass each connection to `take_in`, or to `take_in_far` if it is over TCP."""

    def __init__(self, stores: Sequence[Path | str], remote: RemoteOptions | None = None) -> None:
        """Open the stores' newest generations, so that one that cannot be opened fails early. `remote`: see `Store.open`."""
        self._stores = ServedStores(stores, remote)
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self._clients: dict[threading.Thread, Client] = {}
        self._strangers: dict[Client, None] = {}  # that have not proved that they have the token; the oldest first
        self._known: set[Client] = set()  # that may request
        self._counts: dict[type[Client], ClientCounts] = {RingClient: ClientCounts(), FrameClient: ClientCounts()}
        self._security: Security | None = None  # of the clients over TCP, if the service listens
        self._begun = time.monotonic()

    def take_in(self, sock: socket.socket) -> None:
        """Answer a client on this machine, in a thread of its own."""
        self._take_in(RingClient(sock))

    @contextmanager
    def listening(self, address: str, security: Security) -> Iterator[socket.socket]:
        """Listen for clients on other machines until the block ends; what is accepted goes to `take_in_far`."""
        host, port = address_of(address)
        expect_token(address, has_token=security.token is not None)
        self._security, self._context = security, security.context()
        try:
            sock = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        except OSError as error:
            raise UsageError(f"cannot listen at {address}: {error.strerror or error}") from error
        with sock:
            threading.Thread(target=self._show_life, name="bucketline-service-life", daemon=True).start()
            yield sock

    def take_in_far(self, sock: socket.socket) -> None:
        """Answer a client on another machine, in a thread of its own."""
        assert self._security is not None
        with suppress(OSError):  # one that has left
            host, port, *_ = sock.getpeername()
            self._take_in(FrameClient(sock, f"{host}:{port}", self._security.token, self._context))

    def _take_in(self, client: Client) -> None:
        thread = threading.Thread(target=self._answer, args=(client,), name="bucketline-client", daemon=True)
        with self._lock:
            self._make_room_for(client)
            try:
                if not self._stopped.is_set():
                    thread.start()
                    self._clients[thread], self._strangers[client] = client, None
                    return
                why = "the service was stopped"
            except RuntimeError as error:
                why = f"the service has no thread for another client: {error}"
        self._turn_away(client, why)
        client.close()

    def _make_room_for(self, stranger: Client) -> None:
        """If strangers have all their slots, end the oldest connection of the host that has most. Call under the lock."""
        others = [one for one in self._strangers if type(one) is type(stranger)]
        if len(others) >= stranger.max_strangers:
            num_of = Counter(one.host for one in others)
            found = max(others, key=lambda one: num_of[one.host])  # the first of these
            del self._strangers[found]
            found.shut()

    def _take_up(self, client: Client) -> bool:
        """Let a client that has proved that it has the token have a slot of its kind; return False if none is free."""
        with self._lock:
            self._strangers.pop(client, None)
            if sum(type(one) is type(client) for one in self._known) >= client.max_clients:
                return False
            self._known.add(client)
            return True

    def _turn_away(self, client: Client, why: str) -> None:
        self._counts[type(client)].refuse()
        if isinstance(client, RingClient):  # another machine's tries the next server
            client.refuse(DeliveryError(why))

    def _show_life(self) -> None:
        """Let clients over TCP know that the service is there, every few seconds."""
        while not self._stopped.wait(wire.ALIVE_EVERY_S):
            with self._lock:
                clients = list(self._clients.values())
            for client in clients:
                if isinstance(client, FrameClient):
                    client.show_life()

    def stop(self) -> None:
        """End every client's iteration with an error that says so, and join every thread."""
        self._stopped.set()
        with self._lock:
            clients = dict(self._clients)
        for client in clients.values():
            client.stop(_STOPPED)
        until = time.monotonic() + END_S
        for thread in clients:
            thread.join(max(0.0, until - time.monotonic()))
        for thread, client in clients.items():
            client.shut()  # it does not read, or has the end
            thread.join()

    def stats(self) -> dict[str, Any]:
        """Return what was delivered to each client, and to all clients since the service started.

        `network` has the same of clients on other machines, which are counted there only; None if the service does not listen.
        """
        return {
            "pid": os.getpid(),
            "seconds": time.monotonic() - self._begun,
            "stores": self._stores.places,
            **self._counts[RingClient].as_json(),
            "network": None if self._security is None else self._counts[FrameClient].as_json(),
            "fetched": self._stores.fetched(),
        }

    def let_go(self) -> None:
        """Unmap superseded generations that no client reads."""
        self._stores.let_go()

    def _answer(self, client: Client) -> None:
        try:
            with ExitStack() as using, closing(client):
                try:
                    request = client.request()
                    if not self._take_up(client):
                        self._turn_away(client, f"the service has {client.max_clients} clients, its maximum")
                        return
                    who = self._granted(client, parse_request(request), using)
                except Exception as error:  # noqa: BLE001 - whatever a client sends, it gets the error, and the service continues
                    self._counts[type(client)].refuse()
                    client.refuse(error)
                    return
                if who is None:
                    return
                if self._stopped.is_set():
                    client.stop(_STOPPED)
                with self._counts[type(client)].client(who, client.stats):
                    client.run()
        finally:
            self.let_go()
            with self._lock:
                del self._clients[threading.current_thread()]
                self._strangers.pop(client, None)
                self._known.discard(client)

    def _granted(self, client: Client, wanted: AnyRequest, using: ExitStack) -> dict[str, Any] | None:
        """Answer a client's request; return who it is, if it requested batches, which `using` keeps open."""
        if isinstance(wanted, Request):
            return self._begun_for(client, wanted, using)
        client.answer(asdict(self._told(wanted, using)))
        return None

    def _told(
        self, wanted: StatsRequest | StoresRequest | NamesRequest, using: ExitStack
    ) -> StatsResponse | StoresResponse | NamesResponse:
        """Return the answer to what is not a request for batches."""
        if isinstance(wanted, StatsRequest):
            return StatsResponse(stats=self.stats())
        if isinstance(wanted, StoresRequest):
            return StoresResponse(stores=tuple(map(_as_served, self._stores.at(wanted.wanted))))
        rows = self._stores.open(wanted.stores, plain_reads=True, using=using).store
        return NamesResponse(names=tuple(rows.ids_of([bytes.fromhex(one) for one in wanted.digests])))

    def _begun_for(self, client: Client, wanted: Request, using: ExitStack) -> dict[str, Any]:
        """Open what a client requests, and let it begin; return who it is."""
        if not 0 <= wanted.rank < wanted.world_size:
            raise DeliveryError(f"rank is {wanted.rank} of {wanted.world_size} ranks")
        config = client.permitted(sent(wanted.config))
        opened = self._stores.open(wanted.stores, plain_reads=config.plain_reads, using=using)
        plan = plan_of(opened.store, config, wanted.world_size)
        if plan.digest != wanted.plan:
            raise DeliveryError(
                f"the client's plan has the digest {wanted.plan}, the service's {plan.digest}; use one version of bucketline"
            )
        builder = BatchBuilder(opened.store, plan, config, wanted.rank, wanted.world_size, gather=opened.gather)
        reserve_ring(builder, opened.store, plan, wanted.rank, wanted.world_size)
        stores = tuple(str(share.store.place) for share in opened.shares)
        return {**client.begin(builder, wanted), "rank": wanted.rank, "world_size": wanted.world_size, "stores": stores}


def _as_served(share: WeightedStore) -> ServedManifest:
    manifest = dump_manifest(share.store.manifest).decode()
    return ServedManifest(place=str(share.store.place), repeats=share.repeats, manifest=manifest)
