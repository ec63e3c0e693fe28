"""`loader stats`: print a running service's statistics."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Print a running service's statistics: its clients, their rates, and the batches ready.

    Example: loader stats --socket /run/user/1000/photos.sock --json
    """

    socket: Path
    """Unix socket of the service."""
    json: bool = False
    """Print one JSON object."""

    def run(self) -> int:
        from bucketline.command_line import print_json
        from bucketline.loader.commands.serve import summary

        stats = stats_of(self.socket)
        if self.json:
            print_json(stats)
        else:
            print(summary(stats))
        return 0


def stats_of(socket: Path) -> dict[str, Any]:
    """Return the statistics of the service at a socket; see `Service.stats`.

    Raises:
        DeliveryError: if it cannot be reached, or refuses.
    """
    from bucketline.loader.service.protocol import failure_of, receive, send
    from bucketline.loader.service.unix_socket import connected

    with connected(socket) as sock:
        send(sock, {"ask": "stats"})
        answer, _ = receive(sock, 10.0)
    if "stats" not in answer:
        raise failure_of(answer)
    stats: dict[str, Any] = answer["stats"]
    return stats
