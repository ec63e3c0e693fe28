"""A client on another machine, as its service sees it: a connection over TCP, on which batches are sent as frames."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from bucketline.errors import BucketlineError, DeliveryError
from bucketline.loader.prefetch.delivery import Buffers
from bucketline.loader.prefetch.threads import ThreadStream, depth_of
from bucketline.loader.service import client_connection
from bucketline.loader.service.client_connection import Client
from bucketline.loader.service.frames import FrameWriter
from bucketline.loader.service.sockets import end_when_peer_is_lost, has_room
from bucketline.loader.service.wire import ALIVE, MAX_BATCH_BYTES, Response, allowed, send
from bucketline.loader.stats import Stats

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Callable, Mapping

    from bucketline.loader.collate.batch_builder import BatchBuilder
    from bucketline.loader.config import LoaderConfig
    from bucketline.loader.service.wire import Request


class FrameClient(Client):
    """A client on another machine."""

    max_clients = 256
    max_strangers = 64  # each lasts `REQUEST_S` at most

    def __init__(self, sock: socket.socket, peer: str, token: bytes | None, context: ssl.SSLContext | None) -> None:
        super().__init__(sock, token, peer.rpartition(":")[0])
        self._peer, self._context = peer, context
        self._sending = threading.Lock()
        self._stream: ThreadStream | None = None
        self._is_over = False
        self._failure: BucketlineError | None = None  # with which the service stops
        self._counts = Stats(begun=time.perf_counter())
        self._show: Callable[[], None] | None = None  # sends a sign of life, in the form that the client expects now
        self._ends_at: float | None = time.monotonic() + client_connection.REQUEST_S  # until it has proved who it is

    def admit(self) -> None:
        """Begin TLS, if the service has it."""
        end_when_peer_is_lost(self.sock)
        self.sock.settimeout(client_connection.REQUEST_S)
        if self._context is not None:
            self.sock = sock = self._context.wrap_socket(self.sock, server_side=True, do_handshake_on_connect=False)
            try:
                sock.do_handshake()  # on the socket that `shut` ends
            except OSError:
                sock.close()
                raise

    def request(self) -> dict[str, Any]:
        """Return the client's message; the connection lasts from then on, while the client waits for an answer."""
        message = super().request()
        self._ends_at, self._show = None, lambda: send(self.sock, ALIVE)
        return message

    def permitted(self, config: LoaderConfig) -> LoaderConfig:
        """Return the configuration within the limits of another machine's client."""
        return allowed(config)

    def answer(self, message: Mapping[str, Any], fd: int | None = None) -> None:
        """Send the answer, after which no sign of life is expected."""
        with self._sending:
            self._show = None
            super().answer(message, fd)

    def begin(self, builder: BatchBuilder, wanted: Request) -> dict[str, Any]:
        """Start the threads and say how large batches are; return who the client is."""
        if builder.buffer_bytes > MAX_BATCH_BYTES:
            raise DeliveryError(
                f"a batch has up to {builder.buffer_bytes} bytes, the server allows {MAX_BATCH_BYTES}; use smaller batches"
            )
        self._stream = ThreadStream(builder, Buffers(torch.device("cpu")), wanted.cursor)
        self.answer(asdict(Response(buffer_bytes=builder.buffer_bytes, depth=depth_of(builder.config, builder.buffer_bytes))))
        self._writer = FrameWriter(self.sock)
        self._show = self._writer.alive
        return {"address": self._peer}

    def run(self) -> None:
        """Send batches until all are sent, the client leaves or `stop` is called."""
        stream, writer, failure = self._stream, self._writer, None
        assert stream is not None
        asked = self._counts.begun = time.perf_counter()
        try:
            while (delivered := stream.next()) is not None and not self._is_over:
                self._counts.waited_s += time.perf_counter() - asked
                with self._sending:
                    writer.batch(*delivered)
                self._counts.count(delivered[0])
                del delivered
                asked = time.perf_counter()
        except OSError:
            return  # the client has left
        except BucketlineError as error:
            failure = error
            self._counts.errors += 1
        with self._sending, suppress(OSError):
            self._is_over = True
            writer.end(failure or self._failure)

    def show_life(self) -> None:
        """Send a sign of life, unless a batch is being sent or unread; end the iteration of a client that has gone."""
        if self._ends_at is not None and time.monotonic() > self._ends_at:
            self.shut()
        if not self._sending.acquire(blocking=False):
            return
        try:
            if self._show is not None and not self._is_over and has_room(self.sock):
                self._show()
        except OSError:
            self._is_over = True
            self._release()
        finally:
            self._sending.release()

    def stop(self, failure: DeliveryError) -> None:
        """Let the iteration end with a failure; a client that has none is shut out."""
        self._failure = failure
        if not self._release():
            self.shut()

    def _release(self) -> bool:
        """Let the batches end; return False if there are none yet, or no more."""
        stream = self._stream
        if stream is not None:
            stream.release()
        return stream is not None

    def stats(self) -> Stats:
        """Return the statistics so far."""
        if self._stream is not None:
            self._stream.note_queue(self._counts)
        return self._counts.until_now()

    def close(self) -> None:
        """End the threads and close the connection."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
        self.sock.close()
