"""Ranges of objects over plain HTTP, read into a buffer that is used again: in about half of the processor's time.

The client puts a range together in memory that is new for each, which costs as much as receiving it. Here, answers are accepted
only if they are exactly what was requested; otherwise the client makes the request again, and finds words for what is wrong.
Over TLS, where decrypting costs most, nothing is gained, and the client is used.
"""

from __future__ import annotations

import http.client
import re
import sys
import threading
import time
import urllib.request
from contextlib import suppress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from bucketline.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    RequestOf = Callable[[str], tuple[str, dict[str, str]] | None]

BUFFER_BYTES = 1 << 20  # of each thread
_CONNECT_S = 5.0
MAX_OTHER = 3  # answers in a row that are not what was requested, after which the client is left to it
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(?:\d+|\*)")


class _Kept:
    """A connection and a buffer, of one thread."""

    __slots__ = ("_buffer", "connection", "host")

    def __init__(self) -> None:
        self.connection: http.client.HTTPConnection | None = None
        self.host = ""
        self._buffer: memoryview | None = None

    @property
    def buffer(self) -> memoryview:
        if self._buffer is None:
            self._buffer = memoryview(bytearray(BUFFER_BYTES))
        return self._buffer

    def connect(self, host: str, read_s: float) -> http.client.HTTPConnection:
        if self.connection is None:
            self.connection, self.host = http.client.HTTPConnection(host, timeout=min(_CONNECT_S, read_s)), host
            self.connection.connect()
            self.connection.sock.settimeout(read_s)
        return self.connection

    def close(self) -> None:
        """Close the connection; idempotent."""
        connection, self.connection, self.host = self.connection, None, ""
        if connection is not None:
            with suppress(OSError):
                connection.close()

    def __del__(self) -> None:
        if not sys.is_finalizing():  # a thread that ends with the interpreter may be reading, and never returns the lock
            self.close()


class PlainHttp:
    """Requests ranges of one store's objects. Safe for several threads, each of which keeps a connection."""

    def __init__(self, *, deadline_s: float) -> None:
        """Connect to nothing yet."""
        self._deadline_s = deadline_s
        self._own = threading.local()
        self._direct_host: str | None = None  # is reached by plain HTTP, and without a proxy
        self._others = 0
        self._is_off = False

    def pieces(self, request_of: RequestOf, name: str, begin: int, end: int) -> Iterator[memoryview] | None:
        """Request a range of an object; return its bytes in pieces, each valid until the next. None: ask the client.

        `request_of` returns the object's URL and the headers that its request needs; None if there is no URL for it. It is not
        kept, or the connections of a folder that is gone would stay open until a garbage collection.
        """
        if self._is_off:
            return None
        found = request_of(name)
        if found is None:
            self._is_off = True
            return None
        url, headers = urlsplit(found[0]), found[1]
        if url.hostname != self._direct_host:
            if url.scheme != "http" or not url.hostname or _has_proxy(url.hostname):
                self._is_off = True
                return None
            self._direct_host = url.hostname
        answer = self._answer(name, url.netloc.rpartition("@")[2], f"{url.path}?{url.query}".rstrip("?"), headers, (begin, end))
        if answer is None:
            return None
        if not _is_range(answer, begin, end):
            self._kept.close()
            self._others += 1
            self._is_off = self._others >= MAX_OTHER
            return None
        self._others = 0
        return self._read(name, answer, end - begin)

    def _answer(
        self, name: str, host: str, target: str, headers: dict[str, str], asked: tuple[int, int]
    ) -> http.client.HTTPResponse | None:
        headers = {**headers, "Range": f"bytes={asked[0]}-{asked[1] - 1}"}
        kept = self._kept
        if kept.host != host:
            kept.close()
        for _ in range(1 + (kept.connection is not None)):  # the server may have closed it since
            try:
                connection = kept.connect(host, self._deadline_s / 4)
                connection.request("GET", target, headers=headers)
                return connection.getresponse()
            except TimeoutError:
                self._kept.close()
                raise StoreError(f"{name} was requested, and there was no answer within {self._deadline_s / 4:g} s") from None
            except (OSError, http.client.HTTPException, ValueError):
                self._kept.close()
        return None

    @property
    def _kept(self) -> _Kept:
        if not hasattr(self._own, "kept"):
            self._own.kept = _Kept()
        kept: _Kept = self._own.kept
        return kept

    def _read(self, name: str, answer: http.client.HTTPResponse, num_bytes: int) -> Iterator[memoryview]:
        buffer = self._kept.buffer
        end, at = time.monotonic() + self._deadline_s, 0
        try:
            while at < num_bytes:
                try:
                    count = answer.readinto(buffer[: num_bytes - at])
                except TimeoutError:
                    raise StoreError(f"{name} stalls: nothing came for {self._deadline_s / 4:g} s") from None
                except (OSError, http.client.HTTPException) as error:
                    raise StoreError(f"{name}: the connection broke ({error})") from None
                at += count
                if not count or (at < num_bytes and time.monotonic() > end):
                    raise StoreError(f"{name}: {at} of {num_bytes} bytes came before the connection or the time limit ended")
                yield buffer[:count]
        finally:
            if at < num_bytes or answer.will_close:
                self._kept.close()


def _is_range(answer: http.client.HTTPResponse, begin: int, end: int) -> bool:
    """Return whether an answer has exactly the bytes from `begin` up to `end`, as they are."""
    found = _CONTENT_RANGE.fullmatch(answer.getheader("Content-Range", ""))
    is_plain = answer.getheader("Content-Encoding", "identity") == "identity" and not answer.chunked
    is_whole = answer.status == http.client.PARTIAL_CONTENT and answer.length == end - begin
    return is_plain and is_whole and found is not None and found.groups() == (str(begin), str(end - 1))


def _has_proxy(host: str) -> bool:
    known = urllib.request.getproxies()
    return bool("http" in known or "all" in known) and not urllib.request.proxy_bypass(host)
