"""Cost of delivering batches that are in the page cache: against memcpy, with text, and a busy trainer."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from bucketline.bench.apart import apart
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

    from bucketline.bench.peers.samples import SetShape
    from bucketline.loader import Loader, LoaderConfig

PLAIN = "F16"
WARM_BATCHES = 128  # until the loader is sure that nothing is read from the disk
PASSES = 2  # over the samples, for a figure of `hot --rows`
OF_LMDB, OF_ONE_BUCKET, FIRST_OF_LATER = (Mark(bound=bound, is_at_most=True) for bound in (0.5, 1.3, 1.3))
BY_ROW, LATENT_BYTES = "memcpy, a row at a time", 128 << 10
US_OF_SMALL = {1: 100, 8: 150}  # rows, and the target in microseconds
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

    memcpy copies into as many buffers in turn as the loader has, from as many bytes as the store holds; a row at a time, from
    random places, it shows what of a difference is due to rows that do not lie together. A loader's figure is
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
            by_row = rate(copies.memcpy(self.batches, n, self.row_kib << 10))
            subjects.append(Subject(name=f"{BY_ROW}, {threads}", measure=by_row, limit=f"memcpy, {threads}"))
            for name, service in (("loader", None), ("service", "auto")):
                measure = _gb_s(delivering(store.path, asked, self.one_pass, self.batches, service))
                beside = (f"{BY_ROW}, {threads}",)
                one = Subject(name=f"{name}, {threads}", measure=measure, limit=f"memcpy, {threads}", mark=mark, beside=beside)
                subjects.append(one)
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


@dataclass(frozen=True, kw_only=True)
class HotRows(Case):
    """Measure a batch by its rows, next to LMDB in a `DataLoader` without workers, in this process: wall and CPU microseconds.

    The same samples, of one bucket, in both: large ones with latents of 128 KiB and 20 to 77 tokens, and small ones with
    latents of 8 KiB and up to 4 tokens. Torch has one thread. Nothing touches the batches. The targets of small batches are
    microseconds; those against LMDB are of CPU time, of large samples. `memcpy` of as many latents, without text, is the floor.

    Example: python -m bucketline.bench hot --rows --sizes 1 32 --repeats 3
    """

    sizes: tuple[int, ...] = (1, 8, 32, 128)
    """Rows per batch."""
    samples: int = 1024
    """Large samples; there are four times as many small ones. A multiple of every size."""
    prefetch_mib: int = 16
    """MiB of batches filled ahead."""

    def measure(self, folder: Path) -> list[Result]:
        from bucketline.bench.peers.samples import SetShape

        large = SetShape(buckets=((128, 128, self.samples),), batch_size=1)
        small = SetShape(buckets=((32, 32, 4 * self.samples),), batch_size=1, tokens=(1, 4))
        subjects = [
            subject
            for kind, shape in (("large", large), ("small", small))
            for size in self.sizes
            for subject in self._subjects(folder, kind, replace(shape, batch_size=size))
        ]
        found = compare("hot, rows", {"wall": "us", "CPU": "us"}, subjects, self.repeats)
        most = {f"loader, {counted(size, 'small row')}": us for size, us in US_OF_SMALL.items()}
        return found + [
            replace(
                one, case=f"{one.case}, itself", limit_ratio=one.median, mark=Mark(bound=most[one.subject], is_at_most=True)
            )
            for one in found
            if one.subject in most
        ]

    def _subjects(self, folder: Path, kind: str, shape: SetShape) -> list[Subject]:
        from bucketline.bench.fixtures.stores import kept
        from bucketline.bench.peers.formats.bucketline_store import Ours
        from bucketline.bench.peers.formats.torch_samples import Lmdb
        from bucketline.bench.peers.registry import Way
        from bucketline.loader import LoaderConfig

        def written(peer: Ours | Lmdb) -> Path:
            def write(path: Path) -> None:
                path.mkdir()
                peer.write(shape, path)

            return kept(folder / f"rows-{kind}-{shape.num_samples}-{type(peer).__name__}", write)

        (store,) = written(Ours()).iterdir()
        asked = LoaderConfig(batch_size=shape.batch_size, prefetch_bytes=self.prefetch_mib << 20)
        batches = PASSES * shape.num_batches
        loader = delivering(store, asked, shape.num_batches, batches)
        folder_of_lmdb = written(Lmdb())

        def by_lmdb() -> Delivery:
            lmdb = Lmdb().open(shape, folder_of_lmdb, Way(threads=1))  # closed again: it can be open only once in a process
            for _ in lmdb.begin():
                pass
            clock = Clock()
            num_bytes = sum(batch.num_bytes for _ in range(PASSES) for batch in lmdb.begin())
            return num_bytes, *clock.spent()

        def by_memcpy() -> Delivery:
            copies = Copies(shape.batch_size * LATENT_BYTES, 8, shape.num_samples * LATENT_BYTES)
            run = copies.memcpy(batches, 1, LATENT_BYTES)
            run()
            clock = Clock()
            return run(), *clock.spent()

        rows = counted(shape.batch_size, f"{kind} row")
        marks = {"CPU": OF_LMDB} if kind == "large" and shape.batch_size > 1 else {}
        limit = f"LMDB in a DataLoader, {rows}"
        return [
            Subject(name=limit, measure=_us(by_lmdb, batches)),
            Subject(name=f"loader, {rows}", measure=_us(loader, batches), limit=limit, marks=marks),
            *([Subject(name=f"{BY_ROW}, {rows}", measure=_us(by_memcpy, batches), limit=limit)] if kind == "large" else []),
        ]


@dataclass(frozen=True, kw_only=True)
class HotMany(Case):
    """Measure a batch of a store of 1,000 buckets next to one of one bucket, and the first batches of a store of 1,000 shards.

    CPU microseconds a batch of 32 rows, the stores of 32,000 rows of 8 KiB in the page cache. The first 600 batches of a loader
    are held against the 600 after the first epoch, of 1,000 shards and of 10: each touches its pages for the first time in the
    first epoch, whatever the number of shards.

    Example: python -m bucketline.bench hot --many --repeats 3
    """

    buckets: int = 1000
    """Buckets of the one store."""
    shards: int = 1000
    """Shards of the other."""
    rows: int = 32_000
    """Rows of each store."""
    batch_size: int = 32
    """Rows per batch."""
    batches: int = 600
    """Batches per figure."""

    def measure(self, folder: Path) -> list[Result]:
        from bucketline.bench.fixtures.stores import kept_store, many_buckets, many_shards
        from bucketline.loader import LoaderConfig

        asked = LoaderConfig(batch_size=self.batch_size, prefetch_bytes=16 << 20)
        one_pass = self.rows // self.batch_size
        stores = {n: kept_store(folder, many_buckets(n, self.rows)) for n in (1, self.buckets)}
        one, many = (
            Subject(name=counted(n, "bucket"), measure=_us(delivering(path, asked, one_pass, self.batches), self.batches))
            for n, path in stores.items()
        )
        many = replace(many, limit=one.name, marks={"CPU": OF_ONE_BUCKET, "wall": OF_ONE_BUCKET})
        found = compare("hot, many", dict.fromkeys(("CPU", "wall"), "us"), [one, many], self.repeats)
        sharded = {n: kept_store(folder, many_shards(n, self.rows)) for n in (10, self.shards)}

        def touched(path: Path) -> Callable[[int], list[float]]:
            return lambda _: apart(first_and_later, path, self.batch_size, one_pass, self.batches)

        touching = [Subject(name=counted(n, "shard"), measure=touched(path)) for n, path in sharded.items()]  # type: ignore[arg-type]
        values = alternate(touching, self.repeats, warm_up=False)
        for at, when in enumerate(("first", "later")):
            found += [
                Result.of(f"hot, many, {when} batches", name, "us", [one[at] for one in own]) for name, own in values.items()
            ]
        for name, own in values.items():
            ratios = [first / later for first, later in own]
            found.append(Result.of("hot, many, first of later", name, "", ratios, mark=FIRST_OF_LATER))
        return found


def first_and_later(path: str, batch_size: int, one_pass: int, batches: int) -> tuple[float, float]:
    """Return the CPU microseconds of one of a loader's first batches, and of one after the first epoch, in a fresh process."""
    from bucketline.loader import Loader, LoaderConfig

    for file in Path(path).rglob("*"):
        if file.is_file():
            file.read_bytes()
    with Loader(path, LoaderConfig(batch_size=batch_size, prefetch_bytes=16 << 20)) as loader:
        own, found = loader.forever(), list[float]()
        for skipped in (1, one_pass):
            bytes_taken(own, skipped)
            clock = Clock()
            bytes_taken(own, batches)
            found.append(clock.spent()[1] / batches * 1e6)
    return found[0], found[1]


Delivery = tuple[int, float, float]  # bytes of the tensors, seconds, CPU seconds


def delivering(
    path: Path, asked: LoaderConfig, one_pass: int, batches: int, service: str | None = None
) -> Callable[[], Delivery]:
    """Return a function that takes batches of a loader in steady state, after all prefetched batches were taken.

    Steady state starts once readahead has stopped and every row was read once after that: a page that a process touches for
    the first time must enter its page table, and a batch of such pages takes 1.7 times as long.
    """
    from bucketline.loader import Loader

    def deliver() -> Delivery:
        for file in path.rglob("*"):  # some systems drop pages that nobody has read for a minute
            if file.is_file():
                file.read_bytes()
        with Loader(path, asked, service=service) as loader:
            own = loader.forever()
            for _ in range(WARM_BATCHES + one_pass):
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


def _us(deliver: Callable[[], Delivery], batches: int) -> Callable[[int], dict[str, float]]:
    def measure(_: int) -> dict[str, float]:
        _bytes, seconds, cpu_s = deliver()
        return {"wall": seconds / batches * 1e6, "CPU": cpu_s / batches * 1e6}

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
