"""Addresses in a network, as users write them."""

from __future__ import annotations

import ipaddress

from bucketline.errors import UsageError

_LOOPBACK = "127.0.0.1"
MAX_PORT = 65535


def address_of(text: str) -> tuple[str, int]:
    """Return the host and port of `HOST:PORT`, `[IPV6]:PORT` or `PORT`, which is one of the loopback interface.

    Raises:
        UsageError: if it is none of these.
    """
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit()) or int(port) > MAX_PORT:
        raise UsageError(f"{text} is not an address, expected HOST:PORT with a port up to {MAX_PORT}, such as {_LOOPBACK}:9400")
    return host.removeprefix("[").removesuffix("]") or _LOOPBACK, int(port)


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a host's address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
