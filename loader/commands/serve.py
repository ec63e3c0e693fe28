"""`loader serve`: read stores once for all processes of a machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from bucketline.options import Arg, Positional, Repeated
from bucketline.store.commands.place import shown
from bucketline.store.remote.arguments import RemoteArguments

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from bucketline.loader.service.server import Service
    from bucketline.loader.service.sockets import Security


@dataclass(frozen=True, kw_only=True)
class Serve(RemoteArguments):
    """Serve batches to all ranks of this machine: through shared memory to processes of the same user, and over TCP.

    Connect with `Loader(store, config, service=PATH)`, or from elsewhere with `Loader(None, config, service="tcp://HOST:PORT")`.
    Ctrl-C or SIGTERM stops the service and removes the socket; each client gets an error at its next batch. SIGUSR1 prints
    statistics immediately; `loader stats` prints them elsewhere. A line that cannot be printed is left out.

    Example: loader serve photos.store --at unix:/run/user/1000/photos.sock
    """

    SECTION = "serve: where to serve, and what to report"
    FIRST = ("token_file", "certificate", "metrics", "every", "json")

    stores: Positional[tuple[str, ...]]
    """Folders of the stores, or their URLs: this process then fetches them for all others of the machine."""
    at: Annotated[Repeated[tuple[str, ...]], Arg(metavar="ADDRESS")]
    """Address for clients to connect to: unix:PATH, a socket of at most 107 bytes for processes of this user, or tcp://HOST:PORT
    for machines that have no store; without a host (tcp://PORT), for this machine only. Give one or both."""
    token_file: Annotated[Path | None, Arg(metavar="FILE")] = None
    """File with the token that clients over TCP must have too, readable by its owner only. It is never sent."""
    certificate: Annotated[tuple[Path, ...], Arg(metavar="FILE [KEY]")] = ()
    """Serve TCP by TLS, with the certificate chain in this file (PEM), and its private key there or in a second file."""
    metrics: Annotated[str | None, Arg(metavar="HOST:PORT")] = None
    """Answer Prometheus at HOST:PORT; without a host, only this machine can ask. Everything that can connect can read them."""
    every: Annotated[float, Arg(metavar="SECONDS")] = 10.0
    """Seconds between statistics reports. A last report is printed at exit."""
    json: bool = False
    """Print statistics on stdout, one JSON object per line, instead of as text on stderr."""

    def run(self) -> int:
        import sys
        import time
        from contextlib import ExitStack, redirect_stdout

        from bucketline.progress import as_log

        socket, address = self._addresses()
        from bucketline.loader.service.server import Service
        from bucketline.loader.service.sockets import accept_all, listen

        service = Service(self.stores, self.remote())
        with ExitStack() as using:
            port = None
            if self.metrics is not None:
                from bucketline.loader.service.metrics import metrics_served

                port = using.enter_context(metrics_served(self.metrics, service.stats))
            far = None if address is None else using.enter_context(service.listening(address, self._security(address)))
            signals = using.enter_context(_signals())
            using.enter_context(redirect_stdout(as_log(sys.stdout)))  # as stderr: statistics that are lost end no client
            near = None if socket is None else using.enter_context(listen(socket))
            at = f" at {shown(str(socket))}" if socket is not None else ""
            print(f"serving {', '.join(map(shown, self.stores))}{at}", file=sys.stderr, flush=True)
            if far is not None:
                print(f"batches for other machines at port {far.getsockname()[1]}", file=sys.stderr, flush=True)
            if port is not None:
                print(f"metrics for Prometheus at port {port}", file=sys.stderr, flush=True)
            due = time.monotonic() + self.every

            def tick() -> float:
                """Report if due or requested, release what nobody reads, and return the seconds until the next check."""
                nonlocal due
                service.let_go()
                if signals.is_asked():
                    _report(service, as_json=self.json)
                if time.monotonic() >= due:
                    due += self.every
                    _report(service, as_json=self.json)
                return min(due - time.monotonic(), 1.0)

            try:
                doors = ((near, service.take_in), (far, service.take_in_far))
                accept_all({sock: take_in for sock, take_in in doors if sock is not None}, signals.stop_fd, tick)
            finally:
                service.stop()
            _report(service, as_json=self.json)
        return 0

    def _addresses(self) -> tuple[Path | None, str | None]:
        """Return the path of the unix socket and the `HOST:PORT` of TCP, None if there is none, after checking all options."""
        from bucketline.errors import UsageError
        from bucketline.loader.mixture import open_shares
        from bucketline.loader.service.address import expect_token, listening_at
        from bucketline.loader.service.sockets import refuse_file
        from bucketline.store.remote.urls import is_url

        if not self.stores:
            raise UsageError("no store is given; name one or more")
        if not self.at:
            raise UsageError("no --at is given; say where clients connect: --at unix:PATH or --at tcp://HOST:PORT")
        if not 0 < self.every < 1e9:
            raise UsageError(f"--every is {self.every}, expected seconds above 0")
        found = [listening_at(one) for one in self.at]
        sockets, addresses = [path for path, _ in found if path is not None], [text for path, text in found if path is None]
        for kind, given in (("unix:PATH", sockets), ("tcp://HOST:PORT", addresses)):
            if len(given) > 1:
                raise UsageError(f"--at is {' and '.join(map(str, given))}, expected one {kind} at most")
        for name, value in (("token-file", self.token_file), ("certificate", " ".join(map(str, self.certificate)))):
            if value and not addresses:
                raise UsageError(
                    f"--{name} is {value} without --at tcp://HOST:PORT, for whose clients it is; add one, or leave it out"
                )
        if len(self.certificate) > 2:
            raise UsageError(f"--certificate has {len(self.certificate)} files, expected the chain, and its key if apart")
        if addresses:
            expect_token(addresses[0], has_token=self.token_file is not None)
        for path in sockets:
            refuse_file(path)
        if local := [one for one in self.stores if not is_url(one)]:
            open_shares(local)  # here, since the service takes seconds to import
        return sockets[0] if sockets else None, addresses[0] if addresses else None

    def _security(self, address: str) -> Security:
        import sys

        from bucketline.loader.service.address import address_of, is_loopback
        from bucketline.loader.service.sockets import Security
        from bucketline.loader.service.tokens import read_token

        token = None if self.token_file is None else read_token(self.token_file)
        if not self.certificate and not is_loopback(address_of(address)[0]):
            print("warning: without --certificate, batches are sent unencrypted", file=sys.stderr, flush=True)
        chain, key, *_ = (*self.certificate, None, None)
        return Security(token=token, certificate=chain, key=key)


def _report(service: Service, *, as_json: bool) -> None:
    """Print the statistics as a line of JSON on stdout, or as text on stderr."""
    import sys

    from bucketline.command_line import print_json_line
    from bucketline.loader.commands.stats import summary

    if as_json:
        print_json_line(service.stats())
        sys.stdout.flush()
    else:
        print(summary(service.stats()), file=sys.stderr, flush=True)


class _Signals:
    """Records signals: SIGINT and SIGTERM make `stop_fd` readable, SIGUSR1 sets a flag."""

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
