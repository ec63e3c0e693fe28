"""The service's statistics for Prometheus, counted when it scrapes them: batches pay nothing for it."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from bucketline.errors import UsageError
from bucketline.loader.service.sockets import host_port
from bucketline.store.remote.cache.fetch import LATENCY_BOUNDS_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from prometheus_client.core import Metric

_COUNTS = {  # by key of `Service.stats`: the name, and what it is
    "clients_so_far": ("clients", "Iterations that clients began."),
    "batches": ("batches", "Micro-batches filled for clients of this machine, or sent to others."),
    "samples": ("samples", "Samples of these."),
    "bytes": ("bytes", "Bytes of their tensors."),
    "waits": ("client_waits", "Times that a client waited for a micro-batch."),
    "waited_s": ("client_waited_seconds", "Seconds that clients waited for micro-batches."),
    "errors": ("errors", "Iterations that ended with an error."),
    "refused": ("requests_refused", "Clients that were refused."),
}
_FETCHED = {  # of each store in object storage
    "bytes_fetched": ("fetched_bytes", "Bytes fetched from object storage."),
    "requests": ("fetch_requests", "Requests to object storage."),
    "retries": ("fetch_retries", "Requests that were repeated."),
    "hits": ("cache_hits", "Lines that were in the cache when they were needed."),
    "misses": ("cache_misses", "Lines that were not."),
    "waits": ("fetch_waits", "Micro-batches that waited for a line."),
    "waited_s": ("fetch_waited_seconds", "Seconds that micro-batches waited for lines."),
}


@contextmanager
def metrics_served(address: str, stats: Callable[[], dict[str, Any]]) -> Iterator[int]:
    """Answer Prometheus at an address, from what `stats` returns (see `Service.stats`); yield the port."""
    host, port = host_port(address)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_ServiceCollector(stats))
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise UsageError(f"cannot listen at {address} for --metrics: {error.strerror or error}") from error
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _ServiceCollector:
    """Turns the service's statistics into metrics."""

    def __init__(self, stats: Callable[[], dict[str, Any]]) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        yield GaugeMetricFamily("bucketline_connected_clients", "Clients that read now.", value=stats["clients"])
        for key, (name, meaning) in _COUNTS.items():
            yield CounterMetricFamily(f"bucketline_{name}", meaning, value=stats[key])
        for key, (name, meaning) in _FETCHED.items():
            family = CounterMetricFamily(f"bucketline_{name}", meaning, labels=("url",))
            for url, counts in stats["fetched"].items():
                family.add_metric([url], counts[key])
            yield family
        seconds = HistogramMetricFamily(
            "bucketline_fetch_seconds", "From the request of a line to its arrival.", labels=("url",)
        )
        for url, counts in stats["fetched"].items():
            bounds = [*map(floatToGoString, LATENCY_BOUNDS_S), "+Inf"]
            seconds.add_metric([url], list(zip(bounds, accumulate(counts["fetch_latencies"]), strict=True)), counts["fetch_s"])
        yield seconds
