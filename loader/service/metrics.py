"""The service's statistics for Prometheus, counted when it scrapes them: batches pay nothing for it."""

from __future__ import annotations

import socket
import sys
import threading
from contextlib import contextmanager, suppress
from itertools import accumulate
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from bucketline.errors import UsageError
from bucketline.loader.service.address import address_of
from bucketline.store.remote.cache.fetch_threads import LATENCY_BOUNDS_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from prometheus_client.core import Metric

MAX_CONNECTIONS = 16
ANSWER_S = 10.0  # from a connection to its answer


@contextmanager
def metrics_served(address: str, stats: Callable[[], dict[str, Any]]) -> Iterator[int]:
    """Answer Prometheus at an address, from what `stats` returns (see `Service.stats`); yield the port."""
    host, port = address_of(address)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_ServiceCollector(stats))
    try:
        server = (_Server6 if ":" in host else _MetricsServer)((host, port), _Handler)
    except OSError as error:
        raise UsageError(f"cannot listen at {address} for --metrics: {error.strerror or error}") from error
    server.set_app(make_wsgi_app(registry))
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.1}, name="bucketline-metrics", daemon=True
    )
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _MetricsServer(ThreadingMixIn, WSGIServer):
    """Answers each connection in a thread, a few at a time; further ones are closed."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[WSGIRequestHandler]) -> None:
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - as in the base class
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - likewise
        end = threading.Timer(ANSWER_S, _shut, (request,))
        end.daemon = True
        end.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            end.cancel()
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - likewise
        """Say nothing of clients that leave or are shut out, which is all that raises here."""
        if not isinstance(sys.exception(), OSError | ValueError):
            super().handle_error(request, client_address)


class _Server6(_MetricsServer):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    def log_message(self, *_: object) -> None: ...


def _shut(sock: socket.socket) -> None:
    with suppress(OSError):  # it has been answered in time
        sock.shutdown(socket.SHUT_RDWR)


_COUNTS = (  # name, key, what; filled for this machine's clients, sent to those of others
    ("clients", "clients", "Clients so far."),
    ("batches", "batches", "Micro-batches filled, or sent."),
    ("samples", "samples", "Samples filled, or sent."),
    ("bytes", "bytes", "Bytes of tensors filled, or sent."),
    ("client_waits", "waits", "Times that a client waited for a micro-batch."),
    ("client_waited_seconds", "waited_s", "Seconds that clients waited for micro-batches."),
    ("errors", "errors", "Iterations that ended with an error."),
)
_NOW = (
    ("ready", "ready", "Micro-batches that are filled and not yet taken, or sent."),
    ("is_waiting", "is_waiting", "1 while the client waits for a micro-batch."),
    ("depth", "depth", "Micro-batches that are filled ahead at most."),
    ("buffers", "buffers", "Buffers: ready, held by the client or free."),
)
_REFUSED = (("refused", "refused", "Clients that were refused."),)
_FETCHED = (
    ("fetched_bytes", "bytes_fetched", "Bytes fetched from object storage."),
    ("fetch_requests", "requests", "Requests to object storage."),
    ("fetch_retries", "retries", "Requests that were repeated."),
    ("cache_hits", "hits", "Lines that were in the cache when they were needed."),
    ("cache_misses", "misses", "Lines that were not."),
    ("fetch_waits", "waits", "Micro-batches that waited for a line."),
    ("fetch_waited_seconds", "waited_s", "Seconds that micro-batches waited for lines."),
)


class _ServiceCollector:
    """Turns the service's statistics into metrics."""

    def __init__(self, stats: Callable[[], dict[str, Any]]) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        fetched = [{"url": url, **own} for url, own in stats["fetched"].items()]
        clients = [
            {**one, "bucket": name, "count": count} for one in stats["clients"] for name, count in one["by_bucket"].items()
        ]
        whose, per_bucket = ("stores", "pid", "rank"), (("samples", "count", "Samples filled for a client that is connected."),)
        yield from _metrics(CounterMetricFamily, "", ("stores",), _COUNTS, stats["by_stores"])
        yield from _metrics(CounterMetricFamily, "requests_", (), _REFUSED, [stats])
        yield from _metrics(GaugeMetricFamily, "client_", whose, _NOW, stats["clients"])
        yield from _metrics(GaugeMetricFamily, "client_", (*whose, "bucket"), per_bucket, clients)
        yield from _metrics(CounterMetricFamily, "", ("url",), _FETCHED, fetched)
        yield _latencies(fetched)
        if (network := stats["network"]) is not None:
            sent = (("samples", "samples", "Samples sent to a client."),)
            total = {**network, "clients": network["clients_so_far"]}
            yield from _metrics(CounterMetricFamily, "network_", (), (*_COUNTS, *_REFUSED), [total])
            yield from _metrics(GaugeMetricFamily, "network_client_", ("address", "rank"), (*_NOW, *sent), network["clients"])


def _metrics(
    kind: type[CounterMetricFamily | GaugeMetricFamily],
    prefix: str,
    labels: tuple[str, ...],
    metrics: Iterable[tuple[str, str, str]],
    rows: Sequence[Mapping[str, Any]],
) -> Iterable[Metric]:
    """Yield a metric for each of the keys, with a value for each of the rows, which has its labels too."""
    for name, key, what in metrics:
        family = kind(f"bucketline_{prefix}{name}", what, labels=labels)
        for row in rows:
            family.add_metric([",".join(row[one]) if one == "stores" else str(row[one]) for one in labels], row[key])
        yield family


def _latencies(fetched: Iterable[Mapping[str, Any]]) -> Metric:
    family = HistogramMetricFamily("bucketline_fetch_seconds", "From the request of a line to its arrival.", labels=("url",))
    bounds = [*map(floatToGoString, LATENCY_BOUNDS_S), "+Inf"]
    for own in fetched:
        counts = accumulate(own["fetch_latencies"])
        family.add_metric([own["url"]], list(zip(bounds, counts, strict=True)), own["fetch_s"])
    return family
