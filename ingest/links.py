"""Connections between rank 0 and every other rank: whichever process ends, and however, its connection ends with it."""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from time import monotonic
from typing import TYPE_CHECKING, Any

from bucketline.errors import RankError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

COME_WITHIN_S = 300.0  # ranks start together; importing torch is the most that one does before the others
GREETING_S = 60.0  # not ours, where it says nothing
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}  # a machine that is gone is noticed within 30 s
_KEY = "bucketline.ingest"
_SECRET_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A connection to another rank."""

    rank: int
    process: str  # who it is, for messages
    connection: Connection[Any, Any]

    def fileno(self) -> int:
        """Let `multiprocessing.connection.wait` wait for it."""
        return self.connection.fileno()


def connect(rank: int, world_size: int) -> dict[int, Link]:
    """Meet the others where the launcher says (`MASTER_ADDR`, `MASTER_PORT`), and connect rank 0 to every other rank.

    Gives the connections by rank: on rank 0 to all others, on these to rank 0.

    Raises:
        RankError: where a rank does not come.
    """
    from torch.distributed.rendezvous import rendezvous

    timeout = timedelta(seconds=COME_WITHIN_S)
    try:
        store, _, _ = next(iter(rendezvous("env://", rank, world_size, timeout=timeout)))
        if rank == 0:
            return _accepted(store, world_size)
        return {0: _connected(store, rank)}
    except (RuntimeError, OSError, EOFError) as error:
        raise RankError(
            f"rank {rank} of {world_size} does not reach the others: {str(error).splitlines()[0]}; "
            "start all ranks together, with torchrun or with MASTER_ADDR and MASTER_PORT of rank 0's machine"
        ) from error


def _accepted(store: Store, world_size: int) -> dict[int, Link]:
    secret = secrets.token_bytes(_SECRET_BYTES)
    links: dict[int, Link] = {}
    with _server() as server:
        offer = {"port": server.getsockname()[1], "secret": secret.hex(), "process": _this_process()}
        store.set(_KEY, json.dumps(offer))
        until = monotonic() + COME_WITHIN_S
        while missing := set(range(1, world_size)) - set(links):
            server.settimeout(max(until - monotonic(), 0.01))
            try:
                peer, _ = server.accept()
            except TimeoutError as error:
                raise TimeoutError(f"rank {min(missing)} has not come within {COME_WITHIN_S:.0f} s") from error
            if (link := _greeted(peer, secret)) is not None and link.rank in missing:
                links[link.rank] = link
    return links


def _connected(store: Store, rank: int) -> Link:
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    offer = json.loads(store.get(_KEY))
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    assert isinstance(store, TCPStore)  # what env:// gives
    peer = socket.create_connection((store.host, offer["port"]), timeout=COME_WITHIN_S)
    peer.settimeout(None)
    connection = _connection(peer)
    greeting = json.dumps({"rank": rank, "process": _this_process()})
    connection.send_bytes(bytes.fromhex(offer["secret"]) + greeting.encode())
    return Link(rank=0, process=offer["process"], connection=connection)


def _server() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _greeted(peer: socket.socket, secret: bytes) -> Link | None:
    """Hear who connects; None where it does not know the secret, before anything that it sends is unpickled."""
    connection = _connection(peer)
    try:
        if connection.poll(GREETING_S):
            greeting = connection.recv_bytes(1 << 16)
            if hmac.compare_digest(greeting[:_SECRET_BYTES], secret):
                who = json.loads(greeting[_SECRET_BYTES:])
                return Link(rank=who["rank"], process=who["process"], connection=connection)
    except (OSError, EOFError):
        pass
    connection.close()
    return None


def _connection(peer: socket.socket) -> Connection[Any, Any]:
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return Connection(peer.detach())


def _this_process() -> str:
    return f"pid {os.getpid()} on {socket.gethostname()}"
