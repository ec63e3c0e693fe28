"""Delivery by a service that Prometheus scrapes, compared with one without metrics."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bucketline.bench.harness import Case, Mark, Result, Subject, alternate, run_case, summarise

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PLAIN, ASKED = "without metrics", "with metrics"
# Scrapes as Prometheus does, in a process of its own, until it is ended.
SCRAPING = """
import sys, time, urllib.request
while True:
    urllib.request.urlopen(sys.argv[1], timeout=30).read()
    time.sleep(float(sys.argv[2]))
"""


@dataclass(frozen=True, kw_only=True)
class MetricsCost(Case):
    """Compare the delivery of two services of the same store, one of which is scraped for metrics all the time.

    Both are `loader serve` processes. Prometheus usually scrapes every 15 seconds; here a process does every second.

    Example: python -m bucketline.bench.loader.metrics_cost --repeats 3
    """

    num_shards: int = 32
    """Shards of the store."""
    rows_per_shard: int = 128
    """Rows per shard."""
    row_kib: int = 128
    """KiB per row of latents."""
    batch_size: int = 32
    """Rows per batch."""
    batches: int = 768
    """Batches per repeat."""
    prefetch_mib: int = 64
    """MiB of batches filled ahead."""
    every: float = 1.0
    """Seconds between two requests for metrics."""

    def measure(self, folder: Path) -> list[Result]:
        from bucketline.bench.fixtures.synthetic_store import StoreShape, kept_store, latent_shape

        shape = StoreShape(
            num_shards=self.num_shards, rows_per_shard=self.rows_per_shard, latent_shape=latent_shape(self.row_kib)
        )
        path = kept_store(folder, shape)
        with ExitStack() as using:
            sockets = Path(using.enter_context(tempfile.TemporaryDirectory(prefix="bl-")))
            subjects = [
                Subject(name=PLAIN, measure=self._delivering(path, sockets, is_scraped=False)),
                Subject(
                    name=ASKED, measure=self._delivering(path, sockets, is_scraped=True), limit=PLAIN, mark=Mark(bound=0.99)
                ),
            ]
            return summarise("delivery by a service", "GB/s", subjects, alternate(subjects, self.repeats))

    def _delivering(self, store: Path, sockets: Path, *, is_scraped: bool) -> Callable[[int], float]:
        from bucketline.bench.loader.delivery import Delivery, delivering
        from bucketline.loader import LoaderConfig
        from bucketline.store import Store

        sizes = Delivery(
            num_shards=self.num_shards,
            rows_per_shard=self.rows_per_shard,
            batch_size=self.batch_size,
            batches=self.batches,
            prefetch_mib=self.prefetch_mib,
        )
        asked = LoaderConfig(batch_size=self.batch_size, prefetch_bytes=self.prefetch_mib << 20, threads=1)

        def measure(number: int) -> float:
            with _served(store, sockets / "s", self.every if is_scraped else None) as socket:
                return delivering(sizes, Store.open(store), asked, str(socket))(number)

        return measure


@contextmanager
def _served(store: Path, socket: Path, every: float | None) -> Iterator[Path]:
    """Serve a store, and scrape its metrics every so many seconds if that is given."""
    with ExitStack() as using:
        said = using.enter_context(started(store, socket, *([] if every is None else ["--metrics", "0"])))
        if every is not None:
            address = f"http://127.0.0.1:{said.split()[-1]}/metrics"
            scraper = using.enter_context(subprocess.Popen([sys.executable, "-P", "-S", "-c", SCRAPING, address, str(every)]))
            using.callback(scraper.kill)
        yield socket


@contextmanager
def started(store: Path, socket: Path, *options: str) -> Iterator[str]:
    """Run `loader serve`; yield the last line that it prints at its start."""
    command = [sys.executable, "-P", "-m", "bucketline.loader.cli", "serve", str(store), "--socket", str(socket)]
    with subprocess.Popen(
        [*command, "--every", "1e6", *options], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as service:
        try:
            assert service.stderr is not None
            said = service.stderr.readline()
            assert said.startswith("serving "), said
            yield service.stderr.readline() if options else said
        finally:
            service.terminate()


def main() -> int:
    """Make the store, measure and print."""
    return run_case(MetricsCost)


if __name__ == "__main__":
    sys.exit(main())
