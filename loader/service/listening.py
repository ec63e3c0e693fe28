"""The service's socket: made so that only its user reaches it, and never in the place of a live one."""

from __future__ import annotations

import fcntl
import os
import select
import socket
import stat
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from bucketline.errors import DeliveryError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MAX_PATH_BYTES = 107  # Linux keeps 108 for a socket's path, and its end


def checked_path(path: Path | str) -> Path:
    """Give the path of a socket.

    Raises:
        UsageError: where it is longer than the system takes.
    """
    length = len(os.fsencode(path))
    if length > MAX_PATH_BYTES:
        raise UsageError(f"the socket's path {path} has {length} bytes, the system takes {MAX_PATH_BYTES}; name a shorter one")
    return Path(path)


@contextmanager
def listening(path: Path | str) -> Iterator[socket.socket]:
    """Listen at a socket that only this user may connect to (mode 0600); it is removed at the end.

    A socket that a dead service left is replaced.

    Raises:
        UsageError: where the path is too long, something that is no socket is there, or a live service listens there.
    """
    path = checked_path(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made = _bind(sock, path)
        try:
            yield sock
        finally:
            with suppress(OSError):
                if _identity(path) == made:
                    path.unlink()
    finally:
        sock.close()


def _bind(sock: socket.socket, path: Path) -> tuple[int, int]:
    """Bind and listen, while no other process does the same in this folder; give what was made."""
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise UsageError(f"{path.parent}, where the socket is to be, cannot be opened: {error.strerror}") from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        _remove_stale(path)
        before = os.umask(0o177)
        try:
            sock.bind(str(path))
        except OSError as error:
            raise UsageError(f"no socket can be made at {path}: {error.strerror}") from error
        finally:
            os.umask(before)
        sock.listen(128)
        return _identity(path)
    finally:
        os.close(folder)


def _identity(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino


def _remove_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise UsageError(f"{path} exists and is no socket; name a path where nothing is")
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
    """Connect to the service at a path.

    Raises:
        DeliveryError: where none listens there.
        UsageError: where the path is too long.
    """
    path = checked_path(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(str(path))
    except OSError as error:
        sock.close()
        raise DeliveryError(
            f"no service can be reached at {path}: {error.strerror}; start one: loader serve STORE --socket {path}"
        ) from error
    return sock


def accept_all(sock: socket.socket, take_in: Callable[[socket.socket], None], stop_fd: int, tick: Callable[[], float]) -> None:
    """Hand over every connection, until something can be read at `stop_fd`.

    `tick` is called between, and gives the seconds until it wants to be called again.
    """
    while True:
        readable, _, _ = select.select([sock.fileno(), stop_fd], [], [], max(0.0, tick()))
        if stop_fd in readable:
            return
        if readable:
            with suppress(OSError):  # a client that went again, or no descriptor left: it will be tried again
                take_in(sock.accept()[0])
