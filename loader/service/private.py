"""A service of one's own: a child process, reached without any path, that ends with its parent whatever happens to that.

The parent and the child share a channel; for each iteration the parent sends one end of a new connection through it. When the
parent is gone, the channel ends, and so does the child.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import warnings
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING

from bucketline.errors import BucketlineError, DeliveryError
from bucketline.loader.service.protocol import failure_as_json, failure_of, receive, send

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

START_S = 120.0
STOP_S = 1.0  # before a child that does not end is killed
_LOOK_S = 1.0


class PrivateService:
    """The parent's side."""

    def __init__(self, stores: Sequence[Path]) -> None:
        """Start the child, and wait until it has opened the stores.

        Raises:
            StoreError: where it cannot open one.
            DeliveryError: where it does not start.
        """
        self.pid = os.getpid()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "bucketline.loader.service.private", str(theirs.fileno()), *map(str, stores)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self.stop = weakref.finalize(self, _stop, self._channel, self._process, self.pid)
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

    @property
    def process_id(self) -> int:
        return self._process.pid

    def is_alive(self) -> bool:
        return self.stop.alive and self._process.poll() is None

    def has_ended(self) -> bool:
        """Say whether the child has ended, or does within the time that the system takes to end a process that was killed."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
            return True
        return False

    def connect(self) -> socket.socket:
        """Give a new connection.

        Raises:
            DeliveryError: where the child has ended.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            try:
                socket.send_fds(self._channel, [b"c"], [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise DeliveryError(f"{self.name} has ended: {error.strerror}") from error
        return ours


def _stop(channel: socket.socket, process: subprocess.Popen[bytes], pid: int) -> None:
    channel.close()
    if os.getpid() != pid:  # a process that was forked off: the child is not its own
        process.returncode = 0
        return
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _serve(channel: socket.socket, stores: Sequence[str]) -> int:
    """Be the child: serve whatever comes through the channel, until it ends or the parent is gone."""
    from bucketline.loader.service.server import Service

    parent = os.getppid()
    try:
        service = Service(stores)
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
        elif os.getppid() != parent:  # what the parent forked off may hold the channel open
            break
    service.stop()
    return 0


def main() -> int:
    """Run the child. Ctrl-C is the parent's business."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("default")
    with socket.socket(fileno=int(sys.argv[1])) as channel, suppress(BrokenPipeError):
        return _serve(channel, sys.argv[2:])
    return 1


if __name__ == "__main__":
    os._exit(main())  # all is closed; to take torch down would cost most of a second
