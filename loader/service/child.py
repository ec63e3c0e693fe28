"""A service in a child process of the loader's own: how it is started, and the process itself.

The child inherits a socket that has no path, at which it listens, and a channel. The channel closes when the loader's process
is gone, and the child then ends.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import warnings
import weakref
from contextlib import suppress
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from bucketline.errors import BucketlineError, DeliveryError
from bucketline.forks import OwnerProcess
from bucketline.loader.service import wire
from bucketline.loader.service.sockets import accept_all, peer_of
from bucketline.store.remote.urls import RemoteArguments

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

START_S = 120.0  # for the child to open the stores
STOP_S = 1.0  # grace period before one that does not end is killed
_LOOK_S = 1.0


class ChildLink:
    """A client's way to a child process that serves, which is started when it is needed and always ends with this one."""

    _process: subprocess.Popen[bytes]
    _owner: OwnerProcess

    def __init__(self, stores: Sequence[str], remote: RemoteArguments) -> None:
        """Start nothing. Credentials reach the process by its environment."""
        options = {field.name: getattr(remote, field.name) for field in fields(RemoteArguments)}
        self._arguments = [json.dumps(options), *stores]
        self._stop: weakref.finalize[..., ChildLink] | None = None

    def ask(self, message: Mapping[str, Any]) -> wire.Answer:
        """Connect and send a message; start another process once if the present one has ended."""
        self.start()
        try:
            return self._ask(message)
        except DeliveryError:
            with suppress(subprocess.TimeoutExpired):  # the system takes a moment to end a killed process
                self._process.wait(STOP_S)
            if self._process.returncode is None:
                raise
        self.start()
        return self._ask(message)

    def start(self) -> None:
        """Start the process, unless this process has one that lives, and wait until it has opened the stores."""
        if self._stop is not None and self._stop.alive and self._owner.is_current and self._process.poll() is None:
            return
        self.close()
        self._owner = OwnerProcess()
        channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
            server.bind("")  # the system finds a name that no other socket has, and no file
            server.listen(128)
            self._address = server.getsockname()
            descriptors = [theirs.fileno(), server.fileno()]
            command = [sys.executable, "-P", "-m", "bucketline.loader.service.child", *map(str, descriptors), *self._arguments]
            null = subprocess.DEVNULL
            self._process = subprocess.Popen(command, pass_fds=descriptors, stdin=null, stdout=null)
        self._name = f"the service's child process ({self._process.pid})"
        self._stop = weakref.finalize(self, _stop, channel, self._process, self._owner)
        try:
            answer = wire.receive(channel, START_S)
        except DeliveryError as error:
            self.close()
            raise DeliveryError(f"the service's child process did not start: {error}") from error
        if "error" in answer:
            self.close()
            raise wire.failure_of(answer)

    def _ask(self, message: Mapping[str, Any]) -> wire.Answer:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(self._address)
        except OSError as error:
            sock.close()
            raise DeliveryError(f"{self._name} has ended: {error.strerror}") from error
        if peer_of(sock) != os.geteuid():  # another user's process took the name that a killed child left
            sock.close()
            raise DeliveryError(f"{self._name} has ended")
        return wire.ask(sock, self._name, message)

    def close(self) -> None:
        if self._stop is not None:
            self._stop()


def _stop(channel: socket.socket, process: subprocess.Popen[bytes], owner: OwnerProcess) -> None:
    channel.close()
    if not owner.is_current:  # a forked process: the child belongs to its parent
        process.returncode = 0
        return
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _serve(channel: socket.socket, server: socket.socket, remote: str, stores: Sequence[str]) -> None:
    """Serve every client until the channel closes or the parent is gone."""
    from bucketline.loader.service.server import Service

    parent = os.getppid()
    try:
        service = Service(stores, RemoteArguments(**json.loads(remote)).remote())
    except BucketlineError as error:
        wire.send(channel, wire.failure_as_json(error))
        return
    wire.send(channel, {"ready": True})

    def tick() -> float:
        if os.getppid() != parent:  # a process that the parent forked may hold the channel open
            os._exit(0)
        service.let_go()
        return _LOOK_S

    accept_all({server: service.take_in}, channel.fileno(), tick)
    service.stop()


def main() -> None:
    """Run the child. It ignores Ctrl-C, which the parent handles."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("default")
    channel, server = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    with channel, server, suppress(BrokenPipeError):
        _serve(channel, server, sys.argv[3], sys.argv[4:])


if __name__ == "__main__":
    main()
    os._exit(0)  # everything is closed; unloading torch would take most of a second
