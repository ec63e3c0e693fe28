"""The socket protocol between client and service: one JSON object each way, then only wake-up bytes.

A message is its length (four bytes, big-endian) and that many bytes of JSON. Nothing else is accepted, and nothing is
unpickled.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bucketline import errors
from bucketline.errors import BucketlineError, DeliveryError
from bucketline.loader.config import LoaderConfig  # noqa: TC001 - `decode` reads the annotations at run time
from bucketline.loader.history import StoreId  # noqa: TC001 - likewise
from bucketline.loader.plan.cursor import Cursor  # noqa: TC001 - likewise
from bucketline.typed_json import TypedJsonError, decode

if TYPE_CHECKING:
    from collections.abc import Mapping


PROTOCOL = 5
MAX_MESSAGE_BYTES = 1 << 20
WAKE = b"\0"  # each byte after a side's first message means: read the control page again
_LENGTH = struct.Struct(">I")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The batches that a client requests: the same that a loader in its own process would deliver."""

    protocol: int
    stores: tuple[StoreId, ...]
    config: LoaderConfig
    rank: int
    world_size: int
    plan: str  # digest: both sides must compute the same plan
    cursor: Cursor
    is_pinned: bool  # the client registers the memory with its device, so pages must not move
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """The service's answer, sent with the descriptor of the shared memory."""

    buffer_bytes: int  # size of the buffer of one batch
    depth: int  # micro-batches filled ahead


def send(sock: socket.socket, message: Mapping[str, Any], fd: int | None = None) -> None:
    """Send one message, with a descriptor if one is given."""
    body = json.dumps(message).encode()
    if len(body) > MAX_MESSAGE_BYTES:
        raise DeliveryError(f"a message to the service has {len(body)} bytes, expected at most {MAX_MESSAGE_BYTES}")
    data = _LENGTH.pack(len(body)) + body
    if fd is not None:
        sent = socket.send_fds(sock, [data], [fd])
        data = data[sent:]
    sock.sendall(data)


def receive(sock: socket.socket, timeout_s: float, *, with_fd: bool = False) -> tuple[dict[str, Any], list[int]]:
    """Receive one message within `timeout_s` and `MAX_MESSAGE_BYTES`. The socket has no timeout afterwards.

    Raises:
        DeliveryError: if the other side ends, is too slow, or sends anything else.
    """
    until = time.monotonic() + timeout_s
    fds: list[int] = []
    try:
        (length,) = _LENGTH.unpack(_exactly(sock, _LENGTH.size, until, fds if with_fd else None))
        if length > MAX_MESSAGE_BYTES:
            raise DeliveryError(f"a message of {length} bytes was announced, expected at most {MAX_MESSAGE_BYTES}")
        message = json.loads(_exactly(sock, length, until, None))
        if not isinstance(message, dict):
            raise DeliveryError(f"a message is a {type(message).__name__}, expected an object")
    except (OSError, ValueError, RecursionError) as error:
        _close(fds)
        raise DeliveryError(f"the other side sent an invalid message: {str(error) or type(error).__name__}") from error
    except DeliveryError:
        _close(fds)
        raise
    finally:
        sock.settimeout(None)
    return message, fds


def _exactly(sock: socket.socket, count: int, until: float, fds: list[int] | None) -> bytes:
    data = bytearray()
    while len(data) < count:
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the other side sent nothing for too long")
        sock.settimeout(left)
        if fds is None:
            part = sock.recv(min(count - len(data), 1 << 16))
        else:
            part, got, _, _ = socket.recv_fds(sock, count - len(data), 1)
            fds += got
        if not part:
            raise ConnectionError("the other side has ended")
        data += part
    return bytes(data)


def _close(fds: list[int]) -> None:
    import os

    for fd in fds:
        os.close(fd)


def parse_request(message: Mapping[str, Any]) -> Request:
    """Parse a client's request.

    Raises:
        DeliveryError: if the client uses another protocol version, or the message is damaged.
        UsageError: if its configuration is invalid.
    """
    if (version := message.get("protocol")) != PROTOCOL:
        raise DeliveryError(
            f"the client uses protocol version {version!r}, the service version {PROTOCOL}; use the same bucketline"
        )
    try:
        return decode(Request, message, "the client's message")
    except TypedJsonError as error:
        raise DeliveryError(str(error)) from error


def failure_as_json(error: BaseException) -> dict[str, str]:
    """Return a failure as a JSON message."""
    kind = type(error).__name__ if isinstance(error, BucketlineError) else DeliveryError.__name__
    text = str(error) if isinstance(error, BucketlineError) else f"the service failed: {type(error).__name__}: {error}"
    return {"error": kind, "message": text}


def failure_of(message: Mapping[str, Any]) -> BucketlineError:
    """Return the failure in a message, with the class that it had in the service."""
    kind = getattr(errors, str(message.get("error")), None)
    known = isinstance(kind, type) and issubclass(kind, BucketlineError)
    return (kind if known and kind is not None else DeliveryError)(str(message.get("message")))
