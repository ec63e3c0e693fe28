"""A folder on a web server: requests that go to that server and nowhere else, and answers that are what was requested.

The client of object storage follows redirects to any address, also to one that only the reader's network can reach. Here one is
followed on the same server, or from http to https on the same host; another one is refused by name.
"""

from __future__ import annotations

import http.client
import re
import ssl
import sys
import threading
import time
import urllib.request
import weakref
from base64 import b64encode
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urljoin, urlsplit

from bucketline.store.remote.pauses import pause_after

if TYPE_CHECKING:
    from collections.abc import Iterator
    from urllib.parse import SplitResult

CONNECT_S = 5.0
MAX_REDIRECTS = 5
MAX_IDLE = 64  # connections that are kept
BUFFER_BYTES = 1 << 20
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_AGAIN = (408, 429)  # and 5xx: statuses after which the request is made again
_PORTS = {"http": 80, "https": 443}


class WebError(Exception):
    """A web server does not answer, or answers something else."""


class WebDeniedError(WebError):
    """A web server does not allow a request."""


class WebWithoutRangesError(WebError):
    """A web server answers a request of a range with the whole file."""


@dataclass(frozen=True, slots=True)
class _Origin:
    scheme: str
    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> _Origin:
        parts = urlsplit(url)
        scheme = parts.scheme.lower()
        if scheme not in _PORTS or not parts.hostname:
            raise WebError(f"redirects to {scheme or 'no'}://, which is not a web server")
        return cls(scheme, parts.hostname, parts.port or _PORTS[scheme])

    def may_lead_to(self, other: _Origin) -> bool:
        """Return whether a redirect from here to another server is followed."""
        return self == other or (self.scheme == "http" and other.scheme == "https" and self.host == other.host)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class _Connection:
    http: http.client.HTTPConnection
    origin: _Origin
    is_to_proxy: bool = False  # which is told the whole URL
    headers: dict[str, str] = field(default_factory=dict)  # for the proxy

    def close(self) -> None:
        with suppress(OSError):
            self.http.close()

    def __del__(self) -> None:
        if not sys.is_finalizing():  # a thread that ends with the interpreter may be reading, and never returns the lock
            self.close()


@dataclass(slots=True)
class WebAnswer:
    """A file, or a range of it; see `obstore.GetResult`, which has the same names."""

    meta: Any
    _server: WebServer = field(repr=False)
    _name: str
    _span: tuple[int, int]  # of the file
    _connection: _Connection = field(repr=False)
    _response: http.client.HTTPResponse = field(repr=False)
    _is_closed: bool = False

    def stream(self, min_chunk_size: int = BUFFER_BYTES) -> Iterator[memoryview]:
        """Yield the bytes in pieces, each valid until the next; what breaks off is requested again from there."""
        at, end = self._span
        buffer = memoryview(bytearray(min(max(min_chunk_size, 1), BUFFER_BYTES, max(1, end - at))))
        until, tries = time.monotonic() + self._server.deadline_s, 0
        try:
            while at < end:
                try:
                    count = self._response.readinto(buffer[: end - at])
                except (OSError, http.client.HTTPException):
                    count = 0
                if count:
                    at += count
                    yield buffer[:count]
                    if at < end and time.monotonic() > until:
                        raise WebError(f"{end - at} bytes had not come within {self._server.deadline_s:g} s")
                    continue
                tries += 1
                _end(self._connection, self._response)
                pause = pause_after(tries)
                if time.monotonic() + pause > until - self._server.deadline_s / 2:
                    raise WebError(f"the connection ended {end - at} bytes before the answer did")
                time.sleep(pause)
                again = self._server.get(self._name, (at, end))
                if (again.meta["size"], again.meta["e_tag"]) != (self.meta["size"], self.meta["e_tag"]):
                    raise WebError("the file was replaced while it was read")
                self._connection, self._response = again._connection, again._response
                again._is_closed = True  # this one closes them
        finally:
            self.close()

    def close(self) -> None:
        """Keep the connection if the answer was read to its end, else close it; idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._server.keep(self._connection, self._response)


class WebServer:
    """Requests of a folder's files. Safe for several threads, which share the connections."""

    def __init__(self, url: str, *, deadline_s: float) -> None:
        """`url` is the folder's, with the user and password that the server expects."""
        parts = urlsplit(url)
        self._origin = _Origin.of(url)
        host = f"[{self._origin.host}]" if ":" in self._origin.host else self._origin.host
        self._folder = f"{self._origin.scheme}://{host}:{self._origin.port}{quote(unquote(parts.path)).rstrip('/')}"
        self.deadline_s = deadline_s
        self._headers = {"Accept-Encoding": "identity", "User-Agent": "bucketline"}
        if parts.username is not None:
            self._headers["Authorization"] = _basic(parts)
        self._idle: list[_Connection] = []
        weakref.finalize(self, _close_all, self._idle).atexit = False  # before the sockets' own finalizers, which warn
        self._lock = threading.Lock()
        self._tls: ssl.SSLContext | None = None

    def head(self, name: str) -> Any:  # noqa: ANN401 - as `obstore.head`
        """Return what a file is.

        Raises:
            FileNotFoundError, WebError: as `get`.
        """
        connection, response = self._requested("HEAD", name, None)
        self.keep(connection, response)
        return _meta(name, response, response.getheader("Content-Length"))

    def get(self, name: str, span: tuple[int, int] | None = None) -> WebAnswer:
        """Request a file, or the bytes from the first number up to, not including, the second.

        Raises:
            FileNotFoundError: if it is not there.
            WebError: if the server does not answer, answers something else, or redirects to another one.
        """
        connection, response = self._requested("GET", name, span)
        try:
            if response.getheader("Content-Encoding", "identity") != "identity" or response.length is None:
                raise WebError("the server does not say how many bytes it sends")
            if span is None:
                if response.status != http.client.OK:
                    raise WebError(f"the server answers with status {response.status}")
                found, total = (0, response.length), str(response.length)
            else:
                if response.status == http.client.OK:
                    raise WebWithoutRangesError("Range request not supported")
                match = _CONTENT_RANGE.fullmatch(response.getheader("Content-Range", ""))
                if match is None:
                    raise WebError("the server does not say which range it sends")
                found, total = (int(match[1]), int(match[2]) + 1), match[3]
                if found[0] != span[0] or found[1] != min(span[1], int(total)):
                    raise WebError(f"bytes {span[0]} to {span[1]} were requested, {found[0]} to {found[1]} came")
                if response.length > found[1] - found[0]:
                    found = found[0], found[0] + response.length  # which the caller refuses
            return WebAnswer(_meta(name, response, total), self, name, found, connection, response)
        except BaseException:
            _end(connection, response)
            raise

    def keep(self, connection: _Connection, response: http.client.HTTPResponse) -> None:
        """Keep a connection whose answer was read to its end; close another one."""
        with self._lock:
            is_open = connection.http.sock is not None and not response.will_close
            if is_open and response.isclosed() and len(self._idle) < MAX_IDLE:
                self._idle.append(connection)
                return
        _end(connection, response)

    def _requested(self, method: str, name: str, span: tuple[int, int] | None) -> tuple[_Connection, http.client.HTTPResponse]:
        """Return the answer to a request, made again for half of the deadline where the server may answer later."""
        headers = self._headers if span is None else {**self._headers, "Range": f"bytes={span[0]}-{span[1] - 1}"}
        end, tries = time.monotonic() + self.deadline_s / 2, 0
        while True:
            try:
                connection, response = self._followed(method, f"{self._folder}/{quote(name)}", headers)
            except (OSError, http.client.HTTPException) as error:
                why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            else:
                if response.status in (http.client.OK, http.client.PARTIAL_CONTENT):
                    return connection, response
                _end(connection, response)
                if response.status in (http.client.NOT_FOUND, http.client.GONE):
                    raise FileNotFoundError(name)
                why = f"status {response.status} {response.reason}"
                if response.status in (http.client.UNAUTHORIZED, http.client.FORBIDDEN):
                    raise WebDeniedError(why)
                if response.status < http.client.INTERNAL_SERVER_ERROR and response.status not in _AGAIN:
                    raise WebError(f"the server answers with {why}")
            tries += 1
            pause = pause_after(tries)
            if time.monotonic() + pause > end:
                raise WebError(f"no answer after {tries} tries ({why})")
            time.sleep(pause)

    def _followed(self, method: str, url: str, headers: dict[str, str]) -> tuple[_Connection, http.client.HTTPResponse]:
        """Return an answer that is not a redirect."""
        for _ in range(MAX_REDIRECTS + 1):
            origin = _Origin.of(url)
            connection, response = self._sent(method, origin, url, headers)
            target = response.getheader("Location")
            if not 300 <= response.status < 400 or target is None:
                return connection, response
            _end(connection, response)
            url = urljoin(url, target)
            other = _Origin.of(url)
            if not origin.may_lead_to(other):
                raise WebError(f"the server redirects to another one, {other}; if you trust that, give its URL instead")
        raise WebError(f"the server redirects more than {MAX_REDIRECTS} times")

    def _sent(
        self, method: str, origin: _Origin, url: str, headers: dict[str, str]
    ) -> tuple[_Connection, http.client.HTTPResponse]:
        parts = urlsplit(url)
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        while True:
            connection, is_kept = self._connection(origin)
            try:
                place = f"{parts.scheme}://{parts.netloc}" if connection.is_to_proxy else ""
                connection.http.request(method, place + target, headers={**headers, **connection.headers})
                return connection, connection.http.getresponse()
            except (OSError, http.client.HTTPException):
                connection.close()
                if not is_kept:  # the server may have closed one that was kept
                    raise

    def _connection(self, origin: _Origin) -> tuple[_Connection, bool]:
        """Return a connection to a server, and whether it was kept from an earlier request."""
        with self._lock:
            for kept in reversed(self._idle):
                if kept.origin == origin:
                    self._idle.remove(kept)
                    return kept, True
        connection: http.client.HTTPConnection
        read_s = self.deadline_s / 4
        proxy = _proxy_of(origin)
        host, port = (origin.host, origin.port) if proxy is None else (proxy.hostname or "", proxy.port or 80)
        if origin.scheme == "https":
            if self._tls is None:
                self._tls = ssl.create_default_context()
            connection = http.client.HTTPSConnection(host, port, timeout=min(CONNECT_S, read_s), context=self._tls)
        else:
            connection = http.client.HTTPConnection(host, port, timeout=min(CONNECT_S, read_s))
        own = {} if proxy is None or not proxy.username else {"Proxy-Authorization": _basic(proxy)}
        if proxy is not None and origin.scheme == "https":
            connection.set_tunnel(origin.host, origin.port, headers=own)
        connection.connect()
        connection.sock.settimeout(read_s)
        is_to_proxy = proxy is not None and origin.scheme == "http"
        return _Connection(connection, origin, is_to_proxy, own if is_to_proxy else {}), False


def _close_all(connections: list[_Connection]) -> None:
    for connection in connections:
        connection.close()


def _end(connection: _Connection, response: http.client.HTTPResponse) -> None:
    with suppress(OSError):
        response.close()  # which may own the socket
    connection.close()


def _basic(parts: SplitResult) -> str:
    pair = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
    return f"Basic {b64encode(pair.encode()).decode()}"


def _proxy_of(origin: _Origin) -> SplitResult | None:
    known = urllib.request.getproxies()
    proxy = known.get(origin.scheme) or known.get("all")
    if not proxy or urllib.request.proxy_bypass(origin.host):
        return None
    return urlsplit(proxy if "://" in proxy else f"http://{proxy}")


def _meta(name: str, response: http.client.HTTPResponse, num_bytes: str | None) -> dict[str, Any]:
    if num_bytes is None or not num_bytes.isdecimal():
        raise WebError("the server does not say how many bytes the file has")
    modified = datetime.fromtimestamp(0, UTC)
    with suppress(TypeError, ValueError):
        modified = parsedate_to_datetime(response.getheader("Last-Modified", ""))
    return {"path": name, "size": int(num_bytes), "last_modified": modified, "e_tag": response.getheader("ETag")}
