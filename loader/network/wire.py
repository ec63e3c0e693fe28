"""The protocol between a server of batches and its clients, over TCP, with or without TLS.

The server sends a nonce, the client its proof and its request, the server what was granted: one message of `service.protocol`
each. Then the server sends frames: a header of fixed size, the batch's layout as JSON where it is one that it has not sent
before, and the bytes of its tensors, which the client receives into the memory that they are used in. Nothing is unpickled.
"""

from __future__ import annotations

import json
import socket
import ssl
import struct
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING

import torch

from bucketline.errors import DeliveryError
from bucketline.loader.collate.buffer_pool import FilledBuffer
from bucketline.loader.config import LoaderConfig  # noqa: TC001 - `decode` reads the annotations at run time
from bucketline.loader.iteration import filled_batch
from bucketline.loader.service.layouts import LayoutReader, LayoutWriter
from bucketline.loader.state import parse_state
from bucketline.store.format.columns import LatentKind
from bucketline.typed_json import Json  # noqa: TC001 - likewise

if TYPE_CHECKING:
    from torch import Tensor

    from bucketline.loader.collate.buffer_pool import Field

NETWORK_PROTOCOL = 2
ALIVE_EVERY_S = 2.0  # a server with no batch to send sends a sign of life
ALIVE = {"alive": True}  # before the answer; then it is a frame
MAX_LAYOUT_BYTES = 1 << 20
MAX_BATCH_BYTES = 1 << 30  # that a client can request
MAX_PREFETCH_BYTES, _MAX_THREADS = 1 << 28, 4  # of a client, on the server
_FRAME = struct.Struct("<BQQQIQ")  # kind, step, micro step, epoch, length of the layout or message, bytes of tensors


class FrameKind(IntEnum):
    """The kind of a frame."""

    BATCH = 1
    ALIVE = 2  # nothing is ready yet
    END = 3
    FAILURE = 4  # with a message as of `failure_as_json`


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteRequest:
    """The batches that a client requests, of the stores that the server has, from a state if one is given."""

    protocol: int
    config: LoaderConfig
    rank: int
    world_size: int
    state: dict[str, Json] | None
    is_streamed: bool  # False: only the answer


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteResponse:
    """The server's answer: where the iteration begins and ends."""

    state: dict[str, Json]  # of a loader that begins there
    sizes: tuple[tuple[int, ...], ...]  # of each bucket of the plan: rows and global batch; the client counts epochs by them
    latent_kind: str
    buffer_bytes: int  # size of the largest batch
    stores: tuple[str, ...]  # names, for messages

    def check(self) -> None:
        """Check what a client computes with.

        Raises:
            ValueError: if a value is impossible.
            StateError: if the state is damaged or of another version.
        """
        if not self.sizes or any(len(one) != 2 or one[0] < 0 or one[1] < 1 for one in self.sizes):
            raise ValueError(f"sizes is {self.sizes!s:.100}, expected the rows and the global batch of each bucket")
        if not 0 < self.buffer_bytes <= MAX_BATCH_BYTES:
            raise ValueError(f"buffer_bytes is {self.buffer_bytes}, expected 1 to {MAX_BATCH_BYTES}")
        LatentKind(self.latent_kind)
        parse_state(self.state)


class FrameWriter:
    """Sends frames to one client."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._layouts, self._sent = sock, LayoutWriter(), b""

    def batch(self, filled: FilledBuffer, flat: Tensor) -> None:
        """Send a micro-batch. `flat`: its bytes, `[num_bytes or more]` uint8 in host memory."""
        layout = self._layouts.encoded(filled)
        new = b"" if layout == self._sent else layout
        self._sent = layout
        head = _FRAME.pack(FrameKind.BATCH, filled.step, filled.micro_step, filled.epoch, len(new), filled.num_bytes)
        self._sock.sendall(head + new)
        self._sock.sendall(flat.numpy().data[: filled.num_bytes])

    def alive(self) -> None:
        """Send a sign of life."""
        self._sock.sendall(_FRAME.pack(FrameKind.ALIVE, 0, 0, 0, 0, 0))

    def end(self, failure: dict[str, str] | None) -> None:
        """Send the end, or the failure that ends the iteration."""
        message = b"" if failure is None else json.dumps(failure).encode()[:MAX_LAYOUT_BYTES]
        self._sock.sendall(
            _FRAME.pack(FrameKind.END if failure is None else FrameKind.FAILURE, 0, 0, 0, len(message), 0) + message
        )


class FrameReader:
    """Receives frames from a server."""

    def __init__(self, sock: socket.socket, buffer_bytes: int) -> None:
        self._sock, self._buffer_bytes = sock, buffer_bytes
        self._layouts, self._layout = LayoutReader(_expect_batch), b""
        self._head = bytearray(_FRAME.size)

    def next_kind(self) -> FrameKind:
        """Receive a header, and what follows it but a batch's tensors.

        Raises:
            DeliveryError: if the server ends, or sends anything else.
            TimeoutError: if it sends nothing within the socket's timeout.
        """
        self._exactly(memoryview(self._head))
        kind, self._step, self._micro_step, self._epoch, length, self._num_bytes = _FRAME.unpack(self._head)
        if length > MAX_LAYOUT_BYTES or kind not in FrameKind.__members__.values() or self._num_bytes > self._buffer_bytes:
            raise DeliveryError(
                f"a frame of kind {kind} with {length} and {self._num_bytes} bytes came, expected at most {MAX_LAYOUT_BYTES} "
                f"and {self._buffer_bytes}; is it a server of the same bucketline?"
            )
        if length:
            text = bytearray(length)
            self._exactly(memoryview(text))
            self._layout = bytes(text)
        return FrameKind(kind)

    def batch(self, buffer: Tensor) -> FilledBuffer:
        """Receive the tensors of the batch whose header was read into a buffer, `[buffer_bytes]` uint8."""
        try:
            bucket, num_bytes, fields = self._layouts.decoded(self._layout)
        except (ValueError, TypeError, RecursionError) as error:
            raise DeliveryError(f"a batch's layout is damaged: {error}; is it a server of the same bucketline?") from error
        if num_bytes != self._num_bytes:
            raise DeliveryError(f"a batch of {bucket:.100} has {self._num_bytes} bytes, its layout {num_bytes}")
        self._exactly(buffer.numpy().data[:num_bytes])
        return FilledBuffer(
            buffer=buffer,
            fields=fields,
            num_bytes=num_bytes,
            step=self._step,
            micro_step=self._micro_step,
            epoch=self._epoch,
            bucket=bucket,
        )

    def failure(self) -> dict[str, object]:
        """Return the failure whose header was read."""
        try:
            found = json.loads(self._layout)
        except ValueError:
            found = None
        return found if isinstance(found, dict) else {"message": "the server failed without a message"}

    def _exactly(self, into: memoryview) -> None:
        """Fill memory; of a plain socket with as few system calls as can be."""
        at, flags = 0, 0 if isinstance(self._sock, ssl.SSLSocket) else socket.MSG_WAITALL
        while at < len(into):
            try:
                got = self._sock.recv_into(into[at:], 0, flags)
            except (TimeoutError, BlockingIOError) as error:
                raise TimeoutError("the server sent nothing for too long") from error
            except OSError as error:
                raise DeliveryError(f"the connection broke: {error.strerror or error}") from error
            if not got:
                raise DeliveryError("the server has ended without a message")
            at += got


def _expect_batch(bucket: str, num_bytes: int, fields: list[Field]) -> None:
    """Check that a layout is that of a batch, by making one of it.

    Raises:
        ValueError: if it is not.
    """
    if type(bucket) is not str or type(num_bytes) is not int or not 0 <= num_bytes <= MAX_BATCH_BYTES:
        raise ValueError(f"it is of bucket {bucket!r:.100} with {num_bytes!r:.100} bytes")
    if len({one.name for one in fields}) != len(fields) or any(one.begin + one.num_bytes > num_bytes for one in fields):
        raise ValueError(f"it has two tensors of one name, or one beyond its {num_bytes} bytes")
    flat = torch.empty(num_bytes, dtype=torch.uint8)
    filled = FilledBuffer(buffer=flat, fields=fields, num_bytes=num_bytes, step=0, micro_step=0, epoch=0, bucket=bucket)
    try:
        filled_batch(filled, flat, LatentKind.MODE)
    except (TypeError, KeyError, AttributeError, IndexError, AssertionError, RuntimeError) as error:
        raise ValueError(f"its tensors are not those of a batch ({error})") from error


def limit_silence(sock: socket.socket, seconds: float) -> None:
    """Let a socket that sends nothing for so long raise `TimeoutError` in a `FrameReader`."""
    if isinstance(sock, ssl.SSLSocket):
        sock.settimeout(seconds)
    else:  # the socket stays a blocking one, so that one call receives a whole batch
        whole, part = divmod(seconds, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(whole), int(part * 1e6)))


def end_when_peer_is_lost(sock: socket.socket) -> None:
    """Let a connection to a machine that is gone fail within a minute, and send small messages at once."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 20), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 60_000)


def allowed(config: LoaderConfig) -> LoaderConfig:
    """Return a client's configuration within the server's limits. Nothing of disks and object storage is in it."""
    return replace(
        config,
        threads=min(config.threads, _MAX_THREADS),
        prefetch_bytes=min(config.prefetch_bytes, MAX_PREFETCH_BYTES),
        cache=None,
        cache_bytes=None,
        endpoint=None,
        store_option=(),
    )
