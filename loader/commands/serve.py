"""`loader serve`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from bucketline.loader.service.server import Service


@dataclass(frozen=True, kw_only=True)
class Serve:
    """Read stores for all ranks of this machine, and for any other process of the same user here, through shared memory.

    A loader uses it as `Loader(store, config, service=PATH)`. Ctrl-C or SIGTERM stops it, and removes the socket; its clients
    are told at their next batch. SIGUSR1 prints statistics at once. `loader stats` asks for them from elsewhere.

    Example: loader serve photos.store --socket /run/user/1000/photos.sock
    """

    stores: tyro.conf.Positional[tuple[Path, ...]]
    """The stores' folders."""
    socket: Path
    """Where clients connect: a path of at most 107 bytes. Only processes of this user may."""
    every: float = 10.0
    """Seconds between two lines of statistics."""
    json: bool = False
    """Print statistics, one JSON object a line, on stdout: every so many seconds, and at the end."""

    def run(self) -> int:
        import sys

        from bucketline.errors import UsageError
        from bucketline.loader.service.listening import accept_all, checked_path, listening
        from bucketline.loader.service.server import Service

        if not self.stores:
            raise UsageError("no store is named; name one or more")
        if not 0 < self.every < 1e9:
            raise UsageError(f"--every is {self.every}, expected seconds above 0")
        checked_path(self.socket)
        service = Service(self.stores)
        with _signals() as signals, listening(self.socket) as sock:
            print(f"serving {', '.join(map(str, self.stores))} at {self.socket}", file=sys.stderr, flush=True)
            reporting = _Reporting(service, signals, self.every, as_json=self.json)
            try:
                accept_all(sock, service.take_in, signals.stop_fd, reporting.tick)
            finally:
                service.stop()
            reporting.report()
        return 0


class _Reporting:
    """Prints statistics every so often, and when it is asked to."""

    def __init__(self, service: Service, signals: _Signals, every: float, *, as_json: bool) -> None:
        import time

        self._service, self._signals, self._every, self._as_json = service, signals, every, as_json
        self._clock = time.monotonic
        self._next = self._clock() + every

    def tick(self) -> float:
        """Report if it is time; give the seconds until it is again."""
        if self._signals.is_asked():
            self.report(is_asked=True)
        if self._clock() >= self._next:
            self._next += self._every
            self.report()
        return min(self._next - self._clock(), 1.0)

    def report(self, *, is_asked: bool = False) -> None:
        """Print a line: on stdout as JSON, else on stderr for people who asked."""
        import sys

        from bucketline.commands import print_json_line

        if self._as_json:
            print_json_line(self._service.stats())
            sys.stdout.flush()
        elif is_asked:
            print(summary(self._service.stats()), file=sys.stderr, flush=True)


def summary(stats: dict[str, Any]) -> str:
    """Give the statistics of a service as people read them."""
    from bucketline.commands import counted, human_bytes

    delivered = f"{stats['samples']} samples and {human_bytes(stats['bytes'])} in {stats['seconds']:.0f} s"
    clients = f"{counted(len(stats['clients']), 'client')} of {stats['clients_so_far']} so far"
    lines = [f"{', '.join(stats['stores'])}: {clients}; {delivered}"]
    for client in stats["clients"]:
        who = f"process {client['pid']}, rank {client['rank']} of {client['world_size']}"
        rate = f"{client['samples_per_s']:.0f} samples/s, {human_bytes(client['bytes_per_s'])}/s"
        lines.append(f"  {who}: {rate}, {client['ready']} of {client['depth']} batches ready")
    return "\n".join(lines)


class _Signals:
    """SIGINT and SIGTERM make `stop_fd` readable; SIGUSR1 is noted."""

    def __init__(self, stop_fd: int) -> None:
        self.stop_fd = stop_fd
        self._asked = False

    def ask(self, *_: object) -> None:
        self._asked = True

    def is_asked(self) -> bool:
        asked, self._asked = self._asked, False
        return asked


def _signals() -> AbstractContextManager[_Signals]:
    import os
    import signal
    from contextlib import contextmanager

    @contextmanager
    def handled() -> Iterator[_Signals]:
        read, write = os.pipe()
        signals = _Signals(read)
        stops = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, lambda *_: os.write(write, b"s")) for number in stops}
        before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, signals.ask)
        try:
            yield signals
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(read)
            os.close(write)

    return handled()
