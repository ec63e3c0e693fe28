"""The service: opened stores that all clients share, and a session for each client."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from bucketline.errors import BucketlineError, DeliveryError, StoreError
from bucketline.loader.delivery import Beginning, depth_of
from bucketline.loader.filler import Filler
from bucketline.loader.gather import Gather
from bucketline.loader.plan import plan_of
from bucketline.loader.service.protocol import Granted, failure_as_json, receive, send, wanted_of
from bucketline.loader.service.session import Session
from bucketline.loader.stores import StoreShare, join
from bucketline.store import Store

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from bucketline.loader.service.protocol import StoreOf, Wanted
    from bucketline.store.reader import OpenShards

REQUEST_S = 10.0  # that a client may take to say what it wants
MAX_CLIENTS = 1024
ENDED = "the service was stopped; start it again, and iterate again: the next iteration goes on at the same batch"
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Open:
    """Stores that are open, joined as a client reads them, and the map of them."""

    shares: tuple[StoreShare, ...]
    store: OpenShards
    gather: Gather


class Service:
    """Reads stores for any number of clients. `take_in` hands it a client's connection."""

    def __init__(self, stores: Sequence[Path | str]) -> None:
        """Open the stores' newest generations, so that one that cannot be opened is known at once.

        Raises:
            StoreError: where one cannot be opened.
        """
        self._paths = {store.manifest.store_id: store.path for store in map(Store.open, stores)}
        self._opened: dict[tuple[object, ...], _Open] = {}
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._connections: set[socket.socket] = set()
        self._sessions: list[Session] = []
        self._past = {"clients": 0, "batches": 0, "samples": 0, "bytes": 0}  # of those that are gone
        self._begun = time.monotonic()
        self._is_stopped = False

    def take_in(self, sock: socket.socket) -> None:
        """Answer a client, in a thread of its own."""
        thread = threading.Thread(target=self._answer, args=(sock,), name="bucketline-client", daemon=True)
        with self._lock:
            is_full = len(self._threads) >= MAX_CLIENTS
            if not is_full:
                self._threads.add(thread)
                self._connections.add(sock)
        if is_full:
            _refuse(sock, DeliveryError(f"the service has {MAX_CLIENTS} clients, as many as it takes"))
            sock.close()
            return
        thread.start()

    def stop(self) -> None:
        """End every client's iteration, with an error that says so, and every thread."""
        with self._lock:
            self._is_stopped = True
            sessions, threads, connections = list(self._sessions), list(self._threads), list(self._connections)
        for session in sessions:
            session.stop(ENDED)
        for sock in connections:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()

    def stats(self) -> dict[str, Any]:
        """Count what was delivered, to each client and to all since the service began."""
        with self._lock:
            clients, past = [session.stats() for session in self._sessions], dict(self._past)
        total = {
            name: past[name] + sum(getattr(client, name) for client in clients) for name in ("batches", "samples", "bytes")
        }
        return {
            "pid": os.getpid(),
            "seconds": time.monotonic() - self._begun,
            "stores": [str(path) for path in self._paths.values()],
            "clients_so_far": past["clients"] + len(clients),
            **total,
            "clients": [asdict(client) for client in clients],
        }

    def _answer(self, sock: socket.socket) -> None:
        try:
            with sock:
                try:
                    _refuse_others(sock)
                    message, _ = receive(sock, REQUEST_S)
                    if message.get("ask") == "stats":
                        send(sock, {"stats": self.stats()})
                        return
                    session = self._grant(sock, wanted_of(message))
                except Exception as error:  # noqa: BLE001 - whatever a client says, it is told, and the service goes on
                    _refuse(sock, error)
                    return
                self._serve(session)
        finally:
            with self._lock:
                self._connections.discard(sock)
                self._threads.discard(threading.current_thread())

    def _grant(self, sock: socket.socket, wanted: Wanted) -> Session:
        """Make ready what a client asks for, and tell it so."""
        if not wanted.stores or wanted.world_size < 1:
            raise DeliveryError(
                f"{len(wanted.stores)} stores on {wanted.world_size} ranks were asked for, expected 1 or more on 1 or more"
            )
        store = self._open(wanted.stores, plain_reads=wanted.config.plain_reads)
        plan = plan_of(store.store, wanted.config, wanted.world_size)
        if plan.digest != wanted.plan:
            raise DeliveryError(
                f"the client's plan has the digest {wanted.plan}, the service's {plan.digest}; use one version of bucketline"
            )
        if not 0 <= wanted.rank < wanted.world_size:
            raise DeliveryError(f"rank is {wanted.rank} of {wanted.world_size} ranks")
        filler = Filler(store.store, plan, wanted.config, wanted.rank, wanted.world_size, gather=store.gather)
        beginning = Beginning(
            step=wanted.step,
            micro_step=wanted.micro_step,
            num_steps=wanted.num_steps,
            accumulation=wanted.config.accumulation,
        )
        depth = depth_of(wanted.config, filler.slab_bytes)
        session = Session(sock, wanted, filler, depth=depth, beginning=beginning)
        send(sock, asdict(Granted(slab_bytes=filler.slab_bytes, depth=depth)), session.fd)
        return session

    def _serve(self, session: Session) -> None:
        with self._lock:
            is_stopped = self._is_stopped
            if not is_stopped:
                self._sessions.append(session)
        if is_stopped:
            session.stop(ENDED)
            return
        try:
            session.run()
        finally:
            with self._lock:
                self._sessions.remove(session)
                done = session.stats()
                self._past["clients"] += 1
                for name in ("batches", "samples", "bytes"):
                    self._past[name] += getattr(done, name)

    def _open(self, wanted: Sequence[StoreOf], *, plain_reads: bool) -> _Open:
        """Give the generations of the stores that a client reads, opened once for all clients that read the same."""
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
                    StoreShare(store=Store.open(self._paths[one.store_id], one.generation), repeats=one.repeats)
                    for one in wanted
                )
                store = join(shares)
                self._opened[key] = _Open(shares=shares, store=store, gather=Gather(store, plain_reads=plain_reads))
            found = self._opened[key]
        for one, share in zip(wanted, found.shares, strict=True):
            if share.store.manifest.digest != one.digest:
                raise StoreError(
                    f"generation {one.generation} of {share.store.path} has the digest {share.store.manifest.digest}, the "
                    f"client's of {one.path} has {one.digest}; they are two stores: give both the same"
                )
        return found


def _refuse_others(sock: socket.socket) -> None:
    """Refuse the processes of other users.

    Raises:
        DeliveryError: where the client is not of this process's user.
    """
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(credentials)
    if uid != os.geteuid():
        raise DeliveryError(f"the service belongs to user {os.geteuid()}, you are user {uid}; start one of your own")


def _refuse(sock: socket.socket, error: Exception) -> None:
    with suppress(OSError, BucketlineError):
        send(sock, failure_as_json(error))
