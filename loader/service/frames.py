"""The frames in which batches follow an answer over TCP: a head, the batch's layout if it is a new one, and its tensors.

The client receives the bytes into the memory that they are used in.
"""

from __future__ import annotations

import functools
import json
import socket
import ssl
from typing import TYPE_CHECKING

import torch

from bucketline.loader.collate.buffer_pool import FilledBuffer
from bucketline.loader.iteration import filled_batch
from bucketline.loader.latent_scale import RecordedScale
from bucketline.loader.service.layouts import HEAD, FrameKind, LayoutWriter, decoded, filled_as_laid_out
from bucketline.loader.service.wire import MAX_BATCH_BYTES, LostError, failure_as_json, failure_of
from bucketline.store.format.columns import LatentKind

if TYPE_CHECKING:
    from torch import Tensor

    from bucketline.errors import BucketlineError

MAX_LAYOUT_BYTES = 1 << 20


class FrameWriter:
    """Sends frames to one client."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._layouts, self._sent = sock, LayoutWriter(), b""

    def batch(self, filled: FilledBuffer, flat: Tensor) -> None:
        """Send a micro-batch. `flat`: its bytes, `[num_bytes or more]` uint8 in host memory."""
        layout = self._layouts.encoded(filled)
        new = b"" if layout == self._sent else layout
        self._sent = layout
        self._sock.sendall(self._layouts.head(filled, new))
        self._sock.sendall(flat.numpy().data[: filled.num_bytes])

    def alive(self) -> None:
        """Send a sign of life."""
        self._sock.sendall(HEAD.pack(FrameKind.ALIVE, 0, 0, 0, 0, 0))

    def end(self, failure: BaseException | None) -> None:
        """Send the end, with the failure if one ends the iteration."""
        message = b"" if failure is None else json.dumps(failure_as_json(failure)).encode()
        self._sock.sendall(HEAD.pack(FrameKind.END, 0, 0, 0, len(message), 0) + message)


class FrameReader:
    """Receives frames from a server."""

    def __init__(self, sock: socket.socket, buffer_bytes: int) -> None:
        self._sock, self._buffer_bytes = sock, buffer_bytes
        self._head, self._layout = bytearray(HEAD.size), b""

    def next_kind(self) -> FrameKind:
        """Receive a header, and what follows it but a batch's tensors."""
        self._exactly(memoryview(self._head))
        kind, *self._position, length, self._num_bytes = HEAD.unpack(self._head)
        if length > MAX_LAYOUT_BYTES or kind not in FrameKind.__members__.values() or self._num_bytes > self._buffer_bytes:
            raise LostError(
                f"a frame of kind {kind} with {length} and {self._num_bytes} bytes came, expected at most {MAX_LAYOUT_BYTES} "
                f"and {self._buffer_bytes}; is it a server of the same bucketline?"
            )
        if length or kind == FrameKind.END:
            text = bytearray(length)
            self._exactly(memoryview(text))
            self._layout = bytes(text)
        return FrameKind(kind)

    def batch(self, buffer: Tensor) -> FilledBuffer:
        """Receive the tensors of the batch whose header was read into a buffer, `[buffer_bytes]` uint8."""
        try:
            _expect_batch(self._layout)
            filled = filled_as_laid_out(buffer, self._position, self._layout)
        except (ValueError, TypeError, RecursionError) as error:
            raise LostError(f"a batch's layout is damaged: {error}; is it a server of the same bucketline?") from error
        if filled.num_bytes != self._num_bytes:
            raise LostError(f"a batch of {filled.bucket:.100} has {self._num_bytes} bytes, its layout {filled.num_bytes}")
        self._exactly(buffer.numpy().data[: filled.num_bytes])
        return filled

    def failure(self) -> BucketlineError | None:
        """Return the failure with which the iteration ends, whose end was read."""
        if not self._layout:
            return None
        try:
            found = json.loads(self._layout)
        except (ValueError, RecursionError):
            found = None
        return failure_of(found if isinstance(found, dict) else {"message": "the server failed without a message"})

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


@functools.lru_cache(maxsize=1024)
def _expect_batch(layout: bytes) -> None:
    """Check that a layout is that of a batch, by making one of it."""
    bucket, num_bytes, fields = decoded(layout)
    if type(bucket) is not str or type(num_bytes) is not int or not 0 <= num_bytes <= MAX_BATCH_BYTES:
        raise ValueError(f"it is of bucket {bucket!r:.100} with {num_bytes!r:.100} bytes")
    if len({one.name for one in fields}) != len(fields):
        raise ValueError("it has two tensors of one name")
    flat = torch.empty(num_bytes, dtype=torch.uint8)
    filled = FilledBuffer(buffer=flat, fields=fields, num_bytes=num_bytes, step=0, micro_step=0, epoch=0, bucket=bucket)
    try:
        filled_batch(filled, flat, LatentKind.MODE, RecordedScale())
    except (TypeError, KeyError, AttributeError, IndexError, AssertionError, RuntimeError) as error:
        raise ValueError(f"its tensors are not those of a batch ({error})") from error
