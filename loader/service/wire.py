"""What a client and a service say to each other: a greeting, one request, one response, and the layouts of batches.

Each message is a JSON object: its length (four bytes, big-endian) and that many bytes. Nothing else is accepted, and nothing is
unpickled. The service greets with a nonce, and the client's request carries its proof of the token, which over a unix socket is
empty: there, the system says whose process it is.
"""

from __future__ import annotations

import functools
import hmac
import json
import math
import os
import secrets
import socket
import struct
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import torch

from bucketline import errors
from bucketline.errors import BucketlineError, DeliveryError
from bucketline.loader.collate.buffers import ALIGN_BYTES, Field, FilledBuffer
from bucketline.loader.config import LoaderConfig  # noqa: TC001 - `decode` reads the annotations at run time
from bucketline.loader.mixture import StoreId  # noqa: TC001 - likewise
from bucketline.loader.plan.epoch_steps import Cursor  # noqa: TC001 - likewise
from bucketline.loader.service.sockets import shut
from bucketline.typed_json import TypedJsonError, decode, encode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor


PROTOCOL = 8
MAX_MESSAGE_BYTES = 1 << 20  # that a service accepts
MAX_ANSWER_BYTES = 1 << 29  # that a client accepts where it has requested manifests or names
MAX_BATCH_BYTES = 1 << 30  # that a client on another machine can request
REQUEST_S = 10.0  # time limit for a client's proof and request
GREETING_S = 60.0  # for a service to greet
ANSWER_S = 600.0  # and to open a store and plan
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """The response to a `Request`; over a unix socket with the descriptor of the shared memory."""

    buffer_bytes: int  # size of the buffer of one batch
    depth: int  # micro-batches filled ahead


@dataclass(frozen=True, slots=True, kw_only=True)
class StoresRequest:
    """The manifests of all stores at their newest generations, or of one store at one generation."""

    store_id: str | None = None
    generation: int | None = None


class ServedManifest(NamedTuple):
    """A store as the service tells of it, in response to a `StoresRequest`."""

    place: str
    repeats: int | float
    manifest: str  # as it is in its file


@dataclass(frozen=True, slots=True, kw_only=True)
class NamesRequest:
    """The sample ids that a client requests, by their digests in hexadecimal."""

    stores: tuple[StoreId, ...]
    digests: tuple[str, ...]


AnyRequest: TypeAlias = Request | StoresRequest | NamesRequest
_KINDS = {"batches": Request, "stores": StoresRequest, "names": NamesRequest}


class LostError(DeliveryError):
    """The other side has ended, is silent, or sends anything but what is expected."""


class FullError(LostError):
    """The service has no room for another client now: one over TCP tries again."""


def send(sock: socket.socket, message: Mapping[str, Any], fd: int | None = None, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
    """Send one message, with a descriptor if one is given."""
    body = json.dumps(message).encode()
    if len(body) > max_bytes:
        raise DeliveryError(f"a message has {len(body)} bytes, expected at most {max_bytes}")
    data = _LENGTH.pack(len(body)) + body
    if fd is not None:
        data = data[socket.send_fds(sock, [data], [fd]) :]
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a service has answered, and the connection that it came by."""

    sock: socket.socket
    name: str  # of the service, in messages
    message: dict[str, Any]
    fds: list[int]

    def parsed(self, kind: type[T]) -> T:
        """Return what was requested, as a record."""
        return _parsed(kind, self.message.get("answer"), f"the answer of {self.name}")

    def response(self) -> Response:
        response = self.parsed(Response)
        if not (0 < response.buffer_bytes <= MAX_BATCH_BYTES or self.fds) or response.depth < 1:
            raise DeliveryError(
                f"the answer of {self.name} is invalid: buffer_bytes is {response.buffer_bytes} and depth {response.depth}"
            )
        return response

    def close(self) -> None:
        """Close the connection, and the descriptors that came."""
        self.sock.close()
        for fd in self.fds:
            os.close(fd)


def ask(sock: socket.socket, name: str, message: Mapping[str, Any], token: bytes | None = None) -> Answer:
    """Send a message to a service that greets, and return its answer; close the connection if there is none.

    `name` identifies the service.
    """
    fds: list[int] = []
    try:
        received = receive(sock, GREETING_S)
        if "nonce" in received:
            try:
                send(sock, {**message, "protocol": PROTOCOL, "proof": proof_of(token, str(received["nonce"]))})
            except OSError as error:
                raise LostError(f"{name} has ended before it was asked: {error.strerror or error}") from error
            max_bytes = MAX_MESSAGE_BYTES if message["ask"] == "batches" else MAX_ANSWER_BYTES
            received = receive(sock, ANSWER_S, fds if sock.family == socket.AF_UNIX else None, max_bytes=max_bytes)
        elif "error" not in received:
            raise LostError(f"the greeting of {name} is invalid; is it a service of the same bucketline?")
        if "error" in received:
            raise failure_of(received)
    except BaseException:
        Answer(sock=sock, name=name, message={}, fds=fds).close()
        raise
    return Answer(sock=sock, name=name, message=received, fds=fds)


def message_of(request: AnyRequest) -> dict[str, Any]:
    encoded = encode(request)
    assert isinstance(encoded, dict)
    return {"ask": next(name for name, kind in _KINDS.items() if kind is type(request)), **encoded}


def parse_request(message: Mapping[str, Any]) -> AnyRequest:
    entries = dict(message)
    if (version := entries.pop("protocol", None)) != PROTOCOL:
        raise DeliveryError(
            f"the client uses protocol version {version!r}, the service version {PROTOCOL}; use the same bucketline"
        )
    kind = _KINDS.get(str(verb := entries.pop("ask", None)))
    if kind is None:
        raise DeliveryError(f"the client's message requests {verb!r:.100}, expected one of {', '.join(_KINDS)}")
    return _parsed(kind, entries, "the client's message")


def _parsed(kind: type[T], message: object, item: str) -> T:
    try:
        return decode(kind, message, item)
    except TypedJsonError as error:
        raise DeliveryError(f"{item} is invalid: {error}") from error


def failure_as_json(error: BaseException) -> dict[str, str]:
    is_known = isinstance(error, BucketlineError)
    kinds = type(error).__mro__ if is_known else (DeliveryError,)  # the nearest class that a client knows
    kind = next(known.__name__ for known in kinds if known is FullError or getattr(errors, known.__name__, None) is known)
    text = str(error) if is_known else f"the service failed: {type(error).__name__}: {error}"
    return {"error": kind, "message": text[: MAX_MESSAGE_BYTES // 16]}


def failure_of(message: Mapping[str, Any]) -> BucketlineError:
    """Return the failure in a message, with the class that it had in the service."""
    kind = FullError if message.get("error") == FullError.__name__ else getattr(errors, str(message.get("error")), None)
    is_ours = isinstance(kind, type) and issubclass(kind, BucketlineError)
    return (kind if is_ours and kind is not None else DeliveryError)(str(message.get("message")))


def proof_of(token: bytes | None, nonce: str) -> str:
    """Return the proof that its maker has the token, which itself is never sent; an empty text if there is none."""
    # JSON can have half a surrogate pair, which is not text
    return "" if token is None else hmac.new(token, f"bucketline {nonce}".encode(errors="replace"), "sha256").hexdigest()


# What is counted of clients: batches filled for those of this machine, or sent to others, their samples and bytes of tensors;
# how often clients waited for a batch; iterations that ended with an error. And `waited_us`, for how long they waited.
COUNTED = ("batches", "samples", "bytes", "waits", "errors")


def sent(config: LoaderConfig) -> LoaderConfig:
    """Return a loader's configuration for a service: nothing of this machine's disks and storage, and no choice of a window.

    The plan's window is in it; a service that chose one by its own cache would make another plan.
    """
    lanes = config.lanes if config.window else None
    return replace(config, lanes=lanes, cache=None, cache_bytes=None, endpoint=None, store_option=())


class Client:
    """A client as its service sees it: its connection, from the greeting to the end. A subclass is a way to send batches."""

    max_clients: int  # that have proved that they have the token
    max_strangers: int  # that have not, yet

    def __init__(self, sock: socket.socket, token: bytes | None = None, host: str = "") -> None:
        self.sock, self._token, self.host = sock, token, host
        self.is_stranger, self.is_known = True, False  # which has one slot or the other; neither, once it is to end
        self.counts = Counter(dict.fromkeys((*COUNTED, "waited_us"), 0))  # all keys at once: other threads iterate over it

    def request(self) -> dict[str, Any]:
        """Greet, and return the client's message once it has proved that it has the token."""
        nonce = secrets.token_hex(16)
        send(self.sock, {"bucketline": PROTOCOL, "nonce": nonce})
        message = receive(self.sock, REQUEST_S)
        proof = message.pop("proof", None)
        expected = proof_of(self._token, nonce).encode()
        if not isinstance(proof, str) or not hmac.compare_digest(proof.encode(errors="replace"), expected):
            raise DeliveryError("the token is not the server's; use the same token file on both sides")
        return message

    def permitted(self, config: LoaderConfig) -> LoaderConfig:
        """Return the configuration within the limits of this kind of client."""
        return config

    def answer(self, record: object, fd: int | None = None) -> None:
        """Send the only answer, with a descriptor if one is given."""
        send(self.sock, {"answer": encode(record)}, fd, MAX_ANSWER_BYTES)

    def refuse(self, error: Exception) -> None:
        """Send an error in place of an answer."""
        with suppress(OSError, BucketlineError):
            send(self.sock, failure_as_json(error))

    def count(self, filled: FilledBuffer) -> None:
        self.counts.update(batches=1, samples=filled.fields[0].shape[0], bytes=filled.num_bytes)

    def shut(self) -> None:
        """End the connection, for the thread that waits at it."""
        shut(self.sock)


BATCH, END = 1, 2  # kinds of frames; an end has the failure, if one ends the iteration
# Before a batch, in shared memory as in a frame: kind, step, micro step, epoch, bytes of the layout (JSON) or message that
# follows, and of the tensors after it.
HEAD = struct.Struct("<BQQQIQ")


_layouts: dict[tuple[int, str, int], tuple[object, bytes]] = {}  # by the id of the fields, which each entry keeps alive
_MOST_LAYOUTS = 4096


def layout_of(filled: FilledBuffer) -> bytes:
    """Return the bucket, bytes and fields of a filled buffer; equal fields are one object, whose layout is made once."""
    key = id(filled.fields), filled.bucket, filled.num_bytes
    cached = _layouts.get(key)
    if cached is None:
        described = [
            [field.name, str(field.dtype).removeprefix("torch."), field.shape, field.begin, field.num_bytes]
            for field in filled.fields
        ]
        if len(_layouts) >= _MOST_LAYOUTS:
            _layouts.clear()
        cached = _layouts[key] = filled.fields, json.dumps([filled.bucket, filled.num_bytes, described]).encode()
    return cached[1]


def head_of(filled: FilledBuffer, layout: bytes) -> bytes:
    """Return the head of a batch, and the layout that follows it."""
    sizes = (len(layout), filled.num_bytes)
    return HEAD.pack(BATCH, filled.step, filled.micro_step, filled.epoch, *sizes) + layout


def filled_as_laid_out(buffer: Tensor, position: Sequence[int], layout: bytes) -> FilledBuffer:
    """Return the description of a buffer from a layout; `position` is the step, micro step and epoch of its head."""
    bucket, num_bytes, fields = parse_layout(layout)
    step, micro_step, epoch = position
    return FilledBuffer(
        buffer=buffer, fields=fields, num_bytes=num_bytes, step=step, micro_step=micro_step, epoch=epoch, bucket=bucket
    )


@functools.lru_cache(maxsize=1 << 12)
def parse_layout(layout: bytes) -> tuple[str, int, list[Field]]:
    """Return the bucket, bytes and fields of a layout. One that is invalid raises a ValueError, TypeError or RecursionError."""
    bucket, num_bytes, described = json.loads(layout)
    placed = [_field(*field) for field in described]
    if any(field.begin + field.num_bytes > num_bytes for field in placed):
        raise ValueError(f"it has a tensor beyond its {num_bytes} bytes")
    return bucket, num_bytes, placed


def _field(name: str, dtype: str, shape: list[int], begin: int, num_bytes: int) -> Field:
    torch_dtype = getattr(torch, dtype, None)
    if not isinstance(torch_dtype, torch.dtype):
        raise TypeError(f"{dtype} is not a dtype")
    if any(type(number) is not int or number < 0 for number in (*shape, begin, num_bytes)) or begin % ALIGN_BYTES:
        raise ValueError(f"{name} has the shape {shape} and {num_bytes} bytes from {begin}")
    if num_bytes != torch_dtype.itemsize * math.prod(shape):
        raise ValueError(f"{name} has {num_bytes} bytes for {dtype} {shape}")
    return Field(name=name, dtype=torch_dtype, shape=tuple(shape), begin=begin, num_bytes=num_bytes)
