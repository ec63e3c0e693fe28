"""A folder on a web server: requests that go to that server and nowhere else, and answers that are what was requested.

The client of object storage follows redirects to any address, also to one that only the reader's network can reach. Here one is
followed on the same server, or from http to https on the same host; another one is refused by name.
"""

from __future__ import annotations

import re
import ssl
import time
import urllib.request
from base64 import b64encode
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import lru_cache
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, unquote, urljoin, urlsplit

from urllib3 import PoolManager, ProxyManager, Retry, Timeout
from urllib3.exceptions import HTTPError
from urllib3.util import parse_url

from bucketline.store.remote.retries import pause_after

if TYPE_CHECKING:
    from collections.abc import Iterator

    from urllib3 import BaseHTTPResponse, HTTPConnectionPool

_CONNECT_S = 5.0
MAX_REDIRECTS = 5
MAX_IDLE = 256  # connections to a server that are kept: as many as a loader has threads
MAX_SERVERS = 8  # on one host, to which connections are kept
_PIECE_BYTES = 1 << 20
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_AGAIN = (408, 429)  # and 5xx: statuses after which the request is made again
_PORTS = {"http": 80, "https": 443}
_ONCE = Retry.from_int(retries=False)  # no redirect either: that rule, and when to try again, is ours


class WebError(Exception):
    """A web server does not answer, or answers something else."""


class WebDeniedError(WebError):
    """A web server does not allow a request."""


class WebWithoutRangesError(WebError):
    """A web server answers a request of a range with the whole file."""


class _Server(NamedTuple):
    scheme: str
    host: str  # an IPv6 address in brackets
    port: int

    def led_to(self, target: str, location: str) -> tuple[_Server, str]:
        """Return where a redirect from a path here leads: a server and a path on it."""
        try:
            url = parse_url(urljoin(f"{self}{target}", location))
        except ValueError:  # urllib3's is one too
            raise WebError("the server redirects to something that is not a URL") from None
        if url.scheme not in _PORTS or not url.host:
            raise WebError(f"the server redirects to {url.scheme or 'no'}://, which is not a web server")
        other = _Server(url.scheme, url.host, url.port or _PORTS[url.scheme])
        if other != self and (self.scheme, other.scheme, other.host) != ("http", "https", self.host):
            raise WebError(f"the server redirects to another one, {other}; if you trust that, give its URL instead")
        return other, url.request_uri

    def __str__(self) -> str:
        return f"{self.scheme}://{self.host}:{self.port}"


@dataclass(slots=True)
class WebAnswer:
    """A file, or a range of it; see `obstore.GetResult`, which has the same names."""

    meta: Any
    _server: WebServer = field(repr=False)
    _name: str
    _span: tuple[int, int]  # of the file
    _response: BaseHTTPResponse = field(repr=False)

    def stream(self, min_chunk_size: int = _PIECE_BYTES) -> Iterator[bytes]:
        """Yield the bytes in pieces; what breaks off is requested again from there."""
        at, end = self._span
        most = min(max(min_chunk_size, 1), _PIECE_BYTES)
        until, tries = time.monotonic() + self._server.deadline_s, 0
        try:
            while at < end:
                try:
                    piece = self._response.read(min(most, end - at), decode_content=False)
                except HTTPError:
                    piece = b""
                if piece:
                    at += len(piece)
                    yield piece
                    if at < end and time.monotonic() > until:
                        raise WebError(f"{end - at} bytes had not come within {self._server.deadline_s:g} s")
                    continue
                tries += 1
                self.close()
                pause = pause_after(tries)
                if time.monotonic() + pause > until - self._server.deadline_s / 2:
                    raise WebError(f"the connection ended {end - at} bytes before the answer did")
                time.sleep(pause)
                again = self._server.get(self._name, (at, end))
                self._response = again._response
                if (again.meta["size"], again.meta["e_tag"]) != (self.meta["size"], self.meta["e_tag"]):
                    raise WebError("the file was replaced while it was read")
        finally:
            self.close()

    def close(self) -> None:
        """Close the connection, unless the answer was read to its end and the connection is kept; idempotent."""
        self._response.close()


class WebServer:
    """Requests of a folder's files. Safe for several threads, which share the connections."""

    def __init__(self, url: str, *, deadline_s: float) -> None:
        """`url` is the folder's, with the user and password that the server expects."""
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna").decode()
        scheme = parts.scheme.lower()
        self._server = _Server(scheme, f"[{host}]" if ":" in host else host, parts.port or _PORTS[scheme])
        self._folder = quote(unquote(parts.path)).rstrip("/")
        self.deadline_s = deadline_s
        read_s = deadline_s / 4
        self._timeout = Timeout(connect=min(_CONNECT_S, read_s), read=read_s)
        self._headers = {"Accept-Encoding": "identity", "User-Agent": "bucketline"}
        if "@" in parts.netloc:
            self._headers["Authorization"] = _basic(parts.netloc.rpartition("@")[0])
        self._connections = lru_cache(MAX_SERVERS)(_connections_to)

    def head(self, name: str) -> Any:  # noqa: ANN401 - as `obstore.head`
        """Return what a file is."""
        response = self._requested("HEAD", name, None)
        response.drain_conn()  # there is no body: the connection is kept
        return _meta(name, response, response.headers.get("Content-Length"))

    def get(self, name: str, span: tuple[int, int] | None = None) -> WebAnswer:
        """Request a file, or the bytes from the first number up to, not including, the second."""
        response = self._requested("GET", name, span)
        try:
            length = response.length_remaining
            if response.headers.get("Content-Encoding", "identity") != "identity" or length is None:
                raise WebError("the server does not say how many bytes it sends")
            if span is None:
                if response.status != HTTPStatus.OK:
                    raise WebError(f"the server answers with status {response.status}")
                found, total = (0, length), str(length)
            else:
                if response.status == HTTPStatus.OK:
                    raise WebWithoutRangesError("Range request not supported")
                match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
                if match is None:
                    raise WebError("the server does not say which range it sends")
                found, total = (int(match[1]), int(match[2]) + 1), match[3]
                if found[0] != span[0] or found[1] != min(span[1], int(total)):
                    raise WebError(f"bytes {span[0]} to {span[1]} were requested, {found[0]} to {found[1]} came")
                if length > found[1] - found[0]:
                    found = found[0], found[0] + length  # which the caller refuses
            return WebAnswer(_meta(name, response, total), self, name, found, response)
        except BaseException:
            response.close()
            raise

    def _requested(self, method: str, name: str, span: tuple[int, int] | None) -> BaseHTTPResponse:
        """Return the answer to a request, made again for half of the deadline where the server may answer later."""
        headers = self._headers if span is None else {**self._headers, "Range": f"bytes={span[0]}-{span[1] - 1}"}
        end, tries = time.monotonic() + self.deadline_s / 2, 0
        while True:
            try:
                response = self._followed(method, f"{self._folder}/{quote(name)}", headers)
            except HTTPError as error:
                why = _cause(error)
            else:
                if response.status in (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT):
                    return response
                response.close()
                if response.status in (HTTPStatus.NOT_FOUND, HTTPStatus.GONE):
                    raise FileNotFoundError(name)
                why = f"status {response.status} {response.reason}"
                if response.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
                    raise WebDeniedError(why)
                if response.status < HTTPStatus.INTERNAL_SERVER_ERROR and response.status not in _AGAIN:
                    raise WebError(f"the server answers with {why}")
            tries += 1
            pause = pause_after(tries)
            if time.monotonic() + pause > end:
                raise WebError(f"no answer after {tries} tries ({why})")
            time.sleep(pause)

    def _followed(self, method: str, target: str, headers: dict[str, str]) -> BaseHTTPResponse:
        """Return an answer that is not a redirect."""
        server = self._server
        for _ in range(MAX_REDIRECTS + 1):
            response = self._sent(method, server, target, headers)
            location = response.headers.get("Location")
            if not 300 <= response.status < 400 or location is None:
                return response
            response.close()
            server, target = server.led_to(target, location)
        raise WebError(f"the server redirects more than {MAX_REDIRECTS} times")

    def _sent(self, method: str, server: _Server, target: str, headers: dict[str, str]) -> BaseHTTPResponse:
        connections = self._connections(server)
        is_forwarded = connections.proxy is not None and server.scheme == "http"  # by a proxy, which is told the whole URL
        return connections.urlopen(
            method,
            f"{server}{target}" if is_forwarded else target,
            headers=headers,
            retries=_ONCE,
            redirect=False,
            assert_same_host=False,
            timeout=self._timeout,
            preload_content=False,
            decode_content=False,
        )


def _connections_to(server: _Server) -> HTTPConnectionPool:
    """Return the connections to a server, through a proxy if the environment names one."""
    options: dict[str, Any] = {"maxsize": MAX_IDLE}
    if server.scheme == "https":
        options["ssl_context"] = ssl.create_default_context()  # else the certificates are read again for each connection
    known = urllib.request.getproxies()
    proxy = known.get(server.scheme) or known.get("all")
    manager = PoolManager(**options)
    if proxy and not urllib.request.proxy_bypass(server.host.strip("[]")):
        url = parse_url(proxy if "://" in proxy else f"http://{proxy}")
        own = {"Proxy-Authorization": _basic(url.auth)} if url.auth else {}
        manager = ProxyManager(url._replace(auth=None).url, proxy_headers=own, **options)
    return manager.connection_from_host(server.host, server.port, server.scheme)


def _basic(auth: str) -> str:
    user, _, password = auth.partition(":")
    return f"Basic {b64encode(f'{unquote(user)}:{unquote(password)}'.encode()).decode()}"


def _cause(error: BaseException) -> str:
    """Return what went wrong first, without the client's own objects around it."""
    while isinstance(first := error.__cause__ or (error.args or (None,))[-1], BaseException):
        error = first
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


@lru_cache(64)  # the ranges of a file have the same
def _modified(text: str) -> datetime:
    with suppress(ValueError):
        return parsedate_to_datetime(text)
    return datetime.fromtimestamp(0, UTC)


def _meta(name: str, response: BaseHTTPResponse, num_bytes: str | None) -> dict[str, Any]:
    if num_bytes is None or not num_bytes.isdecimal():
        raise WebError("the server does not say how many bytes the file has")
    modified = _modified(response.headers.get("Last-Modified", ""))
    return {"path": name, "size": int(num_bytes), "last_modified": modified, "e_tag": response.headers.get("ETag")}
