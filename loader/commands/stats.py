"""`loader stats`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Print what a service that runs has delivered: to whom, how fast, and how much is ready.

    Example: loader stats --socket /run/user/1000/photos.sock --json
    """

    socket: Path
    """Where the service listens."""
    json: bool = False
    """Print one JSON object."""

    def run(self) -> int:
        from bucketline.commands import print_json
        from bucketline.loader.commands.serve import summary
        from bucketline.loader.service.listening import connected
        from bucketline.loader.service.protocol import failure_of, receive, send

        with connected(self.socket) as sock:
            send(sock, {"ask": "stats"})
            answer, _ = receive(sock, 10.0)
        if "stats" not in answer:
            raise failure_of(answer)
        if self.json:
            print_json(answer["stats"])
        else:
            print(summary(answer["stats"]))
        return 0
