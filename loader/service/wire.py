"""The messages between a client and a service: a greeting, one request, one answer. Each is a JSON object.

A message is its length (four bytes, big-endian) and that many bytes of JSON. Nothing else is accepted, and nothing is
unpickled. The service greets with a nonce, and the client's request carries its proof of the token, which over a unix socket is
empty: there, the system says whose process it is.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from bucketline import errors
from bucketline.errors import BucketlineError, DeliveryError
from bucketline.loader.config import LoaderConfig  # noqa: TC001 - `decode` reads the annotations at run time
from bucketline.loader.mixture import StoreId  # noqa: TC001 - likewise
from bucketline.loader.plan.epoch_steps import Cursor  # noqa: TC001 - likewise
from bucketline.loader.service.tokens import proof_of
from bucketline.typed_json import Json, TypedJsonError, decode, encode

if TYPE_CHECKING:
    import threading
    from collections.abc import Mapping, Sequence

PROTOCOL = 7
MAX_MESSAGE_BYTES = 1 << 20  # that a service accepts
MAX_ANSWER_BYTES = 1 << 29  # that a client accepts where it has requested manifests or names
ALIVE_EVERY_S = 2.0  # over TCP, a server with nothing to send sends a sign of life
ALIVE = {"alive": True}  # before the answer; then it is a frame
WAKE = b"\0"  # over a unix socket, each byte after the answer means: read the control page again
MAX_BATCH_BYTES = 1 << 30  # that a client on another machine can request
_MAX_PREFETCH_BYTES, _MAX_THREADS = 1 << 28, 4  # of such a client, on the server
_LENGTH = struct.Struct(">I")
_PART_BYTES = 1 << 20

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The batches that a client requests: the same that a loader in its own process would deliver."""

    stores: tuple[StoreId, ...]
    config: LoaderConfig
    rank: int
    world_size: int
    plan: str  # digest: both sides must compute the same plan
    cursor: Cursor
    is_pinned: bool  # the client registers shared memory with its device, so pages must not move


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """The answer to a client that requests batches; over a unix socket with the descriptor of the shared memory."""

    buffer_bytes: int  # size of the buffer of one batch
    depth: int  # micro-batches filled ahead


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedStore:
    """A store of the service, at a generation, or at its newest."""

    store_id: str
    generation: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoresRequest:
    """The manifests of stores that a client requests; of all, each at its newest generation, if it names none."""

    wanted: tuple[WantedStore, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedManifest:
    """A store as the service tells of it."""

    place: str
    repeats: int | float
    manifest: str  # as it is in its file


@dataclass(frozen=True, slots=True, kw_only=True)
class StoresResponse:
    """The answer to a `StoresRequest`."""

    stores: tuple[ServedManifest, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NamesRequest:
    """The sample ids that a client requests, by their digests in hexadecimal."""

    stores: tuple[StoreId, ...]
    digests: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NamesResponse:
    """The answer to a `NamesRequest`."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StatsRequest:
    """A client that requests the service's statistics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatsResponse:
    """The answer to a `StatsRequest`."""

    stats: dict[str, Json]  # see `Service.stats`


AnyRequest: TypeAlias = Request | StoresRequest | NamesRequest | StatsRequest
_KINDS = {"batches": Request, "stores": StoresRequest, "names": NamesRequest, "stats": StatsRequest}
_LONG_ANSWERS = ("stores", "names")


class LostError(DeliveryError):
    """The other side has ended, is silent, or sends anything but what is expected. The next server may be right."""


def send(sock: socket.socket, message: Mapping[str, Any], fd: int | None = None, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
    """Send one message, with a descriptor if one is given."""
    body = json.dumps(message).encode()
    if len(body) > max_bytes:
        raise DeliveryError(f"a message has {len(body)} bytes, expected at most {max_bytes}")
    data = _LENGTH.pack(len(body)) + body
    if fd is not None:
        sent = socket.send_fds(sock, [data], [fd])
        data = data[sent:]
    if data:  # sending nothing to a client that has gone is an error, too
        sock.sendall(data)


def receive(
    sock: socket.socket, timeout_s: float, fds: list[int] | None = None, *, max_bytes: int = MAX_MESSAGE_BYTES
) -> dict[str, Any]:
    """Receive one message within `timeout_s`, and that again for each further MiB. The socket has no timeout afterwards.

    Descriptors that come are appended to `fds`, if it is given.
    """
    until = time.monotonic() + timeout_s
    try:
        (length,) = _LENGTH.unpack(_exactly(sock, _LENGTH.size, until, fds))
        if length > max_bytes:
            raise LostError(f"a message of {length} bytes was announced, expected at most {max_bytes}")
        body = _exactly(sock, min(length, _PART_BYTES), until)
        while len(body) < length:
            body += _exactly(sock, min(length - len(body), _PART_BYTES), time.monotonic() + timeout_s)
        message = json.loads(body)
    except OSError as error:
        raise LostError(f"the connection is lost: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise LostError(f"the other side sent an invalid message: {str(error) or type(error).__name__}") from error
    finally:
        sock.settimeout(None)
    if not isinstance(message, dict):
        raise LostError(f"a message is a {type(message).__name__}, expected an object")
    return message


def _exactly(sock: socket.socket, count: int, until: float, fds: list[int] | None = None) -> bytearray:
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
    return data


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceAnswer:
    """A service's answer, and the connection that it came by."""

    sock: socket.socket
    name: str  # of the service, in messages
    message: dict[str, Any]
    fds: list[int]

    def parsed(self, kind: type[T]) -> T:
        """Return the answer as a record."""
        return parsed(kind, self.message, f"the answer of {self.name}")

    def granted(self) -> Response:
        """Return the answer to a request for batches."""
        found = self.parsed(Response)
        if not (0 < found.buffer_bytes <= MAX_BATCH_BYTES or self.fds) or found.depth < 1:
            raise DeliveryError(
                f"the answer of {self.name} is invalid: buffer_bytes is {found.buffer_bytes} and depth {found.depth}"
            )
        return found

    def close(self) -> None:
        """Close the connection, and the descriptors that came."""
        self.sock.close()
        _close_all(self.fds)


def ask(
    sock: socket.socket,
    name: str,
    message: Mapping[str, Any],
    token: bytes | None = None,
    *,
    silence_s: float,
    over: threading.Event | None = None,
) -> ServiceAnswer:
    """Send a message to a service that greets, and return its answer; close the connection if there is none.

    `name` identifies the service. It has `silence_s` to open a store and plan, or over TCP for a sign of life.
    """
    fds: list[int] = []
    most = MAX_ANSWER_BYTES if message["ask"] in _LONG_ANSWERS else MAX_MESSAGE_BYTES
    try:
        found = receive(sock, silence_s)
        if "nonce" in found:
            try:
                send(sock, {**message, "protocol": PROTOCOL, "proof": proof_of(token, str(found["nonce"]))})
            except OSError as error:
                raise LostError(f"{name} has ended before it was asked: {error.strerror or error}") from error
            found = ALIVE
        elif "error" not in found:
            raise LostError(f"the greeting of {name} is invalid; is it a service of the same bucketline?")
        while found == ALIVE:
            if over is not None and over.is_set():
                raise LostError("the iteration has ended")
            found = receive(sock, silence_s, fds if sock.family == socket.AF_UNIX else None, max_bytes=most)
        if "error" in found:
            raise failure_of(found)
    except BaseException:
        sock.close()
        _close_all(fds)
        raise
    return ServiceAnswer(sock=sock, name=name, message=found, fds=fds)


def message_of(request: AnyRequest) -> dict[str, Any]:
    encoded = encode(request)
    assert isinstance(encoded, dict)
    return {"ask": next(name for name, kind in _KINDS.items() if kind is type(request)), **encoded}


def parse_request(message: Mapping[str, Any]) -> AnyRequest:
    """Parse a client's request."""
    entries = dict(message)
    if (version := entries.pop("protocol", None)) != PROTOCOL:
        raise DeliveryError(
            f"the client uses protocol version {version!r}, the service version {PROTOCOL}; use the same bucketline"
        )
    kind = _KINDS.get(str(asked := entries.pop("ask", None)))
    if kind is None:
        raise DeliveryError(f"the client's message requests {asked!r:.100}, expected one of {', '.join(_KINDS)}")
    return parsed(kind, entries, "the client's message")


def parsed(kind: type[T], message: Mapping[str, Any], item: str) -> T:
    """Return a message as a record."""
    try:
        return decode(kind, message, item)
    except TypedJsonError as error:
        raise DeliveryError(f"{item} is invalid: {error}") from error


def failure_as_json(error: BaseException) -> dict[str, str]:
    """Return a failure as a JSON message."""
    is_known = isinstance(error, BucketlineError)
    kinds = type(error).__mro__ if is_known else (DeliveryError,)  # the nearest class that a client knows
    kind = next(one.__name__ for one in kinds if getattr(errors, one.__name__, None) is one)
    text = str(error) if is_known else f"the service failed: {type(error).__name__}: {error}"
    return {"error": kind, "message": text[: MAX_MESSAGE_BYTES // 16]}


def failure_of(message: Mapping[str, Any]) -> BucketlineError:
    """Return the failure in a message, with the class that it had in the service."""
    kind = getattr(errors, str(message.get("error")), None)
    known = isinstance(kind, type) and issubclass(kind, BucketlineError)
    return (kind if known and kind is not None else DeliveryError)(str(message.get("message")))


def sent(config: LoaderConfig) -> LoaderConfig:
    """Return a loader's configuration for a service: nothing of this machine's disks and storage, and no choice of a window.

    The plan's window is in it; a service that chose one by its own cache would make another plan.
    """
    lanes = config.lanes if config.window else None
    return replace(config, lanes=lanes, cache=None, cache_bytes=None, endpoint=None, store_option=())


def allowed(config: LoaderConfig) -> LoaderConfig:
    """Return the configuration of a client on another machine within the limits."""
    prefetch_bytes = min(config.prefetch_bytes, _MAX_PREFETCH_BYTES)
    return replace(config, threads=min(config.threads, _MAX_THREADS), prefetch_bytes=prefetch_bytes)
