"""Messages between ranks, as JSON, so that receiving one cannot execute code."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from bucketline.typed_json import decode, encode

if TYPE_CHECKING:
    from bucketline.typed_json import Json


@dataclass(frozen=True, slots=True)
class Value:
    """A value from a rank or from rank 0."""

    value: Json


@dataclass(frozen=True, slots=True)
class Note:
    """To rank 0, which does not wait for it."""

    value: Json


@dataclass(frozen=True, slots=True)
class ListingPart:
    """From rank 0: a part of the listing."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Alive:
    """Heartbeat: the sender is still at work."""


@dataclass(frozen=True, slots=True)
class Stop:
    """From rank 0: commit, send a LastWord and end with this exit code."""

    exit_code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LastWord:
    """To rank 0: why this rank ends; `cause` is None if it was told to."""

    cause: str | None
    exit_code: int
    num_encoded: int


Message = Value | Note | ListingPart | Alive | Stop | LastWord
_KINDS: dict[str, type[Value | Note | Alive | Stop | LastWord]] = {
    "value": Value,
    "note": Note,
    "alive": Alive,
    "stop": Stop,
    "last word": LastWord,
}
_IS_PART = b"P"  # first byte of a part of the listing; all other messages are JSON objects


def message_bytes(message: Message) -> bytes:
    """Serialise a message."""
    if isinstance(message, ListingPart):
        return _IS_PART + message.data
    kind = next(name for name, cls in _KINDS.items() if isinstance(message, cls))
    return json.dumps({kind: encode(message)}).encode("ascii")


def from_bytes(data: bytes) -> Message:
    """Parse a message.

    Raises:
        ValueError: if the data is not a message.
    """
    if data.startswith(_IS_PART):
        return ListingPart(data[len(_IS_PART) :])
    document = json.loads(data)
    if type(document) is not dict or len(document) != 1 or next(iter(document)) not in _KINDS:
        raise ValueError(f"not a message: {data[:200]!r}")
    ((kind, fields),) = document.items()
    if kind in ("value", "note"):
        return cast("Message", _KINDS[kind](fields["value"]))  # type: ignore[call-arg]
    return cast("Message", decode(_KINDS[kind], fields))
