"""A client as its service sees it: its connection, from the greeting to the end of its iteration."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

from bucketline.errors import BucketlineError, DeliveryError
from bucketline.loader.service.sockets import shut
from bucketline.loader.service.tokens import is_proof, new_nonce
from bucketline.loader.service.wire import MAX_ANSWER_BYTES, PROTOCOL, failure_as_json, receive, send

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

    from bucketline.loader.collate.batch_builder import BatchBuilder
    from bucketline.loader.config import LoaderConfig
    from bucketline.loader.service.wire import Request
    from bucketline.loader.stats import Stats

REQUEST_S = 10.0  # time limit for a client's proof and request


class Client(ABC):
    """A client. A subclass is a way to send batches."""

    max_clients: ClassVar[int]  # that have proved that they have the token
    max_strangers: ClassVar[int]  # that have not, yet

    def __init__(self, sock: socket.socket, token: bytes | None = None, host: str = "") -> None:
        self.sock, self._token, self.host = sock, token, host

    @abstractmethod
    def admit(self) -> None:
        """Let the connection in, before anything is said."""

    @abstractmethod
    def begin(self, builder: BatchBuilder, wanted: Request) -> dict[str, Any]:
        """Answer a request for batches; return who the client is, for statistics."""

    @abstractmethod
    def run(self) -> None:
        """Send batches until all are sent, the client leaves or `stop` is called."""

    @abstractmethod
    def stop(self, failure: DeliveryError) -> None:
        """Let the iteration end with a failure; `run` returns soon."""

    @abstractmethod
    def stats(self) -> Stats:
        """Return the statistics of `run` so far."""

    @abstractmethod
    def close(self) -> None:
        """End everything and close the connection."""

    def request(self) -> dict[str, Any]:
        """Greet, and return the client's message once it has proved that it has the token."""
        self.admit()
        nonce = new_nonce()
        send(self.sock, {"bucketline": PROTOCOL, "nonce": nonce})
        message = receive(self.sock, REQUEST_S)
        if not is_proof(message.pop("proof", None), self._token, nonce):
            raise DeliveryError("the token is not the server's; use the same token file on both sides")
        return message

    def permitted(self, config: LoaderConfig) -> LoaderConfig:
        """Return the configuration within the limits of this kind of client."""
        return config

    def answer(self, message: Mapping[str, Any], fd: int | None = None) -> None:
        """Send the only answer, with a descriptor if one is given."""
        send(self.sock, message, fd, MAX_ANSWER_BYTES)

    def refuse(self, error: Exception) -> None:
        """Send an error in place of an answer."""
        with suppress(OSError, BucketlineError):
            self.answer(failure_as_json(error))

    def shut(self) -> None:
        """End the connection, for the thread that waits at it."""
        shut(self.sock)
