"""A private service: a child process without a socket path that always ends with its parent.

The parent and the child share a channel. For each iteration, the parent sends one end of a new connection through it. When
the parent is gone, the channel closes and the child exits.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import warnings
import weakref
from contextlib import suppress
from dataclasses import fields
from typing import TYPE_CHECKING

from bucketline.errors import BucketlineError, DeliveryError
from bucketline.forks import OwnerProcess
from bucketline.loader.service.wire import failure_as_json, failure_of, receive, send
from bucketline.store.remote.arguments import RemoteArguments

if TYPE_CHECKING:
    from collections.abc import Sequence

START_S = 120.0
STOP_S = 1.0  # grace period before a child that does not end is killed
_LOOK_S = 1.0


class ChildService:
    """The parent's side of a private service."""

    def __init__(self, stores: Sequence[str], remote: RemoteArguments) -> None:
        """Start the child and wait until it has opened the stores. Credentials reach it by its environment.

        Raises:
            StoreError: if the child cannot open a store.
            DeliveryError: if the child does not start.
        """
        self.owner = OwnerProcess()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "bucketline.loader.service.child_process",
                    str(theirs.fileno()),
                    json.dumps({field.name: getattr(remote, field.name) for field in fields(RemoteArguments)}),
                    *stores,
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self.stop = weakref.finalize(self, _stop, self._channel, self._process, self.owner)
        try:
            answer, _ = receive(self._channel, START_S)
        except DeliveryError as error:
            self.stop()
            raise DeliveryError(f"the private service did not start: {error}") from error
        if "error" in answer:
            self.stop()
            raise failure_of(answer)

    @property
    def name(self) -> str:
        return f"the private service (process {self._process.pid})"

    def is_alive(self) -> bool:
        return self.stop.alive and self._process.poll() is None

    def has_ended(self) -> bool:
        """Return True if the child has ended or ends within `STOP_S`: the system takes a moment to end a killed process."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
            return True
        return False

    def connect(self) -> socket.socket:
        """Return a new connection.

        Raises:
            DeliveryError: if the child has ended.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            try:
                socket.send_fds(self._channel, [b"c"], [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise DeliveryError(f"{self.name} has ended: {error.strerror}") from error
        return ours


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


def _serve(channel: socket.socket, remote: str, stores: Sequence[str]) -> int:
    """Run as the child: serve every connection from the channel until it closes or the parent is gone."""
    from bucketline.loader.service.server import Service

    parent = os.getppid()
    try:
        service = Service(stores, RemoteArguments(**json.loads(remote)).remote())
    except BucketlineError as error:
        send(channel, failure_as_json(error))
        return 1
    send(channel, {"ready": True})
    while True:
        if select.select([channel], [], [], _LOOK_S)[0]:
            try:
                data, fds, _, _ = socket.recv_fds(channel, 1, 1)
            except OSError:
                break
            if not data:
                break
            for fd in fds:
                service.take_in(socket.socket(fileno=fd))
        elif os.getppid() != parent:  # a process that the parent forked may hold the channel open
            break
        else:
            service.let_go()
    service.stop()
    return 0


def main() -> int:
    """Run the child. It ignores Ctrl-C, which the parent handles."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("default")
    with socket.socket(fileno=int(sys.argv[1])) as channel, suppress(BrokenPipeError):
        return _serve(channel, sys.argv[2], sys.argv[3:])
    return 1


if __name__ == "__main__":
    os._exit(main())  # everything is closed; unloading torch would take most of a second
