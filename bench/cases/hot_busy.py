"""Effect of a trainer with busy Python threads on loading, in process and through the service."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.bench.harness import Case, Mark, Result, Subject, alternate, rate, run_case, summarise

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from bucketline.loader import Loader


@dataclass(frozen=True, kw_only=True)
class HotBusy(Case):
    """Measure a loader's rate with and without a concurrent thread of pure Python, and the time inside `next()`.

    `rate`: a loop that takes every batch as soon as it is ready and touches nothing. The limit is the same loader without the
    busy thread. `next()`: mean microseconds over a repeat, for a trainer that takes a batch every `--every-ms` milliseconds.

    Example: python -m bucketline.bench hot --busy --batches 400 --json
    """

    num_shards: int = 32
    """Shards of the store."""
    rows_per_shard: int = 128
    """Rows per shard."""
    row_kib: int = 128
    """KiB per row of latents."""
    batch_size: int = 32
    """Rows per batch."""
    batches: int = 192
    """Batches per repeat of `rate`."""
    paced_batches: int = 20
    """Batches per repeat of `next()`."""
    every_ms: int = 50
    """Milliseconds between two batches of the paced trainer."""
    prefetch_mib: int = 256
    """MiB of batches filled ahead."""
    threads: int = 1
    """Prefetch threads."""

    def measure(self, folder: Path) -> list[Result]:
        from bucketline.bench.fixtures.synthetic_store import StoreShape, kept_store, latent_shape
        from bucketline.loader import Loader, LoaderConfig
        from bucketline.store import Store

        shape = StoreShape(
            num_shards=self.num_shards, rows_per_shard=self.rows_per_shard, latent_shape=latent_shape(self.row_kib)
        )
        store = Store.open(kept_store(folder, shape))
        asked = LoaderConfig(batch_size=self.batch_size, prefetch_bytes=self.prefetch_mib << 20, threads=self.threads)
        results = []
        for name, service in (("in the process", None), ("through the service", "auto")):
            with Loader(store, asked, service=service) as loader:
                rates, paced = self._subjects(loader, name, is_served=service is not None)
                results += summarise("hot, busy trainer", "GB/s", rates, alternate(rates, self.repeats))
                results += summarise("hot, busy trainer, next()", "us", paced, alternate(paced, self.repeats))
        return results

    def _subjects(self, loader: Loader, name: str, *, is_served: bool) -> tuple[list[Subject], list[Subject]]:
        batches = loader.forever()

        def take() -> int:
            num_bytes = 0
            for _ in range(self.batches):
                num_bytes += sum(tensor.nbytes for tensor in next(batches).tensors())
            return num_bytes

        def pace(_: int) -> float:
            inside = 0.0
            for _ in range(self.paced_batches):
                time.sleep(self.every_ms / 1e3)
                begun = time.perf_counter()
                next(batches)
                inside += time.perf_counter() - begun
            return inside / self.paced_batches * 1e6

        take()  # allocates every buffer and maps every shard
        mark = Mark(bound=0.8) if is_served else None
        quiet, busy, machine = f"{name}, quiet", f"{name}, busy", f"{name}, next to a spinning process"
        rates = [
            Subject(name=quiet, measure=rate(take)),
            Subject(name=machine, measure=_beside_process(rate(take)), limit=quiet),
            Subject(name=busy, measure=_beside_python(rate(take)), limit=quiet, beside=(machine,), mark=mark),
        ]
        paced = [
            Subject(name=quiet, measure=pace),
            Subject(name=busy, measure=_beside_python(pace), limit=quiet),
        ]
        return rates, paced


def _beside_python(measure: Callable[[int], float]) -> Callable[[int], float]:
    """Measure while a thread of pure Python runs that never releases the interpreter's lock voluntarily."""

    def measured(number: int) -> float:
        with _busy():
            return measure(number)

    return measured


def _beside_process(measure: Callable[[int], float]) -> Callable[[int], float]:
    """Measure while another process spins: the cost of one busy core, independent of the interpreter's lock."""

    def measured(number: int) -> float:
        with subprocess.Popen(
            [sys.executable, "-P", "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE
        ) as other:
            try:
                assert other.stdout is not None
                other.stdout.readline()
                return measure(number)
            finally:
                other.kill()

    return measured


@contextmanager
def _busy() -> Iterator[None]:
    is_over = False

    def work() -> None:
        count = 0
        while not is_over:
            count += 1

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over = True
        thread.join()


def main() -> int:
    """Make the store, measure and print."""
    return run_case(HotBusy)


if __name__ == "__main__":
    sys.exit(main())
