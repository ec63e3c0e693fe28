"""`loader serve`: read stores once for all processes of a machine."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from bucketline.command_line import one_line
from bucketline.files.paths import redacted
from bucketline.options import Arg, Positional, Repeated
from bucketline.store.remote.urls import RemoteArguments

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bucketline.loader.service.sockets import HostPort, Security


@dataclass(frozen=True, kw_only=True)
class Serve(RemoteArguments):
    """Serve batches to all ranks of this machine: through shared memory to processes of the same user, and over TCP.

    Connect with `Loader(store, config, service=PATH)`, or from elsewhere with `Loader(None, config, service="tcp://HOST:PORT")`.
    Ctrl-C or SIGTERM stops the service and removes the socket; each client gets an error at its next batch. A line that cannot
    be printed is left out.

    Example: loader serve photos.store --at unix:/run/user/1000/photos.sock
    """

    SECTION = "serve: where to serve, and what to report"
    FIRST = ("token_file", "certificate", "metrics", "every")

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
    """Seconds between reports of totals on stderr. A last one is printed at exit."""

    def run(self) -> int:
        import time
        from contextlib import ExitStack, nullcontext

        host_port, path = self._places()
        security = self._security(host_port)
        from bucketline.loader.service.server import Service
        from bucketline.loader.service.sockets import accept_all, listen

        service = Service(self.stores, self.remote())
        with ExitStack() as using:
            port = None
            if self.metrics is not None:
                from bucketline.loader.service.metrics import metrics_served

                port = using.enter_context(metrics_served(self.metrics, service.stats))
            far = using.enter_context(nullcontext() if host_port is None else service.tcp_socket(host_port, security))
            stop_fd = using.enter_context(_stop_signals())
            near = using.enter_context(nullcontext() if path is None else listen(path))
            at = f" at {one_line(str(path))}" if path is not None else ""
            _say(f"serving {', '.join(one_line(redacted(store)) for store in self.stores)}{at}")
            if far is not None:
                _say(f"batches for other machines at port {far.getsockname()[1]}")
            if port is not None:
                _say(f"metrics for Prometheus at port {port}")
            due = time.monotonic() + self.every

            def tick() -> float:
                """Report if due, release what nobody reads, and return the seconds until the next check."""
                nonlocal due
                service.let_go()
                if time.monotonic() >= due:
                    due += self.every
                    _say(summary(service.stats()))
                return min(due - time.monotonic(), 1.0)

            doors = ((near, service.take_in), (far, service.take_in_far))
            try:
                accept_all({sock: take_in for sock, take_in in doors if sock is not None}, stop_fd, tick)
            finally:
                service.stop()
            _say(summary(service.stats()))
        return 0

    def _places(self) -> tuple[HostPort | None, Path | None]:
        """Return where to listen for TCP and the path of the unix socket, None if there is none, after checking all options."""
        from bucketline.errors import UsageError
        from bucketline.loader.service.sockets import place_of

        if not 0 < self.every < 1e9:
            raise UsageError(f"--every is {self.every}, expected seconds above 0")
        addresses = [place_of(address, "--at", "unix:PATH or tcp://HOST:PORT") for address in self.at]
        ports = [address for address in addresses if isinstance(address, tuple)]
        paths = [address for address in addresses if isinstance(address, Path)]
        if len(ports) > 1 or len(paths) > 1:
            raise UsageError(f"--at is {' and '.join(self.at)}, expected one unix:PATH and one tcp://HOST:PORT at most")
        for name, value in (("token-file", self.token_file), ("certificate", " ".join(map(str, self.certificate)))):
            if value and not ports:
                raise UsageError(
                    f"--{name} is {value} without --at tcp://HOST:PORT, for whose clients it is; add one, or leave it out"
                )
        if len(self.certificate) > 2:
            raise UsageError(f"--certificate has {len(self.certificate)} files, expected the chain, and its key if apart")
        return ports[0] if ports else None, paths[0] if paths else None

    def _security(self, host_port: HostPort | None) -> Security:
        from bucketline.loader.service.sockets import Security, is_loopback, read_token, server_context

        if host_port is not None and not self.certificate and not is_loopback(host_port[0]):
            _say("warning: without --certificate, batches are sent unencrypted")
        token = None if self.token_file is None else read_token(self.token_file)
        return Security(token=token, context=server_context(*self.certificate) if self.certificate else None)


def summary(stats: dict[str, Any]) -> str:
    """Return a service's statistics as readable text."""
    from bucketline.command_line import counted, human_bytes

    now = counted(stats["clients"], "client") if stats["clients"] else "no client"
    amount = f"{counted(stats['samples'], 'sample')} and {human_bytes(stats['bytes'])} delivered"
    failed = f"{stats['errors']} ended with an error, {stats['refused']} refused"
    lines = [f"{', '.join(stats['stores'])}: {now} now, {stats['clients_so_far']} since the start; {amount}; {failed}"]
    for url, counts in stats["fetched"].items():
        num_bytes, requests = human_bytes(counts["bytes_fetched"]), counted(counts["requests"], "request")
        got = f"{num_bytes} in {requests}, {counts['retries']} repeated"
        lines.append(f"  {url}: fetched {got}; waited {counts['waited_s']:.1f} s in {counted(counts['waits'], 'wait')}")
    return "\n".join(lines)


def _say(text: str) -> None:
    import sys

    print(text, file=sys.stderr, flush=True)


@contextmanager
def _stop_signals() -> Iterator[int]:
    """Yield a descriptor that SIGINT and SIGTERM make readable."""
    import os
    import signal

    read, write = os.pipe()
    before = {number: signal.signal(number, lambda *_: os.write(write, b"s")) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield read
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(read)
        os.close(write)
