"""Cost of delivering batches that are in the page cache: against memcpy, with text, and a busy trainer."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bucketline.bench.harness import (
    Case,
    Clock,
    Copies,
    Mark,
    Result,
    StoreCase,
    Subject,
    alternate,
    bytes_taken,
    compare,
    rate,
    summarise,
)
from bucketline.command_line import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from bucketline.loader import Loader, LoaderConfig

PLAIN = "F16"
TEXT_WAYS = (  # name, dtype, how the tokens are delivered
    (PLAIN, PLAIN, "dequantised"),
    ("I8, dequantised by the loader", "I8", "dequantised"),
    ("I8, as stored", "I8", "stored"),
    ("F8_E4M3, dequantised by the loader", "F8_E4M3", "dequantised"),
    ("F8_E4M3, as stored", "F8_E4M3", "stored"),
)


@dataclass(frozen=True, kw_only=True)
class Hot(StoreCase):
    """Measure a loader's batches end to end against memcpy of the same bytes, with as many threads, in the same run.

    memcpy copies into as many buffers in turn as the loader has, from as many bytes as the store holds. A loader's figure is
    that of a loop that takes batches without touching them, after every row has been delivered once. Prefetched batches are
    taken before the clock starts. Only the measured loader runs. Bytes are those of the tensors, padding included.

    Example: python -m bucketline.bench hot --num-shards 32 --threads 1 2 --json
    """

    batches: int = 192
    """Batches per repeat."""
    prefetch_mib: int = 64
    """MiB of batches filled ahead."""
    threads: tuple[int, ...] = (1, 2)
    """Numbers of prefetch threads; each is measured."""

    def measure(self, folder: Path) -> list[Result]:
        from bucketline.loader import Loader, LoaderConfig
        from bucketline.store import Store

        store = Store.open(self.kept_store(folder))
        subjects = []
        for n in self.threads:
            asked = LoaderConfig(batch_size=self.batch_size, prefetch_bytes=self.prefetch_mib << 20, threads=n)
            with Loader(store, asked) as loader:
                buffer_bytes = bytes_taken(loader.forever(), 1)
                copies = Copies(buffer_bytes, loader.stats().depth + 2, store.manifest.payload_bytes)
            threads, mark = counted(n, "thread"), Mark(bound=0.85)
            subjects.append(Subject(name=f"memcpy, {threads}", measure=rate(copies.memcpy(self.batches, n))))
            for name, service in (("loader", None), ("service", "auto")):
                measure = _gb_s(delivering(store.path, asked, self.one_pass, self.batches, service))
                subjects.append(Subject(name=f"{name}, {threads}", measure=measure, limit=f"memcpy, {threads}", mark=mark))
        return summarise("hot", "GB/s", subjects, alternate(subjects, self.repeats))


@dataclass(frozen=True, kw_only=True)
class HotText(Case):
    """Measure a loader's samples per second from stores that differ only in how captions' tokens are stored.

    Every caption has all tokens, as Flux stores them. `disk` is what a sample takes of the store's files. Batches are taken
    after every row was delivered once. CPU time is that of all threads meanwhile. All are compared with F16.

    Example: python -m bucketline.bench hot --text --rows 96 --repeats 3
    """

    rows: int = 384
    """Rows of each store, each with a caption of its own."""
    num_tokens: int = 512
    """Tokens per caption."""
    token_width: int = 4096
    """Values per token."""
    latent_side: int = 64
    """Latent positions per side, with 16 channels: 64 is an image of 512 px."""
    batch_size: int = 8
    """Rows per batch."""
    batches: int = 24
    """Batches per repeat."""
    threads: int = 1
    """Prefetch threads."""

    def measure(self, folder: Path) -> list[Result]:
        from bucketline.bench.fixtures.stores import StoreShape, kept_store
        from bucketline.loader import LoaderConfig, TextForm

        shape = StoreShape(
            num_shards=1,
            rows_per_shard=self.rows,
            latent_shape=(16, self.latent_side, self.latent_side),
            tokens=(self.num_tokens, self.num_tokens),
            token_width=self.token_width,
        )
        subjects, disk = [], dict[str, list[float]]()
        for name, dtype, form in TEXT_WAYS:
            path = kept_store(folder, replace(shape, text_dtype=dtype))
            taken = sum(file.stat().st_blocks * 512 for file in path.rglob("*") if file.is_file())
            disk[f"disk: {dtype}"] = [taken / self.rows / (1 << 20)]
            asked = LoaderConfig(batch_size=self.batch_size, threads=self.threads, text=TextForm(form))
            measure = delivering(path, asked, -(-self.rows // self.batch_size), self.batches)
            subjects.append(
                Subject(name=name, measure=_of_samples(measure, self.batches * self.batch_size), beside=_plain(name))
            )
        stored = [Subject(name=name, measure=lambda _: 0.0, beside=_plain(name)) for name in disk]
        return [
            *summarise("hot, text", "MiB/sample", stored, disk),
            *compare("hot, text", {"": "samples/s", "CPU": "CPU-ms/sample"}, subjects, self.repeats),
        ]


def _plain(name: str) -> tuple[str, ...]:
    start, _, way = name.rpartition(": ")
    return () if way == PLAIN else (f"{start}: {PLAIN}" if start else PLAIN,)


Delivery = tuple[int, float, float]  # bytes of the tensors, seconds, CPU seconds


def delivering(
    path: Path, asked: LoaderConfig, one_pass: int, batches: int, service: str | None = None
) -> Callable[[], Delivery]:
    """Return a function that takes batches of a loader in steady state, after all prefetched batches were taken.

    Steady state starts once readahead has stopped and every row was read once after that: a page that a process touches for
    the first time must enter its page table, and a batch of such pages takes 1.7 times as long.
    """
    from bucketline.loader import Loader
    from bucketline.loader.prefetch.ahead import WARM_AFTER

    def deliver() -> Delivery:
        for file in path.rglob("*"):  # some systems drop pages that nobody has read for a minute
            if file.is_file():
                file.read_bytes()
        with Loader(path, asked, service=service) as loader:
            own = loader.forever()
            for _ in range(WARM_AFTER + one_pass):
                next(own)
            while loader.stats().ready:
                next(own)
            clock = Clock()
            num_bytes = bytes_taken(own, batches)
            return num_bytes, *clock.spent()

    return deliver


def _gb_s(deliver: Callable[[], Delivery]) -> Callable[[int], float]:
    def measure(_: int) -> float:
        num_bytes, seconds, _cpu_s = deliver()
        return num_bytes / seconds / 1e9

    return measure


def _of_samples(deliver: Callable[[], Delivery], samples: int) -> Callable[[int], dict[str, float]]:
    def measure(_: int) -> dict[str, float]:
        _bytes, seconds, cpu_s = deliver()
        return {"": samples / seconds, "CPU": cpu_s * 1e3 / samples}

    return measure


@dataclass(frozen=True, kw_only=True)
class HotBusy(StoreCase):
    """Measure a loader's rate with and without a concurrent thread of pure Python, and the time inside `next()`.

    `rate`: a loop that takes every batch as soon as it is ready and touches nothing. The limit is the same loader without the
    busy thread. `next()`: mean microseconds over a repeat, for a trainer that takes a batch every `--every-ms` milliseconds.

    Example: python -m bucketline.bench hot --busy --batches 400 --json
    """

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
        from bucketline.loader import Loader, LoaderConfig

        path = self.kept_store(folder)
        asked = LoaderConfig(batch_size=self.batch_size, prefetch_bytes=self.prefetch_mib << 20, threads=self.threads)
        results: list[Result] = []
        waits: list[Result] = []
        for name, service in (("in the process", None), ("through the service", "auto")):
            with Loader(path, asked, service=service) as loader:
                rates, paced = self._subjects(loader, name, is_served=service is not None)
                results += summarise("hot, busy trainer", "GB/s", rates, alternate(rates, self.repeats))
                waits += summarise("hot, busy trainer, next()", "us", paced, alternate(paced, self.repeats))
        return [*results, *waits]

    def _subjects(self, loader: Loader, name: str, *, is_served: bool) -> tuple[list[Subject], list[Subject]]:
        batches = loader.forever()

        def take() -> int:
            return bytes_taken(batches, self.batches)

        def pace(_: int) -> float:
            inside = 0.0
            for _ in range(self.paced_batches):
                time.sleep(self.every_ms / 1e3)
                begun = time.perf_counter()
                next(batches)
                inside += time.perf_counter() - begun
            return inside / self.paced_batches * 1e6

        def beside(
            other: Callable[[], AbstractContextManager[None]], measure: Callable[[int], float]
        ) -> Callable[[int], float]:
            def measured(number: int) -> float:
                with other():
                    return measure(number)

            return measured

        take()  # allocates every buffer and maps every shard
        mark = Mark(bound=0.8) if is_served else None
        quiet, busy, machine = f"{name}, quiet", f"{name}, busy", f"{name}, next to a spinning process"
        rates = [
            Subject(name=quiet, measure=beside(nullcontext, rate(take))),
            Subject(name=machine, measure=beside(_busy_process, rate(take)), limit=quiet),
            Subject(name=busy, measure=beside(_busy_python, rate(take)), limit=quiet, beside=(machine,), mark=mark),
        ]
        paced = [Subject(name=quiet, measure=pace), Subject(name=busy, measure=beside(_busy_python, pace), limit=quiet)]
        return rates, paced


@contextmanager
def _busy_process() -> Iterator[None]:
    """Have another process spin: the cost of one busy core, independent of the interpreter's lock."""
    spin = [sys.executable, "-P", "-c", "print(flush=True)\nwhile True: pass"]
    with subprocess.Popen(spin, stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            other.stdout.readline()
            yield
        finally:
            other.kill()


@contextmanager
def _busy_python() -> Iterator[None]:
    """Have a thread of pure Python that never releases the interpreter's lock voluntarily."""
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
