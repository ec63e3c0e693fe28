"""The service's sockets: a unix socket that only its user reaches and that never replaces a live one, and those of TCP.

In a folder that others may write, anybody can listen at a name or lock files that they can open. So a socket is created under a
lock on a file that only this user may open, and a client checks who listens before it sends anything.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import ssl
import stat
import struct
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bucketline.errors import DeliveryError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
UNIX = "unix:"
MAX_PATH_BYTES = 107  # Linux keeps 108 for a socket's path, and its end


def checked_path(path: Path | str) -> Path:
    """Return the path of a socket, which may be written `unix:PATH`, after checking its length."""
    path = os.fspath(path).removeprefix(UNIX)
    length = len(os.fsencode(path))
    if length > MAX_PATH_BYTES:
        raise UsageError(f"the socket's path {path} has {length} bytes, the system takes {MAX_PATH_BYTES}; name a shorter one")
    if not Path(path).name:
        raise UsageError(f"the socket's path is {path!r}, expected that of a file")
    return Path(path)


@contextmanager
def listen(path: Path | str) -> Iterator[socket.socket]:
    """Listen on a socket that only this user may connect to (mode 0600), and remove it at the end.

    A socket left by a dead service is replaced.
    """
    path = checked_path(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made = _bind(sock, path)
        try:
            yield sock
        finally:
            with suppress(OSError):
                if _is_at(path, made):
                    path.unlink()
    finally:
        sock.close()


def _bind(sock: socket.socket, path: Path) -> tuple[int, int]:
    """Bind and listen, while no other process does the same at this path; return the socket."""
    _check_folder(path.parent)
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
        return _identity(path)


def _check_folder(folder: Path) -> None:
    """Refuse a folder in which another user could replace our socket."""
    try:
        found = folder.stat()
    except OSError as error:
        raise UsageError(f"cannot open {folder}, the folder of the socket: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise UsageError(f"{folder}, the parent of the socket, is not a folder; name a path in one")
    if found.st_uid not in _trusted():
        raise UsageError(f"{folder}, the folder of the socket, belongs to user {found.st_uid}; use your own folder")
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
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
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_uid not in _trusted():
                raise UsageError(f"{path}, the lock of the socket, belongs to user {found.st_uid}; name another path")
            fcntl.flock(fd, fcntl.LOCK_EX)
            if _is_at(path, (found.st_dev, found.st_ino)):  # else who had it before has removed it
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)
                return
        finally:
            os.close(fd)


def _identity(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino


def _is_at(path: Path, identity: tuple[int, int]) -> bool:
    with suppress(OSError):
        return _identity(path) == identity
    return False


def refuse_file(path: Path) -> bool:
    """Return True if there is a socket at a path, False if there is nothing."""
    _check_folder(path.parent)
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISSOCK(mode):
        raise UsageError(f"{path} exists and is not a socket; name a path that does not exist")
    return True


def _remove_stale(path: Path) -> None:
    if not refuse_file(path):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(5.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except FileNotFoundError:
            return
        except OSError as error:
            raise UsageError(f"{path} exists and cannot be connected to: {error.strerror}; name another path") from error
    raise UsageError(f"a service already listens at {path}; use it, stop it, or name another path")


def connected(path: Path | str) -> socket.socket:
    """Connect to the service at a path, after checking whose it is."""
    path = checked_path(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(str(path))
    except OSError as error:
        sock.close()
        raise DeliveryError(
            f"no service can be reached at {path}: {error.strerror}; start one: loader serve STORE --at unix:{path}"
        ) from error
    _, uid = peer_of(sock)
    if uid not in _trusted():
        sock.close()
        raise DeliveryError(
            f"the service at {path} belongs to user {uid}, you are user {os.geteuid()}; start your own at another path"
        )
    return sock


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Return the id and the user of the process at the other end, which connected or listens."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """The token and the certificate of a service that listens on TCP."""

    token: bytes | None = None
    certificate: Path | None = None  # with TLS: its chain, PEM
    key: Path | None = None  # PEM; None: in the certificate's file

    def context(self) -> ssl.SSLContext | None:
        """Return the service's TLS context; None without TLS."""
        if self.certificate is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.certificate, self.key)
        except OSError as error:  # ssl's errors are
            raise UsageError(f"the certificate {self.certificate} cannot be used: {error}") from error
        return context


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


def has_room(sock: socket.socket) -> bool:
    """Return True if a short message can be sent without waiting for the other side to read what was sent before."""
    poll, fd = select.poll(), sock.fileno()
    if fd >= 0:  # or it is closed, which sending says
        poll.register(fd, select.POLLOUT)
    return fd < 0 or bool(poll.poll(0))


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
