"""Sockets of a service and of its clients: addresses, a unix socket that only its user reaches, and what TCP needs.

In a folder that others may write, anybody can listen at a name or lock files that they can open. So a socket is created under a
lock on a file that only this user may open, and a client checks who listens before it sends anything.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import re
import select
import socket
import ssl
import stat
import struct
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from bucketline.errors import DeliveryError, UsageError
from bucketline.files.paths import redacted
from bucketline.option_value import expect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

AUTO = "auto"  # a child process of the loader's own
UNIX, _TCP = "unix:", "tcp://"
MAX_PATH_BYTES = 107  # Linux keeps 108 for a socket's path, and its end
MIN_TOKEN_BYTES = 16
_LOOPBACK, _MAX_PORT = "127.0.0.1", 65535
_HOST_PORT = re.compile(r"(?:([\w-]{1,63}(?:\.[\w-]{1,63})*|\[[\w:.%]+\])?:)?(\d{1,5})", re.ASCII)
_OTHER = re.compile(r"(?!tcp://|unix:)(?i:[a-z]+://|tcp:)")  # no path, though it could be one
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid

HostPort: TypeAlias = tuple[str, int]


def host_port(text: str) -> HostPort:
    """Return the host and port of `HOST:PORT`, `[IPV6]:PORT` or `PORT`, which is one of the loopback interface."""
    match = _HOST_PORT.fullmatch(text)
    if match is None or int(match[2]) > _MAX_PORT:
        shown = text.rpartition("@")[2]  # what stands before it may be a token
        raise UsageError(
            f"{shown:.200} is not an address, expected HOST:PORT with a port up to {_MAX_PORT}, such as {_LOOPBACK}:9400 or "
            "[::1]:9400"
        )
    return (match[1] or _LOOPBACK).strip("[]"), int(match[2])


def place_of(text: str, name: str, expected: str) -> Path | HostPort:
    """Return the path of a unix socket, or the host and port, of the address that an option has."""
    if text in ("", UNIX, AUTO) or _OTHER.match(text):
        raise UsageError(f"{name} is {redacted(text)!r:.200}, expected {expected}")
    return host_port(text.removeprefix(_TCP)) if text.startswith(_TCP) else _checked_path(text)


def _checked_path(text: str) -> Path:
    path = text.removeprefix(UNIX)
    length = len(os.fsencode(path))
    if length > MAX_PATH_BYTES:
        raise UsageError(f"the socket's path {path} has {length} bytes, the system takes {MAX_PATH_BYTES}; name a shorter one")
    if not Path(path).name:
        raise UsageError(f"the socket's path is {path!r}, expected that of a file")
    return Path(path)


def is_loopback(host: str) -> bool:
    """Return True if only this machine reaches a host's address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True, slots=True)
class ServiceAddress:
    """The address of a service, and the files that a client of one on another machine needs.

    `where`: `unix:PATH` (or only the path) of a `loader serve` on this machine, `tcp://HOST:PORT` of one that listens, "auto"
    for a child process.
    """

    where: Path | str
    token: Path | str | None = None  # the file with the server's token
    certificate: Path | str | None = None  # with TLS: the file (PEM) with the certificates to trust
    deadline_s: float = 60.0  # without the server, before an iteration ends with an error
    place: Path | HostPort | None = field(init=False, default=None)  # of a unix socket, or over TCP

    def __post_init__(self) -> None:
        """Validate the address; nothing is connected to, and no file is read.

        Raises:
            UsageError: if it is none, or has options that only servers over TCP have.
        """
        expected = 'a `loader serve`: "unix:PATH" or "tcp://HOST:PORT", or "auto"'
        expect("service", self.where, str | os.PathLike, expected)
        text = os.fspath(self.where)
        if not self.deadline_s > 0:
            raise UsageError(f"deadline_s is {self.deadline_s}, expected seconds above 0")
        place = None if text == AUTO else place_of(text, "service", expected)
        if isinstance(place, tuple):
            if not place[1]:
                raise UsageError(f"service is {redacted(text)}, expected {expected}")
        elif self.token is not None or self.certificate is not None:
            raise UsageError(
                f"service is {redacted(text)} with a token or a certificate, which only tcp://HOST:PORT takes; leave them out"
            )
        object.__setattr__(self, "place", place)

    @classmethod
    def of(cls, service: ServiceAddress | Path | str) -> ServiceAddress:
        """Return the address that a user gave."""
        return service if isinstance(service, ServiceAddress) else cls(service)


@contextmanager
def listen(path: Path) -> Iterator[socket.socket]:
    """Listen on a socket that only this user may connect to (mode 0600), and remove it at the end.

    A socket left by a dead service is replaced.
    """
    _expect_own_folder(path.parent)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        with _locked(path.with_name(f"{path.name}.lock")):
            _remove_stale(path)
            before = os.umask(0o177)
            try:
                sock.bind(str(path))
            except OSError as error:
                raise UsageError(f"cannot create a socket at {path}: {error.strerror}") from error
            finally:
                os.umask(before)
            sock.listen(128)
            status = path.lstat()
        try:
            yield sock
        finally:
            if _is_at(path, status):
                path.unlink(missing_ok=True)


def _expect_own_folder(folder: Path) -> None:
    """Refuse a folder in which another user could replace our socket."""
    try:
        status = folder.stat()
    except OSError as error:
        raise UsageError(f"cannot open {folder}, the folder of the socket: {error.strerror}") from error
    if status.st_uid not in _trusted():
        raise UsageError(f"{folder}, the folder of the socket, belongs to user {status.st_uid}; use your own folder")
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        raise UsageError(f"{folder}, the folder of the socket, is writable by everybody; use your own folder")


def _trusted() -> tuple[int, int]:
    """Return the users whose files and services this process trusts: its own, and root."""
    return os.geteuid(), 0


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Acquire a lock on a file that only this user may open; the file is removed afterwards."""
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UsageError(f"cannot open {path}, the lock of the socket: {error.strerror}; remove it") from error
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_uid not in _trusted():
                raise UsageError(f"{path}, the lock of the socket, belongs to user {status.st_uid}; name another path")
            fcntl.flock(fd, fcntl.LOCK_EX)
            if _is_at(path, status):  # else who had it before has removed it
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)
                return
        finally:
            os.close(fd)


def _is_at(path: Path, status: os.stat_result) -> bool:
    with suppress(OSError):
        return os.path.samestat(path.lstat(), status)
    return False


def _remove_stale(path: Path) -> None:
    """Remove the socket of a service that has ended; refuse one that listens, and what is not a socket."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise UsageError(f"{path} exists and is not a socket; name a path that does not exist")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(5.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError as error:
            raise UsageError(f"{path} exists and cannot be connected to: {error.strerror}; name another path") from error
    raise UsageError(f"a service already listens at {path}; use it, stop it, or name another path")


def connected(path: Path) -> socket.socket:
    """Connect to the service at a path, after checking whose it is."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(str(path))
    except OSError as error:
        sock.close()
        raise DeliveryError(
            f"no service can be reached at {path}: {error.strerror}; start one: loader serve STORE --at unix:{path}"
        ) from error
    if (uid := peer_of(sock)) not in _trusted():
        sock.close()
        raise DeliveryError(
            f"the service at {path} belongs to user {uid}, you are user {os.geteuid()}; start your own at another path"
        )
    return sock


def peer_of(sock: socket.socket) -> int:
    """Return the user of the process at the other end, which connected or listens."""
    _, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(uid)


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """What clients over TCP must have, and how the service shows who it is."""

    token: bytes | None = None
    context: ssl.SSLContext | None = None  # with TLS


def read_token(path: Path | str) -> bytes:
    """Return the token in a file, without the white space around it."""
    path = Path(path)
    try:
        mode, token = path.stat().st_mode, path.read_bytes().strip()
    except OSError as error:
        raise UsageError(f"cannot read the token file {path}: {error.strerror}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UsageError(f"the token file {path} has mode {stat.S_IMODE(mode):o}, so others may read it; chmod 600 {path}")
    if len(token) < MIN_TOKEN_BYTES:
        raise UsageError(
            f"the token in {path} has {len(token)} bytes, expected {MIN_TOKEN_BYTES} or more; make one: openssl rand -hex 32"
        )
    return token


def server_context(certificate: Path, key: Path | None = None) -> ssl.SSLContext:
    """Return the TLS context of a service with a chain of certificates and its private key, in the same file or another."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
    except OSError as error:  # ssl's errors are
        raise UsageError(f"the certificate {certificate} cannot be used: {error}") from error
    return context


def client_context(certificates: Path | str) -> ssl.SSLContext:
    """Return the TLS context of a client that trusts the certificates in a file."""
    try:
        return ssl.create_default_context(cafile=certificates)
    except OSError as error:
        raise UsageError(f"the certificates {certificates} cannot be used: {error}") from error


def limit_silence(sock: socket.socket, seconds: float) -> None:
    """Let a socket that sends nothing for so long raise `TimeoutError` in a `FrameReader`."""
    if isinstance(sock, ssl.SSLSocket):
        sock.settimeout(seconds)
    else:  # the socket stays a blocking one, so that one call receives a whole batch
        whole, part = divmod(seconds, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(whole), int(part * 1e6)))


def end_when_peer_is_lost(sock: socket.socket) -> None:
    """Let a connection to a machine that is gone fail within a minute, and send small messages at once."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 20), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 60_000)


def shut(sock: socket.socket) -> None:
    """End a connection in both directions, for the thread that waits at it."""
    with suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)  # of an `SSLSocket`, its own would send in the clear from then on


def readable(fds: Iterable[int], within_s: float) -> set[int]:
    """Return the descriptors that can be read, or whose other side is gone, within some seconds; empty if none can."""
    poll = select.poll()  # `select.select` takes no number above 1,023
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return {fd for fd, _ in poll.poll(max(0.0, within_s) * 1000)}


def accept_all(doors: Mapping[socket.socket, Callable[[socket.socket], None]], stop_fd: int, tick: Callable[[], float]) -> None:
    """Pass each listening socket's connections to its function until `stop_fd` becomes readable.

    `tick` is called in between and returns the seconds until its next call.
    """
    while True:
        ready = readable([*(door.fileno() for door in doors), stop_fd], tick())
        if stop_fd in ready:
            return
        for door, take_in in doors.items():
            if door.fileno() in ready:
                with suppress(OSError):  # the client has left, or no descriptor is free: it will be retried
                    take_in(door.accept()[0])
