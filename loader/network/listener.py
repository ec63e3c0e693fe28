"""The server: batches for clients on other machines, each read by threads of its own."""

from __future__ import annotations

import socket
import ssl
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from bucketline.command_line import printable
from bucketline.errors import BucketlineError, DeliveryError, UsageError
from bucketline.loader.loader import Loader
from bucketline.loader.network.addresses import address_of, is_loopback
from bucketline.loader.network.served_stores import ServedStores
from bucketline.loader.network.tokens import is_proof, new_nonce
from bucketline.loader.network.wire import (
    ALIVE,
    ALIVE_EVERY_S,
    MAX_BATCH_BYTES,
    NETWORK_PROTOCOL,
    FrameWriter,
    RemoteRequest,
    RemoteResponse,
    allowed,
    end_when_peer_is_lost,
)
from bucketline.loader.service.protocol import failure_as_json, receive, send
from bucketline.loader.state import parse_state
from bucketline.loader.stats import ClientCounts, Stats
from bucketline.typed_json import TypedJsonError, decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from bucketline.loader.prefetch.threads import ThreadStream
    from bucketline.store.remote.urls import RemoteOptions

REQUEST_S = 10.0  # time limit for a client's handshake, proof and request
MAX_CLIENTS = 256
END_S = 1.0  # for all clients to read the end of their iterations
_ENDED = "the server was stopped; iterate again, or name another server: the iteration continues at the same batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """The token and the certificate of a server."""

    token: bytes | None = None
    certificate: Path | None = None  # with TLS: its chain, PEM
    key: Path | None = None  # PEM; None: in the certificate's file

    def context(self) -> ssl.SSLContext | None:
        """Return the server's TLS context; None without TLS.

        Raises:
            UsageError: if the certificate or key cannot be used.
        """
        if self.certificate is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.certificate, self.key)
        except OSError as error:  # ssl's errors are
            raise UsageError(f"the certificate {self.certificate} cannot be used: {error}") from error
        return context


@contextmanager
def listening(
    address: str, stores: Sequence[Path | str], security: Security, remote: RemoteOptions | None = None
) -> Iterator[Listener]:
    """Serve stores at an address until the block ends.

    Raises:
        UsageError: if nothing can listen there, or others than this machine could connect without a token.
        StoreError: if a store cannot be opened.
    """
    host, port = address_of(address)
    if security.token is None and not is_loopback(host):
        raise UsageError(
            f"--listen {address} can be reached from other machines; give --token-file FILE, which clients must have as well"
        )
    context = security.context()
    opened = ServedStores(stores, remote)
    try:
        sock = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise UsageError(f"cannot listen at {address}: {error.strerror or error}") from error
    listener = Listener(sock, opened, security.token, context)
    try:
        yield listener
    finally:
        listener.stop()


class _Connection:
    """A client's socket, and whose turn it is to send."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self.sock, self.sending = sock, threading.Lock()
        self.peer = peer
        self.stream: ThreadStream | None = None
        self.is_over = False
        self._show: Callable[[], None] | None = None  # sends a sign of life, in the form that the client expects now
        self._ends_at: float | None = time.monotonic() + REQUEST_S  # until it has proved who it is

    def admit(self) -> None:
        """Let the connection last: the client has the token, and waits for an answer."""
        self._ends_at, self._show = None, lambda: send(self.sock, ALIVE)

    def answer(self, message: Mapping[str, object], writer: FrameWriter | None) -> None:
        """Send the answer; frames of `writer` follow, or the end."""
        with self.sending:
            send(self.sock, message)
            self._show = None if writer is None else writer.alive

    def show_life(self) -> None:
        """Send a sign of life, unless a batch is being sent; end the iteration of a client that has gone."""
        if self._ends_at is not None and time.monotonic() > self._ends_at:
            self.shut()
        if not self.sending.acquire(blocking=False):
            return
        try:
            if self._show is not None and not self.is_over:
                self._show()
        except OSError:
            self.is_over = True
            self.release()
        finally:
            self.sending.release()

    def release(self) -> bool:
        """Let the batches end; return False if there are none yet, or no more."""
        stream = self.stream
        if stream is not None:
            stream.release()
        return stream is not None

    def shut(self) -> None:
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)


class Listener:
    """Answers clients at an address, each in a thread of its own."""

    def __init__(self, sock: socket.socket, stores: ServedStores, token: bytes | None, context: ssl.SSLContext | None) -> None:
        self._sock, self._stores, self._token, self._context = sock, stores, token, context
        self.port: int = sock.getsockname()[1]
        self.clients = ClientCounts()
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self._connections: dict[threading.Thread, _Connection] = {}
        self._threads = [
            threading.Thread(target=run, name=f"bucketline-server{run.__name__}", daemon=True)
            for run in (self._accept, self._show_life)
        ]
        for thread in self._threads:
            thread.start()

    def _accept(self) -> None:
        while not self._stopped.is_set():
            try:
                sock, peer = self._sock.accept()
            except OSError:  # the client has left, no descriptor is free, or this is the end
                self._stopped.wait(0.05)
                continue
            connection = _Connection(sock, f"{peer[0]}:{peer[1]}")
            thread = threading.Thread(target=self._answer, args=(connection,), name="bucketline-server-client", daemon=True)
            with self._lock:
                is_full = len(self._connections) >= MAX_CLIENTS or self._stopped.is_set()
                if not is_full:
                    self._connections[thread] = connection
                    thread.start()
            if is_full:
                self.clients.refuse()
                sock.close()

    def _show_life(self) -> None:
        while not self._stopped.wait(ALIVE_EVERY_S):
            self._show_life_to_all()
            self._stores.let_go()

    def _show_life_to_all(self) -> None:
        with self._lock:
            connections = list(self._connections.values())
        for connection in connections:
            connection.show_life()

    def _answer(self, connection: _Connection) -> None:
        try:
            self._handshake(connection)
        except Exception as error:  # noqa: BLE001 - whatever a client sends, the server continues
            if not isinstance(error, OSError | BucketlineError):
                print(printable(f"a client's connection failed: {type(error).__name__}: {error}"), file=sys.stderr, flush=True)
        finally:
            connection.sock.close()
            connection.stream = None  # `_accept` knows the last connection until the next one comes
            with self._lock:
                del self._connections[threading.current_thread()]

    def _handshake(self, connection: _Connection) -> None:
        """Let a client prove who it is, then serve it. Only one that has proved it is told anything."""
        end_when_peer_is_lost(connection.sock)
        connection.sock.settimeout(REQUEST_S)
        if self._context is not None:
            connection.sock = self._context.wrap_socket(connection.sock, server_side=True)
        sock, nonce, begun = connection.sock, new_nonce(), time.monotonic()
        send(sock, {"bucketline": NETWORK_PROTOCOL, "nonce": nonce})
        message, _ = receive(sock, max(0.1, REQUEST_S - (time.monotonic() - begun)))
        if not is_proof(message.pop("proof", None), self._token, nonce):
            self.clients.refuse()
            send(sock, failure_as_json(DeliveryError("the token is not the server's; use the same token file on both sides")))
            return
        sock.settimeout(None)
        connection.admit()
        try:
            loader, wanted = self._granted(message)
        except Exception as error:  # noqa: BLE001 - told to the client
            self.clients.refuse()
            connection.answer(failure_as_json(error), None)
            return
        with loader:
            self._serve(connection, loader, wanted)

    def _granted(self, message: dict[str, object]) -> tuple[Loader, RemoteRequest]:
        """Return a loader in the state that a client requests."""
        if (version := message.get("protocol")) != NETWORK_PROTOCOL:
            raise DeliveryError(
                f"the client uses version {version!r} of the protocol, the server {NETWORK_PROTOCOL}; use the same bucketline"
            )
        try:
            wanted = decode(RemoteRequest, message, "the client's request")
        except TypedJsonError as error:
            raise DeliveryError(str(error)) from error
        generations = () if wanted.state is None else parse_state(wanted.state).generations
        loader = Loader(
            list(self._stores.at(generations)), allowed(wanted.config), rank=wanted.rank, world_size=wanted.world_size
        )
        if loader.buffer_bytes > MAX_BATCH_BYTES:
            raise DeliveryError(
                f"a batch has up to {loader.buffer_bytes} bytes, the server allows {MAX_BATCH_BYTES}; use smaller batches"
            )
        if wanted.state is not None:
            loader.load_state_dict(wanted.state)
        return loader, wanted

    def _serve(self, connection: _Connection, loader: Loader, wanted: RemoteRequest) -> None:
        """Send the answer and batches, until all are sent, the client leaves, or the server stops."""
        state = encode(loader.state_dict())
        assert isinstance(state, dict)
        answer = RemoteResponse(
            state=state,
            sizes=loader.plan.epoch_steps.sizes,
            latent_kind=loader.latent_kind.value,
            buffer_bytes=loader.buffer_bytes,
            stores=tuple(one.store.where for one in loader.shares),
        )
        if not wanted.is_streamed:
            connection.answer(asdict(answer), None)
            return
        writer = FrameWriter(connection.sock)
        connection.answer(asdict(answer), writer)
        stream = connection.stream = loader.stream()
        who = {"address": connection.peer, "rank": wanted.rank, "world_size": wanted.world_size, "stores": answer.stores}
        asked = time.perf_counter()
        counts = Stats(begun=asked)
        failure: BaseException | None = None

        def stats() -> Stats:
            stream.note_queue(counts)
            return counts.until_now()

        with self.clients.client(who, stats):
            try:
                while (delivered := stream.next()) is not None and not connection.is_over:
                    counts.waited_s += time.perf_counter() - asked
                    with connection.sending:
                        writer.batch(*delivered)
                    counts.count(delivered[0])
                    del delivered
                    asked = time.perf_counter()
            except OSError:
                return  # the client has left
            except BucketlineError as error:
                failure = error
                counts.errors += 1
        if self._stopped.is_set():
            failure = failure or DeliveryError(_ENDED)
        with connection.sending, suppress(OSError):
            connection.is_over = True
            writer.end(None if failure is None else failure_as_json(failure))

    def stop(self) -> None:
        """End every client's iteration with an error that says so, and join every thread."""
        self._stopped.set()
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # ends `accept`, which `close` does not
        self._sock.close()
        with self._lock:
            connections = dict(self._connections)
        for connection in connections.values():
            if not connection.release():
                connection.shut()
        until = time.monotonic() + END_S
        for thread in connections:
            thread.join(max(0.0, until - time.monotonic()))
        for thread, connection in connections.items():
            connection.shut()  # its client does not read, or has the end
            thread.join()
        for thread in self._threads:
            thread.join()
