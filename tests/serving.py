"""A service in a process of its own, as the command `loader serve` starts it, or in a thread of the test's; web servers."""

from __future__ import annotations

import os
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from bucketline.loader.service.server import Service
from bucketline.loader.service.sockets import Security, accept_all, listen
from bucketline.store.remote.urls import RemoteOptions


@contextmanager
def serving(socket: Path, *stores: Path, options: tuple[str, ...] = ()) -> Iterator[subprocess.Popen[str]]:
    """Serve stores at a socket; the process listens when this begins, and is gone when it ends."""
    command = [sys.executable, "-m", "bucketline.loader.cli", "serve", *map(str, stores), "--at", f"unix:{socket}", *options]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8"
    )
    try:
        assert process.stderr is not None
        said = process.stderr.readline()
        assert said.startswith("serving "), said + process.stderr.read()
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A service in a thread of this process."""

    socket: Path
    port: int
    service: Service

    @property
    def tcp(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"


@contextmanager
def serving_here(
    folder: Path, *stores: Path | str, security: Security | None = None, remote: RemoteOptions | None = None
) -> Iterator[Served]:
    service, (read, write) = Service(stores, remote), os.pipe()
    number = len(list(folder.glob("*.sock")))
    with listen(folder / f"{number}.sock") as sock, service.tcp_socket(("127.0.0.1", 0), security or Security()) as far:
        doors = {sock: service.take_in, far: service.take_in_far}
        thread = threading.Thread(target=accept_all, args=(doors, read, lambda: 1.0), daemon=True)
        thread.start()
        try:
            yield Served(socket=folder / f"{number}.sock", port=far.getsockname()[1], service=service)
        finally:
            os.write(write, b"s")
            thread.join()
            service.stop()
            os.close(read)
            os.close(write)


@contextmanager
def web_server(
    handler: Callable[..., BaseHTTPRequestHandler], context: ssl.SSLContext | None = None
) -> Iterator[ThreadingHTTPServer]:
    """Answer on the loopback interface, in threads that end with it."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
