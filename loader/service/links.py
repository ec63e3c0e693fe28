"""How a client reaches a service: by a unix socket, as its own child process, or one of several servers over TCP."""

from __future__ import annotations

import random
import socket
import ssl
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bucketline.errors import DeliveryError, UsageError
from bucketline.loader.service.child_process import ChildService
from bucketline.loader.service.sockets import connected, end_when_peer_is_lost, limit_silence
from bucketline.loader.service.tokens import read_token
from bucketline.loader.service.wire import MAX_BATCH_BYTES, LostError, Response, ask, close_all, parsed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from bucketline.loader.service.address import ServiceAddress
    from bucketline.store.remote.arguments import RemoteArguments

SILENCE_S = 10.0  # a server over TCP that sends not even a sign of life for so long is lost
FIRST_PAUSE_S, _MAX_PAUSE_S = 0.1, 2.0  # before all servers are tried again


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceAnswer:
    """A service's answer, and the connection that it came by."""

    sock: socket.socket
    name: str  # of the service, in messages
    message: dict[str, Any]
    fds: list[int]

    def response(self) -> Response:
        """Return the answer to a request for batches.

        Raises:
            DeliveryError: if it is none, or impossible.
        """
        found = parsed(Response, self.message, f"the answer of {self.name}")
        if not (0 < found.buffer_bytes <= MAX_BATCH_BYTES or self.fds) or found.depth < 1:
            raise DeliveryError(
                f"the answer of {self.name} is invalid: buffer_bytes is {found.buffer_bytes} and depth {found.depth}"
            )
        return found

    def close(self) -> None:
        """Close the connection, and the descriptors that came."""
        self.sock.close()
        close_all(self.fds)


class Link(ABC):
    """A way to a service."""

    silence_s = 600.0  # time limit for a service to open a store and plan

    @abstractmethod
    def ask(self, message: Mapping[str, Any]) -> ServiceAnswer:
        """Connect and send a message.

        Raises:
            DeliveryError: if no service can be reached.
            BucketlineError: if it refuses.
        """

    def close(self) -> None:  # noqa: B027 - most have nothing to end
        """End a private service."""

    def _asked(
        self,
        sock: socket.socket,
        name: str,
        message: Mapping[str, Any],
        token: bytes | None = None,
        over: threading.Event | None = None,
    ) -> ServiceAnswer:
        try:
            is_local = sock.family == socket.AF_UNIX
            answer, fds = ask(sock, name, message, token, self.silence_s, with_fd=is_local, over=over)
        except BaseException:
            sock.close()
            raise
        return ServiceAnswer(sock=sock, name=name, message=answer, fds=fds)


class UnixLink(Link):
    """A service at a socket of this machine."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def ask(self, message: Mapping[str, Any]) -> ServiceAnswer:
        return self._asked(connected(self._path), f"the service at {self._path}", message)


class ChildLink(Link):
    """A private service, which is started when it is needed and ends with this process."""

    def __init__(self, stores: Sequence[str], remote: RemoteArguments) -> None:
        self._stores, self._remote = stores, remote
        self._child: ChildService | None = None

    def ask(self, message: Mapping[str, Any]) -> ServiceAnswer:
        child = self._own()
        try:
            return self._asked(child.connect(), child.name, message)
        except DeliveryError:
            if not child.has_ended():
                raise
        child = self._own()  # the previous one was killed a moment ago
        return self._asked(child.connect(), child.name, message)

    def _own(self) -> ChildService:
        """Return this process's child; start one if there is none or it has died."""
        child = self._child
        if child is None or not child.owner.is_current or not child.is_alive():
            self.close()
            child = self._child = ChildService(self._stores, self._remote)
        return child

    def close(self) -> None:
        if self._child is not None:
            self._child.stop()
            self._child = None


class Servers(Link):
    """Servers over TCP, of the same stores: the first that answers is used until it fails."""

    def __init__(self, address: ServiceAddress) -> None:
        """Read the token and the certificates.

        Raises:
            UsageError: if a file cannot be used.
        """
        self._addresses = address.servers
        self._token = None if address.token is None else read_token(address.token)
        self.deadline_s = address.deadline_s
        self._context: ssl.SSLContext | None = None
        if address.certificate is not None:
            try:
                self._context = ssl.create_default_context(cafile=address.certificate)
            except OSError as error:
                raise UsageError(f"the certificates {address.certificate} cannot be used: {error}") from error
        self._first, self.count = 0, len(self._addresses)
        self.silence_s = SILENCE_S

    def ask(self, message: Mapping[str, Any]) -> ServiceAnswer:
        return self.asked_until(message, time.monotonic() + self.deadline_s, threading.Event())

    def lost(self) -> None:
        """Begin with the next server, since the present one has failed."""
        self._first = (self._first + 1) % self.count

    def asked_until(self, message: Mapping[str, Any], until: float, over: threading.Event) -> ServiceAnswer:
        """Return the answer of the first server that answers; try each in turn, and all again after a pause.

        Raises:
            DeliveryError: if none can be reached before `until` (of the monotonic clock).
            BucketlineError: if a server refuses: the others would as well.
        """
        pause, failure = FIRST_PAUSE_S, ""
        while True:
            for _ in self._addresses:
                host, port = self._addresses[self._first]
                try:
                    return self._ask((host, port), message, max(0.1, until - time.monotonic()), over)
                except (OSError, LostError) as error:
                    failure = f"{host}:{port}: {getattr(error, 'strerror', None) or error}"
                    self.lost()
            if over.is_set() or time.monotonic() + pause > until:
                names = ", ".join(f"{host}:{port}" for host, port in self._addresses)
                raise DeliveryError(
                    f"no server of batches can be reached at {names} within {self.deadline_s:g} s; the last failure: "
                    f"{failure}; start one (loader serve STORE --at tcp://HOST:PORT), and iterate again: it continues at "
                    "the same batch"
                )
            pause = paused(pause, over)

    def _ask(self, address: tuple[str, int], message: Mapping[str, Any], left: float, over: threading.Event) -> ServiceAnswer:
        sock = socket.create_connection(address, timeout=min(left, self.silence_s))
        try:
            end_when_peer_is_lost(sock)
            if self._context is not None:
                sock = self._context.wrap_socket(sock, server_hostname=address[0])
        except ssl.SSLError as error:
            sock.close()
            if isinstance(error, ssl.SSLCertVerificationError):
                raise DeliveryError(
                    f"the certificate of {address[0]} is not trusted: {error.verify_message}; name the file that it is in"
                ) from error
            raise LostError(f"TLS fails: {error.reason or error}; does the server have --certificate?") from error
        except BaseException:
            sock.close()
            raise
        try:
            answer = self._asked(sock, f"{address[0]}:{address[1]}", message, self._token, over)
        except LostError as error:
            hint = "; if the server has --certificate, name its file" if self._context is None else ""
            raise LostError(f"{error}{hint}") from error
        limit_silence(sock, self.silence_s)
        return answer


def paused(pause: float, over: threading.Event) -> float:
    """Wait, unless the iteration ends; return the next pause."""
    over.wait(pause * random.uniform(0.5, 1.0))  # noqa: S311 - so that ranks do not come all at once
    return min(2 * pause, _MAX_PAUSE_S)


def link_to(address: ServiceAddress, stores: Sequence[str] = (), remote: RemoteArguments | None = None) -> Link:
    """Return the way to a service; a private one reads `stores` of this machine.

    Raises:
        UsageError: if a private one has no store, or a file of the address cannot be used.
    """
    if address.servers:
        return Servers(address)
    if address.path is not None:
        return UnixLink(address.path)
    if not stores or remote is None:
        raise UsageError("stores is None with service auto, a process that reads the stores of this machine; name them")
    return ChildLink(stores, remote)
