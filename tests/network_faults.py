"""A proxy that cuts and stalls connections, for tests of the service over a network."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Faults:
    """Faults that several proxies share: while some are left, a connection is cut or stalled after a random number of bytes."""

    def __init__(self, count: int, most_bytes: int, seed: int) -> None:
        self.left, self._most_bytes = count, most_bytes
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def draw(self) -> tuple[str, int]:
        with self._lock:
            if not self.left:
                return "none", 0
            self.left -= 1
            return self._random.choice(("cut", "cut", "cut", "stall")), self._random.randrange(self._most_bytes)


class FaultyProxy:
    """Forwards connections to a server, with faults."""

    def __init__(self, port: int, faults: Faults) -> None:
        self._upstream, self._faults = port, faults
        self._sock = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._sock.getsockname()[1]
        self._open: list[socket.socket] = []
        self._is_over = False
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while not self._is_over:
            try:
                client, _ = self._sock.accept()
                server = socket.create_connection(("127.0.0.1", self._upstream))
            except OSError:
                continue
            pump = threading.Thread(target=self._pump, args=(client, server, *self._faults.draw()))
            back = threading.Thread(target=self._pump, args=(server, client, "none", 0), kwargs={"is_back": True})
            self._open += [client, server]
            self._threads += [pump, back]
            pump.start()
            back.start()

    def _pump(self, to: socket.socket, source: socket.socket, kind: str, at: int, *, is_back: bool = False) -> None:
        """Forward the server's bytes to the client, or back; end or stop as the fault says."""
        sent = 0
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if kind != "none" and sent + len(data) > at:
                    to.sendall(data[: at - sent])
                    if kind == "stall":
                        return  # both sides stay connected, and nothing comes
                    break
                to.sendall(data)
                sent += len(data)
        for one in (to, source) if not is_back else (to,):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._is_over = True
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        self._threads[0].join()
        for one in self._open:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join()
        for one in self._open:
            one.close()


@contextmanager
def faulty_proxy(port: int, faults: Faults) -> Iterator[FaultyProxy]:
    proxy = FaultyProxy(port, faults)
    try:
        yield proxy
    finally:
        proxy.close()
