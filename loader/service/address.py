"""The address of a service, as users write it: `unix:PATH`, `tcp://HOST:PORT[,HOST:PORT...]`, or `auto`."""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bucketline.errors import UsageError
from bucketline.files.redact import redacted
from bucketline.loader.service.sockets import UNIX, checked_path
from bucketline.option_types import expect

if TYPE_CHECKING:
    from pathlib import Path

AUTO = "auto"  # a child process of the loader's own
_LOOPBACK = "127.0.0.1"
_TCP = "tcp://"
_OTHER = re.compile(r"(?!tcp://|unix:)(?i:[a-z]+://|tcp:)")  # no path, though it could be one
_MAX_PORT = 65535


def address_of(text: str) -> tuple[str, int]:
    """Return the host and port of `HOST:PORT`, `[IPV6]:PORT` or `PORT`, which is one of the loopback interface."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or _LOOPBACK
    is_port = port.isascii() and port.isdigit() and len(port) <= len(str(_MAX_PORT)) and int(port) <= _MAX_PORT
    if not is_port or not _is_host(host):
        place = text.rpartition("@")[2]  # what stands before it may be a token
        raise UsageError(
            f"{place:.200} is not an address, expected HOST:PORT with a port up to {_MAX_PORT}, such as {_LOOPBACK}:9400 or "
            "[::1]:9400"
        )
    return host, int(port)


def listening_at(text: str) -> tuple[Path | None, str]:
    """Return the path of a unix socket, or None and the `HOST:PORT` of TCP, at which a service is to listen."""
    if text in ("", UNIX, AUTO) or _OTHER.match(text):
        raise UsageError(f"--at is {redacted(text)!r:.200}, expected unix:PATH or tcp://HOST:PORT")
    if text.startswith(_TCP):
        address_of(text.removeprefix(_TCP))
        return None, text.removeprefix(_TCP)
    return checked_path(text), ""


def _is_host(host: str) -> bool:
    """Return True if a text can be a name or an address, so that looking it up fails with words if it fails."""
    try:
        return ipaddress.ip_address(host) is not None
    except ValueError:
        pass
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return not re.search(r"[\s/:\[\]]", host)


def is_loopback(host: str) -> bool:
    """Return True if only this machine reaches a host's address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def expect_token(address: str, *, has_token: bool) -> None:
    """Refuse to listen without a token at an address that other machines can reach."""
    if not has_token and not is_loopback(address_of(address)[0]):
        raise UsageError(
            f"--at tcp://{address} can be reached from other machines; give --token-file FILE, which clients must have too"
        )


@dataclass(frozen=True, slots=True)
class ServiceAddress:
    """The address of a service, and the files that a client of one on another machine needs.

    `where`: `unix:PATH` (or only the path) of a `loader serve` on this machine, `tcp://HOST:PORT` of one that listens, or of
    several that stand in for one another, separated by commas; "auto" for a child process.
    """

    where: Path | str
    token: Path | str | None = None  # the file with the servers' token
    certificate: Path | str | None = None  # with TLS: the file (PEM) with the certificates to trust
    deadline_s: float = 60.0  # without any server, before an iteration ends with an error
    path: Path | None = field(init=False, default=None)  # of a unix socket
    servers: tuple[tuple[str, int], ...] = field(init=False, default=())  # over TCP

    def __post_init__(self) -> None:
        """Validate the address; nothing is connected to, and no file is read.

        Raises:
            UsageError: if it is none, or has options that only servers over TCP have.
        """
        expected = 'a `loader serve`: "unix:PATH" or "tcp://HOST:PORT", or "auto"'
        expect("service", self.where, str | os.PathLike, expected)
        text = os.fspath(self.where)
        if text in ("", UNIX) or _OTHER.match(text):
            raise UsageError(f"service is {redacted(text)!r:.200}, expected {expected}")
        if not self.deadline_s > 0:
            raise UsageError(f"deadline_s is {self.deadline_s}, expected seconds above 0")
        if text.startswith(_TCP):
            names = [one.strip().removeprefix(_TCP) for one in text.split(",")]
            servers = tuple(address_of(one) for one in names if one)
            if not servers or not all(port for _, port in servers):
                raise UsageError(f"service is {redacted(text)}, expected {expected}")
            object.__setattr__(self, "servers", servers)
            return
        if self.token is not None or self.certificate is not None:
            raise UsageError(
                f"service is {redacted(text)} with a token or a certificate, which only tcp://HOST:PORT takes; leave them out"
            )
        if text != AUTO:
            object.__setattr__(self, "path", checked_path(text))

    @classmethod
    def of(cls, service: ServiceAddress | Path | str) -> ServiceAddress:
        """Return the address that a user gave."""
        return service if isinstance(service, ServiceAddress) else cls(service)
