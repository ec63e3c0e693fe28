"""The process of a private service, as `ChildLink` starts it: it takes connections from a channel, and ends with its parent."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING

from bucketline.errors import BucketlineError
from bucketline.loader.service.sockets import readable
from bucketline.loader.service.wire import failure_as_json, send
from bucketline.store.remote.arguments import RemoteArguments

if TYPE_CHECKING:
    from collections.abc import Sequence

_LOOK_S = 1.0


def _serve(channel: socket.socket, remote: str, stores: Sequence[str]) -> int:
    """Serve every connection from the channel until it closes or the parent is gone."""
    from bucketline.loader.service.server import Service

    parent = os.getppid()
    try:
        service = Service(stores, RemoteArguments(**json.loads(remote)).remote())
    except BucketlineError as error:
        send(channel, failure_as_json(error))
        return 1
    send(channel, {"ready": True})
    while True:
        if readable([channel.fileno()], _LOOK_S):
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
