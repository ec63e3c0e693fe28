"""Handshake with rank 0: each peer sends one line of JSON with the run's secret; anything else is disconnected.

All peers are served concurrently: a stranger that sends nothing, or one byte at a time, delays no rank.
"""

from __future__ import annotations

import hmac
import json
import selectors
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic

GREETING_BYTES = 4096  # of the line, including its newline
GREETING_S = 60.0  # a peer that has not sent its line by then is disconnected
MOST_STRANGERS = 256  # unidentified connections at a time; the oldest is dropped first


@dataclass(slots=True, kw_only=True, eq=False)
class _Guest:
    """A connection that has not identified itself yet."""

    peer: socket.socket
    until: float
    said: bytearray = field(default_factory=bytearray)


class Reception:
    """Accepts connections from the expected ranks."""

    def __init__(self, server: socket.socket, secret: str, ranks: set[int]) -> None:
        self._server, self._secret, self._ranks = server, secret, ranks
        self._guests: list[_Guest] = []  # in order of arrival
        self._selector = selectors.DefaultSelector()
        self.came: dict[int, tuple[socket.socket, str]] = {}  # each rank's connection and process name

    def wait(self, within_s: float) -> dict[int, tuple[socket.socket, str]]:
        """Wait for all ranks and return `came`.

        Raises:
            TimeoutError: if a rank has not connected in time; the message names it.
        """
        until = monotonic() + within_s
        self._server.setblocking(False)
        with self._selector:
            self._selector.register(self._server, selectors.EVENT_READ)
            try:
                while missing := self._ranks - self.came.keys():
                    if monotonic() >= until:
                        raise TimeoutError(f"rank {min(missing)} did not connect within {within_s:.0f} s")
                    nearest = min([until, *(guest.until for guest in self._guests)])
                    for key, _ in self._selector.select(max(0.0, nearest - monotonic())):
                        self._hear(key.data)
                    for late in [guest for guest in self._guests if guest.until <= monotonic()]:
                        self._send_away(late)
            except BaseException:
                for peer, _ in self.came.values():
                    peer.close()
                raise
            finally:
                while self._guests:
                    self._send_away(self._guests[0])
        return self.came

    def _hear(self, guest: _Guest | None) -> None:
        """Accept a new connection, or read more of a greeting."""
        if guest is None:
            self._welcome()
        elif guest in self._guests:  # not disconnected in the meantime
            who = _heard(guest, self._secret)
            if isinstance(who, tuple) and who[0] in self._ranks - self.came.keys():
                self._guests.remove(guest)
                self._selector.unregister(guest.peer)
                self.came[who[0]] = (guest.peer, who[1])
            elif who is not None:
                self._send_away(guest)

    def _welcome(self) -> None:
        try:
            peer, _ = self._server.accept()
        except OSError:
            return  # already gone
        peer.setblocking(False)
        if len(self._guests) == MOST_STRANGERS:
            self._send_away(self._guests[0])
        self._guests.append(_Guest(peer=peer, until=monotonic() + GREETING_S))
        self._selector.register(peer, selectors.EVENT_READ, self._guests[-1])

    def _send_away(self, guest: _Guest) -> None:
        self._guests.remove(guest)
        self._selector.unregister(guest.peer)
        guest.peer.close()


def _heard(guest: _Guest, secret: str) -> tuple[int, str] | bool | None:
    """Read more of a greeting; return rank and process, False if it is invalid, None if it is incomplete."""
    try:
        # do not read past the newline: what follows is the rank's first message
        ahead = guest.peer.recv(GREETING_BYTES - len(guest.said), socket.MSG_PEEK)
        end = ahead.find(b"\n")
        guest.said += guest.peer.recv(len(ahead) if end < 0 else end + 1)
    except BlockingIOError:
        return None
    except OSError:
        return False
    if not ahead:
        return False
    if end < 0:
        return None if len(guest.said) < GREETING_BYTES else False
    with suppress(ValueError, RecursionError):
        match json.loads(guest.said):
            case {"secret": str(told), "rank": int(rank), "process": str(process)} if _is_same(told, secret):
                return rank, process
    return False


def _is_same(told: str, secret: str) -> bool:
    return hmac.compare_digest(told.encode("utf-8", "surrogatepass"), secret.encode())
