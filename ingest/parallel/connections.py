"""TCP connections between rank 0 and every other rank. When a process ends for any reason, its connection ends with it.

Rank 0 accepts only peers that know the run's secret, which they get from the launcher's store. Messages are JSON of
bounded length.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from bucketline.errors import RankError
from bucketline.ingest.parallel.handshake import GREETING_BYTES, Reception

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

COME_WITHIN_S = 300.0  # ranks start together; importing torch is the most that one may lag behind
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}  # a dead machine is noticed within 30 s
MAX_RANK_MESSAGE_BYTES = 1 << 30  # a manifest has at most 256 MiB; a rank's summary lists its rejects
_LOOPBACK = "127.0.0.1"
_KEY = "bucketline.ingest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A connection to another rank."""

    rank: int
    process: str  # its name in messages
    connection: Connection[Any, Any]

    def fileno(self) -> int:
        """Return the file descriptor, for `multiprocessing.connection.wait`."""
        return self.connection.fileno()

    def send(self, message: bytes) -> None:
        """Send a message.

        Raises:
            OSError: if the other rank is gone.
            ValueError: if the message is too long.
        """
        if len(message) > MAX_RANK_MESSAGE_BYTES:
            raise ValueError(
                f"a message to rank {self.rank} has {len(message)} bytes, at most {MAX_RANK_MESSAGE_BYTES} are allowed"
            )
        self.connection.send_bytes(message)

    def receive(self) -> bytes:
        """Wait for a message.

        Raises:
            OSError, EOFError: if the other rank is gone, or announces a message that is too long.
        """
        return self.connection.recv_bytes(MAX_RANK_MESSAGE_BYTES)


def connect_ranks(rank: int, world_size: int, *, is_one_machine: bool) -> dict[int, Link]:
    """Connect rank 0 with every other rank, through the launcher's rendezvous (`MASTER_ADDR`, `MASTER_PORT`).

    Return the connections by rank: to all others on rank 0, to rank 0 on the others. If all ranks are on one machine, no
    other machine can reach the port.

    Raises:
        RankError: if a rank does not connect.
    """
    from torch.distributed.rendezvous import rendezvous

    timeout = timedelta(seconds=COME_WITHIN_S)
    try:
        store, _, _ = next(iter(rendezvous("env://", rank, world_size, timeout=timeout)))
        if rank == 0:
            return _accepted(store, world_size, _listening(_host_of(store), is_one_machine=is_one_machine))
        return {0: _connected(store, rank)}
    except (RuntimeError, OSError, EOFError) as error:
        raise RankError(
            f"rank {rank} of {world_size} cannot reach the others: {str(error).splitlines()[0]}; "
            "start all ranks together, with torchrun or with MASTER_ADDR and MASTER_PORT of rank 0's machine"
        ) from error


def _accepted(store: Store, world_size: int, server: socket.socket) -> dict[int, Link]:
    secret = secrets.token_hex()
    with server:
        address, port = server.getsockname()[:2]
        offer = {
            "address": address if ip_address(address).is_loopback else None,
            "port": port,
            "secret": secret,
            "process": _this_process(),
        }
        store.set(_KEY, json.dumps(offer))
        came = Reception(server, secret, set(range(1, world_size))).wait(COME_WITHIN_S)
    return {
        rank: Link(rank=rank, process=process, connection=_connection(peer)) for rank, (peer, process) in sorted(came.items())
    }


def _connected(store: Store, rank: int) -> Link:
    offer = json.loads(store.get(_KEY))
    peer = socket.create_connection((offer["address"] or _host_of(store), offer["port"]), timeout=COME_WITHIN_S)
    greeting = json.dumps({"secret": offer["secret"], "rank": rank, "process": _this_process()}).encode() + b"\n"
    assert len(greeting) <= GREETING_BYTES, len(greeting)
    peer.sendall(greeting)
    return Link(rank=0, process=offer["process"], connection=_connection(peer))


def _host_of(store: Store) -> str:
    """Return the MASTER_ADDR of the rendezvous."""
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    while isinstance(store, PrefixStore):
        store = store.underlying_store
    assert isinstance(store, TCPStore)  # what env:// returns
    return str(store.host)


def _listening(master: str, *, is_one_machine: bool) -> socket.socket:
    """Open the listening socket: on the loopback if all ranks are on one machine, else at MASTER_ADDR."""
    if is_one_machine or _is_loopback(master):
        return socket.create_server((_LOOPBACK, 0))
    try:  # a machine often resolves its own name to the loopback, which the other machines cannot reach
        family, _, _, _, address = socket.getaddrinfo(master, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        if not ip_address(str(address[0])).is_loopback:
            return socket.create_server(address, family=family)
    except (OSError, ValueError):
        pass  # not an address of this machine, such as behind NAT
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _connection(peer: socket.socket) -> Connection[Any, Any]:
    peer.settimeout(None)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return Connection(peer.detach())


def _this_process() -> str:
    return f"pid {os.getpid()} on {socket.gethostname()}"
