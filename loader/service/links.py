"""How a client reaches a service: by a unix socket, as its own child process, or one of several servers over TCP."""

from __future__ import annotations

import json
import random
import socket
import ssl
import subprocess
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from bucketline.errors import DeliveryError, UsageError
from bucketline.forks import OwnerProcess
from bucketline.loader.service.sockets import connected, end_when_peer_is_lost, limit_silence
from bucketline.loader.service.tokens import read_token
from bucketline.loader.service.wire import LostError, ask, failure_of, message_of, receive
from bucketline.store.remote.arguments import RemoteArguments

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from bucketline.loader.service.address import ServiceAddress
    from bucketline.loader.service.wire import AnyRequest, ServiceAnswer

START_S = 120.0  # for a private service
STOP_S = 1.0  # grace period before one that does not end is killed
SILENCE_S = 10.0  # a server over TCP that sends not even a sign of life for so long is lost
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.1, 2.0  # before all servers are tried again


class Link(ABC):
    """A way to a service."""

    silence_s = 600.0  # time limit for a service to open a store and plan

    @abstractmethod
    def ask(self, message: Mapping[str, Any]) -> ServiceAnswer:
        """Connect and send a message."""

    def told(self, request: AnyRequest) -> ServiceAnswer:
        """Return the answer to what is not a request for batches; the connection is closed."""
        answer = self.ask(message_of(request))
        answer.close()
        return answer

    def close(self) -> None:  # noqa: B027 - most have nothing to end
        """End a private service."""


class UnixLink(Link):
    """A service at a socket of this machine."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def ask(self, message: Mapping[str, Any]) -> ServiceAnswer:
        return ask(connected(self._path), f"the service at {self._path}", message, silence_s=self.silence_s)


class ChildLink(Link):
    """A private service: a process without a socket's path, started when it is needed, that always ends with this one.

    The two share a channel, through which each connection's other end is sent. It closes when this process is gone.
    """

    _process: subprocess.Popen[bytes]
    _owner: OwnerProcess

    def __init__(self, stores: Sequence[str], remote: RemoteArguments) -> None:
        """Start nothing. Credentials reach the process by its environment."""
        options = {field.name: getattr(remote, field.name) for field in fields(RemoteArguments)}
        self._arguments = [json.dumps(options), *stores]
        self._stop: weakref.finalize[..., ChildLink] | None = None

    def ask(self, message: Mapping[str, Any]) -> ServiceAnswer:
        self.start()
        try:
            return self._ask(message)
        except DeliveryError:
            if not self._has_ended():
                raise
        self.start()
        return self._ask(message)

    def start(self) -> None:
        """Start the process, unless this process has one that lives, and wait until it has opened the stores."""
        if self._stop is not None and self._stop.alive and self._owner.is_current and self._process.poll() is None:
            return
        self.close()
        self._owner = OwnerProcess()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "bucketline.loader.service.child_process",
                    str(theirs.fileno()),
                    *self._arguments,
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self._name = f"the private service (process {self._process.pid})"
        self._stop = weakref.finalize(self, _stop, self._channel, self._process, self._owner)
        try:
            answer = receive(self._channel, START_S)
        except DeliveryError as error:
            self.close()
            raise DeliveryError(f"the private service did not start: {error}") from error
        if "error" in answer:
            self.close()
            raise failure_of(answer)

    def _ask(self, message: Mapping[str, Any]) -> ServiceAnswer:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            try:
                socket.send_fds(self._channel, [b"c"], [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise DeliveryError(f"{self._name} has ended: {error.strerror}") from error
        return ask(ours, self._name, message, silence_s=self.silence_s)

    def _has_ended(self) -> bool:
        """Return True if the process has ended or ends within `STOP_S`: the system takes a moment to end a killed one."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
            return True
        return False

    def close(self) -> None:
        if self._stop is not None:
            self._stop()


def _stop(channel: socket.socket, process: subprocess.Popen[bytes], owner: OwnerProcess) -> None:
    channel.close()
    if not owner.is_current:  # a forked process: the private service belongs to its parent
        process.returncode = 0
        return
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class Servers(Link):
    """Servers over TCP, of the same stores: the first that answers is used until it fails."""

    def __init__(self, address: ServiceAddress) -> None:
        """Read the token and the certificates."""
        self.addresses, self.deadline_s, self.silence_s = address.servers, address.deadline_s, SILENCE_S
        self.first = 0  # the one that worked last
        self.token = None if address.token is None else read_token(address.token)
        self.context: ssl.SSLContext | None = None
        if address.certificate is not None:
            try:
                self.context = ssl.create_default_context(cafile=address.certificate)
            except OSError as error:
                raise UsageError(f"the certificates {address.certificate} cannot be used: {error}") from error

    def ask(self, message: Mapping[str, Any]) -> ServiceAnswer:
        search = Search(self, threading.Event())
        while True:
            try:
                return search.ask(message)
            except (OSError, LostError) as error:
                search.turn(error)


class Search:
    """The search for a server that works: each in turn, and all again after a pause, until the deadline."""

    def __init__(self, servers: Servers, over: threading.Event) -> None:
        """Begin with the server that worked last. `over`: set when nobody waits any more."""
        self._servers, self._over = servers, over
        self.until = time.monotonic() + servers.deadline_s
        self._num_failures, self._pause_s = 0, min(_FIRST_PAUSE_S, servers.deadline_s / 2)

    def ask(self, message: Mapping[str, Any]) -> ServiceAnswer:
        """Ask the server whose turn it is."""
        servers = self._servers
        host, port = servers.addresses[servers.first]
        sock = socket.create_connection((host, port), timeout=min(max(0.1, self.until - time.monotonic()), servers.silence_s))
        try:
            end_when_peer_is_lost(sock)
            if servers.context is not None:
                sock = servers.context.wrap_socket(sock, server_hostname=host)
            answer = ask(sock, f"{host}:{port}", message, servers.token, silence_s=servers.silence_s, over=self._over)
            limit_silence(sock, servers.silence_s)
        except BaseException as error:
            sock.close()
            if isinstance(error, ssl.SSLCertVerificationError):
                raise DeliveryError(
                    f"the certificate of {host} is not trusted: {error.verify_message}; name the file that it is in"
                ) from error
            if isinstance(error, ssl.SSLError):
                raise LostError(f"TLS fails: {error.reason or error}; does the server have --certificate?") from error
            if isinstance(error, LostError) and servers.context is None:
                raise LostError(f"{error}; if the server has --certificate, name its file") from error
            raise
        return answer

    def turn(self, error: Exception) -> None:
        """Turn to the next server, since the present one has failed; pause once each has."""
        servers, names = self._servers, [f"{host}:{port}" for host, port in self._servers.addresses]
        failed, servers.first = names[servers.first], (servers.first + 1) % len(names)
        self._num_failures += 1
        if self._num_failures % len(names):
            return
        if self._over.is_set() or time.monotonic() + self._pause_s > self.until:
            raise DeliveryError(
                f"no server of batches can be reached at {', '.join(names)} within {servers.deadline_s:g} s; the last failure: "
                f"{failed}: {getattr(error, 'strerror', None) or error}; start one (loader serve STORE --at tcp://HOST:PORT), "
                "and iterate again: it continues at the same batch"
            ) from error
        self._over.wait(self._pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - so that ranks do not come all at once
        self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)


def link_to(address: ServiceAddress, stores: Sequence[str] = (), remote: RemoteArguments | None = None) -> Link:
    """Return the way to a service; a private one reads `stores` of this machine."""
    if address.servers:
        return Servers(address)
    if address.path is not None:
        return UnixLink(address.path)
    if not stores or remote is None:
        raise UsageError("stores is None with service auto, a process that reads the stores of this machine; name them")
    return ChildLink(stores, remote)
