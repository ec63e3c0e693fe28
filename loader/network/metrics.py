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
from bucketline.loader.network.addresses import address_of
from bucketline.store.remote.cache.held_line import LATENCY_BOUNDS_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from prometheus_client.core import Metric

MAX_CONNECTIONS = 16
ANSWER_S = 10.0  # from a connection to its answer
_Rows = list[tuple[list[str], float]]


@contextmanager
def metrics_served(address: str, stats: Callable[[], dict[str, Any]]) -> Iterator[int]:
    """Answer Prometheus at an address, from what `stats` returns (see `Service.stats`); yield the port.

    Raises:
        UsageError: if nothing can listen at the address.
    """
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


class _ServiceCollector:
    """Turns the service's statistics into metrics."""

    def __init__(self, stats: Callable[[], dict[str, Any]]) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        yield from _of_stores(stats["by_stores"])
        yield from _of_clients(stats["clients"])
        yield from _of_fetching(stats["fetched"])
        if stats["network"] is not None:
            yield from _of_network(stats["network"])
        yield _counter("bucketline_requests_refused", "Clients that were refused.", (), [([], stats["refused"])])


def _of_stores(by_stores: list[dict[str, Any]]) -> Iterable[Metric]:
    for name, key, what in (
        ("clients", "clients", "Clients so far."),
        ("batches", "batches", "Micro-batches filled."),
        ("samples", "samples", "Samples filled."),
        ("bytes", "bytes", "Bytes of tensors filled."),
        ("client_waits", "waits", "Times that a client waited for a micro-batch."),
        ("client_waited_seconds", "waited_s", "Seconds that clients waited for micro-batches."),
        ("errors", "errors", "Iterations that ended with an error."),
    ):
        yield _counter(f"bucketline_{name}", what, ("stores",), [([",".join(one["stores"])], one[key]) for one in by_stores])


def _of_clients(clients: list[dict[str, Any]]) -> Iterable[Metric]:
    labels = ("stores", "pid", "rank")
    named = [([",".join(one["stores"]), str(one["pid"]), str(one["rank"])], one) for one in clients]
    for name, what in (
        ("ready", "Micro-batches that are filled and not yet taken."),
        ("is_waiting", "1 while the client waits for a micro-batch."),
        ("depth", "Micro-batches that are filled ahead at most."),
        ("buffers", "Buffers in shared memory: ready, held by the client or free."),
    ):
        yield _gauge(f"bucketline_client_{name}", what, labels, [(label, one[name]) for label, one in named])
    samples: _Rows = [([*label, bucket], count) for label, one in named for bucket, count in one["by_bucket"].items()]
    yield _gauge("bucketline_client_samples", "Samples filled for a client that is connected.", (*labels, "bucket"), samples)


def _of_network(network: dict[str, Any]) -> Iterable[Metric]:
    for name, key, what in (
        ("clients", "clients_so_far", "Iterations of clients on other machines so far."),
        ("batches", "batches", "Micro-batches sent to other machines."),
        ("samples", "samples", "Samples sent to other machines."),
        ("bytes", "bytes", "Bytes of tensors sent to other machines."),
        ("errors", "errors", "Iterations of other machines that ended with an error."),
        ("refused", "refused", "Connections from other machines that were refused."),
    ):
        yield _counter(f"bucketline_network_{name}", what, (), [([], network[key])])
    named = [([one["address"], str(one["rank"])], one) for one in network["clients"]]
    for name, what in (("ready", "Micro-batches that are filled and not yet sent."), ("samples", "Samples sent to a client.")):
        rows = [(label, one[name]) for label, one in named]
        yield _gauge(f"bucketline_network_client_{name}", what, ("address", "rank"), rows)


def _of_fetching(fetched: dict[str, dict[str, Any]]) -> Iterable[Metric]:
    for name, key, what in (
        ("fetched_bytes", "bytes_fetched", "Bytes fetched from object storage."),
        ("fetch_requests", "requests", "Requests to object storage."),
        ("fetch_retries", "retries", "Requests that were repeated."),
        ("cache_hits", "hits", "Lines that were in the cache when they were needed."),
        ("cache_misses", "misses", "Lines that were not."),
        ("fetch_waits", "waits", "Micro-batches that waited for a line."),
        ("fetch_waited_seconds", "waited_s", "Seconds that micro-batches waited for lines."),
    ):
        yield _counter(f"bucketline_{name}", what, ("url",), [([url], own[key]) for url, own in fetched.items()])
    family = HistogramMetricFamily("bucketline_fetch_seconds", "From the request of a line to its arrival.", labels=("url",))
    for url, own in fetched.items():
        counts = list(accumulate(own["fetch_latencies"]))
        bounds = [*map(floatToGoString, LATENCY_BOUNDS_S), "+Inf"]
        family.add_metric([url], list(zip(bounds, counts, strict=True)), own["fetch_s"])
    yield family


def _counter(name: str, what: str, labels: tuple[str, ...], rows: _Rows) -> CounterMetricFamily:
    family = CounterMetricFamily(name, what, labels=labels)
    for label, value in rows:
        family.add_metric(label, value)
    return family


def _gauge(name: str, what: str, labels: tuple[str, ...], rows: _Rows) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, what, labels=labels)
    for label, value in rows:
        family.add_metric(label, value)
    return family
