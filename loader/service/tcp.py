"""Batches over TCP, as frames: a head, the batch's layout if it is a new one, and its tensors.

The client receives the bytes into the memory that they are used in, a few batches ahead of the caller. It connects again if the
connection is lost, until a deadline: its request has the batch at which to continue.
"""

from __future__ import annotations

import functools
import json
import random
import socket
import ssl
import threading
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from bucketline.errors import BucketlineError, DeliveryError
from bucketline.forks import JoinableThread, OwnerProcess
from bucketline.loader.batch import Batch, as_fields
from bucketline.loader.prefetch.stream import Buffers, Stats, Stream, depth_of, read_ahead
from bucketline.loader.service import sockets, wire
from bucketline.loader.service.wire import BATCH, END, HEAD, MAX_BATCH_BYTES, Client, LostError, Response

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Mapping

    from torch import Tensor

    from bucketline.loader.collate.batch_builder import BatchBuilder
    from bucketline.loader.collate.buffers import FilledBuffer
    from bucketline.loader.config import LoaderConfig
    from bucketline.loader.service.sockets import HostPort, Security, ServiceAddress
    from bucketline.loader.service.wire import Answer, Request

MAX_LAYOUT_BYTES = 1 << 20
CONNECT_S = 10.0  # for a connection, TLS included
_MAX_PREFETCH_BYTES, _MAX_THREADS = 1 << 28, 4  # of a client, on the server
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.1, 2.0  # before a server is tried again


class FrameClient(Client):
    """A client on another machine, as its service sees it."""

    max_clients = 256
    max_strangers = 64

    def __init__(self, sock: socket.socket, host: str, security: Security) -> None:
        super().__init__(sock, security.token, host)
        self._context = security.context
        self._stream: Stream | None = None
        self._failure: BucketlineError | None = None  # with which the service stops
        self._layout = b""  # that was sent last

    def admit(self) -> None:
        """Begin TLS, if the service has it."""
        sockets.end_when_peer_is_lost(self.sock)
        self.sock.settimeout(wire.REQUEST_S)
        if self._context is not None:
            self.sock = sock = self._context.wrap_socket(self.sock, server_side=True, do_handshake_on_connect=False)
            try:
                sock.do_handshake()  # on the socket that `shut` ends
            except OSError:
                sock.close()
                raise

    def permitted(self, config: LoaderConfig) -> LoaderConfig:
        """Return the configuration within the limits of another machine's client."""
        prefetch_bytes = min(config.prefetch_bytes, _MAX_PREFETCH_BYTES)
        return replace(config, threads=min(config.threads, _MAX_THREADS), prefetch_bytes=prefetch_bytes)

    def begin(self, builder: BatchBuilder, request: Request) -> None:
        """Start the threads and say how large batches are."""
        if builder.buffer_bytes > MAX_BATCH_BYTES:
            raise DeliveryError(
                f"a batch has up to {builder.buffer_bytes} bytes, the server allows {MAX_BATCH_BYTES}; use smaller batches"
            )
        self._stream = read_ahead(builder, Buffers(torch.device("cpu")), request.cursor)
        self.answer(Response(buffer_bytes=builder.buffer_bytes, depth=depth_of(builder.config, builder.buffer_bytes)))

    def run(self) -> None:
        """Send batches until all are sent, the client leaves or `stop` is called."""
        assert self._stream is not None
        failure, begun = None, time.perf_counter()
        try:
            while (delivered := self._stream.next()) is not None:
                self.counts["waited_us"] += int(1e6 * (time.perf_counter() - begun))
                self._send(*delivered)
                self.count(delivered[0])
                del delivered
                begun = time.perf_counter()
        except OSError:
            return  # the client has left
        except BucketlineError as error:
            failure = error
            self.counts["errors"] += 1
        failure = failure or self._failure
        message = b"" if failure is None else json.dumps(wire.failure_as_json(failure)).encode()
        with suppress(OSError):
            self.sock.sendall(HEAD.pack(END, 0, 0, 0, len(message), 0) + message)

    def _send(self, filled: FilledBuffer, flat: Tensor) -> None:
        """Send a micro-batch. `flat`: its bytes, `[num_bytes or more]` uint8 in host memory."""
        layout = wire.layout_of(filled)
        head = wire.head_of(filled, b"" if layout == self._layout else layout)
        self._layout = layout
        self.sock.sendall(head)
        self.sock.sendall(flat.numpy().data[: filled.num_bytes])

    def stop(self, failure: DeliveryError) -> None:
        """Let the iteration end with a failure; a client that has none is shut out."""
        self._failure = failure
        if (stream := self._stream) is not None:
            stream.release()
        else:
            self.shut()

    def counted(self) -> Counter[str]:
        if (stream := self._stream) is not None:
            stream.note_queue(queue := Stats())
            self.counts["waits"] = queue.waits
        return self.counts

    def close(self) -> None:
        """End the threads and close the connection."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
        self.sock.close()


class FrameReader:
    """Receives frames from a server."""

    def __init__(self, sock: socket.socket, buffer_bytes: int) -> None:
        self._sock, self._buffer_bytes = sock, buffer_bytes
        self._head, self._layout = bytearray(HEAD.size), b""

    def next(self) -> bool:
        """Receive a frame's head and what follows it but a batch's tensors; return False at the iteration's end.

        A failure that ends the iteration is raised.
        """
        self._exactly(memoryview(self._head))
        kind, *self._position, length, self._num_bytes = HEAD.unpack(self._head)
        if length > MAX_LAYOUT_BYTES or kind not in (BATCH, END) or self._num_bytes > self._buffer_bytes:
            raise LostError(
                f"a frame of kind {kind} with {length} and {self._num_bytes} bytes came, expected at most {MAX_LAYOUT_BYTES} "
                f"and {self._buffer_bytes}; is it a server of the same bucketline?"
            )
        text = bytearray(length)
        self._exactly(memoryview(text))
        if kind == BATCH:
            self._layout = bytes(text) or self._layout
        elif text:
            raise _failure_in(text)
        return bool(kind == BATCH)

    def batch(self, buffer: Tensor) -> FilledBuffer:
        """Receive the tensors of the batch whose head was read into a buffer, `[buffer_bytes]` uint8."""
        try:
            filled = wire.filled_as_laid_out(buffer, self._position, self._layout)
            _expect_batch(self._layout)
        except (AssertionError, LookupError, ValueError, TypeError, RecursionError) as error:
            raise LostError(f"a batch's layout is damaged: {error}; is it a server of the same bucketline?") from error
        if filled.num_bytes != self._num_bytes:
            raise LostError(f"a batch of {filled.bucket:.100} has {self._num_bytes} bytes, its layout {filled.num_bytes}")
        self._exactly(buffer.numpy().data[: filled.num_bytes])
        return filled

    def _exactly(self, into: memoryview) -> None:
        """Fill memory; of a plain socket with as few system calls as can be."""
        at, flags = 0, 0 if isinstance(self._sock, ssl.SSLSocket) else socket.MSG_WAITALL
        while at < len(into):
            try:
                got = self._sock.recv_into(into[at:], 0, flags)
            except (TimeoutError, BlockingIOError) as error:
                raise LostError("the server sent nothing for too long") from error
            except OSError as error:
                raise LostError(f"the connection broke: {error.strerror or error}") from error
            if not got:
                raise LostError("the server has ended without a message")
            at += got


@functools.lru_cache(maxsize=1 << 12)
def _expect_batch(layout: bytes) -> None:
    """Check that a layout has a batch's columns, by an empty batch of them; raise what making it raises."""
    bucket, _, fields = wire.parse_layout(layout)
    empty = {field.name: torch.empty(field.shape, dtype=field.dtype, device="meta") for field in fields}
    Batch(step=0, micro_step=0, epoch=0, bucket=bucket, **as_fields(empty))


def _failure_in(text: bytearray) -> BucketlineError:
    """Return the failure that ends an iteration; one of delivery may be over once the client has connected again."""
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        message = None
    failure = wire.failure_of(message if isinstance(message, dict) else {"message": "the server failed without a message"})
    return LostError(str(failure)) if isinstance(failure, DeliveryError) else failure


class TcpLink:
    """A client's way to a server on another machine."""

    def __init__(self, address: ServiceAddress) -> None:
        """Read the token and the certificates."""
        assert isinstance(address.place, tuple)
        self._place: HostPort = address.place
        self.deadline_s = address.deadline_s
        self._token = None if address.token is None else sockets.read_token(address.token)
        self._context = None if address.certificate is None else sockets.client_context(address.certificate)

    def __str__(self) -> str:
        return "{}:{}".format(*self._place)

    def ask(self, message: Mapping[str, Any]) -> Answer:
        """Connect and send a message; try again until the deadline."""
        tries = _Tries(self)
        while True:
            try:
                return self.answer(self.connected(), message)
            except (OSError, LostError) as error:
                tries.pause(error, threading.Event())

    def connected(self) -> socket.socket:
        """Connect, by TLS if there are certificates to trust."""
        sock = socket.create_connection(self._place, timeout=min(CONNECT_S, self.deadline_s))
        try:
            sockets.end_when_peer_is_lost(sock)
            return sock if self._context is None else self._encrypted(sock, self._context)
        except BaseException:
            sock.close()
            raise

    def _encrypted(self, sock: socket.socket, context: ssl.SSLContext) -> ssl.SSLSocket:
        try:
            return context.wrap_socket(sock, server_hostname=self._place[0])
        except ssl.SSLCertVerificationError as error:
            raise DeliveryError(
                f"the certificate of {self._place[0]} is not trusted: {error.verify_message}; name the file that it is in"
            ) from error
        except OSError as error:
            raise LostError(f"TLS fails: {getattr(error, 'reason', error)}; does the server have --certificate?") from error

    def answer(self, sock: socket.socket, message: Mapping[str, Any]) -> Answer:
        """Send a message, and return its answer; a server that sends nothing later for twice the deadline is lost."""
        try:
            answer = wire.ask(sock, str(self), message, self._token)
        except LostError as error:
            hint = "" if self._context is not None else "; if the server has --certificate, name its file"
            raise LostError(f"{error}{hint}") from error
        sockets.limit_silence(sock, 2 * self.deadline_s)
        return answer


class _Tries:
    """The time for which a server is tried, and the pauses between."""

    def __init__(self, link: TcpLink) -> None:
        self._link = link
        self._until = time.monotonic() + link.deadline_s
        self._pause_s = min(_FIRST_PAUSE_S, link.deadline_s / 2)

    def pause(self, error: Exception, over: threading.Event) -> None:
        """Wait before the next try; raise an error if there is none. `over`: set when nobody waits any more."""
        if over.is_set() or time.monotonic() + self._pause_s > self._until:
            raise DeliveryError(
                f"no server of batches can be reached at {self._link} within {self._link.deadline_s:g} s; the last failure: "
                f"{getattr(error, 'strerror', None) or error}; start one (loader serve STORE --at tcp://HOST:PORT), and "
                "iterate again: it continues at the same batch"
            ) from error
        over.wait(self._pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - so that ranks do not come all at once
        self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)


class FrameReceiver:
    """A thread that fills a stream with the batches that a server sends."""

    def __init__(self, link: TcpLink, request: Request, answer: Answer, buffers: Buffers) -> None:
        """Start the thread. `answer`: of the server, to the request."""
        buffer_bytes = answer.response().buffer_bytes
        self.stream = Stream(buffers, buffer_bytes, depth_of(request.config, buffer_bytes), num_threads=1)
        self.stream.fillers = self
        self._link, self._request = link, request
        self._owner, self._over = OwnerProcess(), threading.Event()
        self._sock = answer.sock
        self._turn = 0
        self._thread = JoinableThread(self._run, args=(answer,), name="bucketline-receiver")
        self._thread.start()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self, answer: Answer) -> None:
        failure: BaseException | None = None
        try:
            self._receive(answer)
        except BucketlineError as error:
            failure = error
        except Exception as error:  # noqa: BLE001 - delivered to the caller, who raises it
            failure = DeliveryError(f"the receiving thread failed: {type(error).__name__}: {error}")
        self.stream.end(self._turn, failure)

    def _receive(self, first: Answer) -> None:
        answer: Answer | None = first
        tries, turn = None, self._turn
        while True:
            try:
                if answer is None:
                    self._sock = self._link.connected()
                with self._sock:
                    if self._over.is_set():
                        return
                    self._receive_all(answer or self._link.answer(self._sock, wire.message_of(self._request)))
                    return
            except (LostError, OSError) as error:
                if tries is None or self._turn != turn:
                    tries, turn = _Tries(self._link), self._turn
                tries.pause(error, self._over)
            answer = None

    def _receive_all(self, answer: Answer) -> None:
        frames = FrameReader(answer.sock, min(answer.response().buffer_bytes, self.stream.pool.buffer_bytes))
        while frames.next():
            cursor, buffer = self._request.cursor, self.stream.acquire()
            try:
                filled = frames.batch(buffer)
                if (filled.step, filled.micro_step) != (cursor.step, cursor.micro_step):
                    expected = f"step {cursor.step}, micro-batch {cursor.micro_step}"
                    raise LostError(f"step {filled.step}, micro-batch {filled.micro_step} came, expected {expected}")
            except BaseException:
                self.stream.pool.release(buffer)
                raise
            if not self.stream.put(self._turn, filled):
                return
            self._turn += 1
            after = cursor.after(filled.step, filled.micro_step, self._request.config.accumulation)
            self._request = replace(self._request, cursor=after)

    def close(self) -> None:
        """End the iteration; the thread is gone when this returns. A forked child has none."""
        if not self._owner.is_current:
            return
        self._over.set()
        self.stream.release()
        sockets.shut(self._sock)
        if self._thread is not threading.current_thread():
            self._thread.join()
