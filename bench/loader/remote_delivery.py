"""Cost of delivering from a store on a server: against raw ranged GETs of its lines, the link, and a local store."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from bucketline.bench.harness import Case, Figures, Mark, Result, Subject, alternate, run_case, summarise
from bucketline.errors import BucketlineError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bucketline.bench.fixtures.server_process import ServerProcess
    from bucketline.bench.workers.remote_reader import Part, RemoteRun

CASE = "remote_delivery"
OF_GETS, CPU_OF_GETS, OF_LOCAL = Mark(bound=0.9), Mark(bound=1.3, is_at_most=True), Mark(bound=0.95)
OF_ROUND_TRIPS = Mark(bound=1.5, is_at_most=True)
# of the first batch of a store without captions, one after the other: manifest, the generation after it that is not there,
# extents with the checksums of lines, lines
ROUND_TRIPS = 4
ONCE = Mark(bound=1.05, is_at_most=True)  # of the store's bytes, over all machines, in the first epoch
NEVER_AGAIN = Mark(bound=0.01, is_at_most=True)  # in the later ones, if the caches together hold the store
OF_UNPINNED = Mark(bound=1.1, is_at_most=True)  # of the lines that are not pinned, each once an epoch
LINE_BYTES = 8 << 20
LEAST_HALVED = 3 << 30  # bytes of a store whose half is a cache: a smaller one's ring would not hold what two windows need
HALF_WINDOW_ROWS = 1024  # so that they do


@dataclass(frozen=True, kw_only=True)
class RemoteDelivery(Case):
    """Measure a loader that reads from a server on this machine through a cache, each run in a fresh process.

    The server is a process of its own that sends files by `sendfile`. The first epoch, with an empty cache, is held against
    `obstore`'s ranged GETs of the same lines, with as many requests at a time, whose bytes are dropped. They are held against
    plain sockets that read into buffers (`link`), and also measured with their bytes written to sparse files of the shards'
    lengths, as a cache must: the difference is what the disk costs. GB are
    the lines' bytes; CPU is that of the reading process. An epoch whose lines are all in the cache is held against the same of
    the local store. The first batch is timed on stores of several sizes, whose files are mostly holes, with a latency before
    each of the server's answers, and held against the round trips that it needs; those that it made are counted, and what its
    bytes take at the link's rate is printed apart. Bytes are those that leave the server in each
    epoch, as a share of the store's, over machines with caches of their own that run one after the other.

    Example: python -m bucketline.bench.loader.remote_delivery --repeats 3
    """

    num_shards: int = 16
    """Shards of the store."""
    rows_per_shard: int = 256
    """Rows per shard."""
    row_kib: int = 128
    """KiB per row of latents."""
    batch_size: int = 32
    """Rows per batch."""
    large_rows_per_shard: int = 1600
    """Rows per shard, without captions, of the store that is read through a cache of half its size. It must have 3 GiB."""
    first_batch_rows: tuple[int, ...] = (10_000, 100_000, 1_000_000)
    """Rows of the stores whose first batch is timed."""
    latency_ms: float = 30.0
    """Milliseconds before each of the server's answers, for the first batch."""
    machines: tuple[int, ...] = (1, 2, 4, 8)
    """Machines that share an epoch."""
    epochs: int = 3
    """Epochs whose bytes are counted."""

    def measure(self, folder: Path) -> list[Result]:
        from bucketline.bench.fixtures.pushed_store import pushed
        from bucketline.bench.fixtures.server_process import ServerProcess
        from bucketline.bench.fixtures.sparse_store import kept_sparse_store
        from bucketline.bench.fixtures.synthetic_store import StoreShape, kept_store, latent_shape
        from bucketline.bench.workers.remote_reader import RemoteRun

        shape = StoreShape(
            num_shards=self.num_shards, rows_per_shard=self.rows_per_shard, latent_shape=latent_shape(self.row_kib)
        )
        store, served = kept_store(folder, shape), folder / "served"
        pushed(store, served)
        sparse = {rows: kept_sparse_store(folder, 32, rows) for rows in self.first_batch_rows}
        for path in sparse.values():
            pushed(path, served)
        with ServerProcess(served) as server:
            run = RemoteRun(reader="", server=server.url, name=store.name, store=str(store), batch_size=self.batch_size)
            runs = Runs(folder=folder, server=server, run=run)
            return [
                *self._first_epoch(runs),
                *self._pinned(runs),
                *self._first_batches(runs, sparse),
                *self._bytes(runs, store),
                *self._half(runs, folder),
            ]

    def _first_epoch(self, runs: Runs) -> list[Result]:
        results = []
        for case, unit, figure, mark in (
            (f"{CASE}, first epoch", "GB/s", _gb_s, OF_GETS),
            (f"{CASE}, first epoch, CPU", "s/GB", _cpu_s_gb, CPU_OF_GETS),
        ):
            subjects = [
                Subject(name="link", measure=runs.figure("link", figure)),
                Subject(name="GETs", measure=runs.figure("gets", figure), beside=("link",)),
                Subject(name="GETs, written to sparse files", measure=runs.figure("files", figure), limit="GETs"),
                Subject(
                    name="loader",
                    measure=runs.figure("loader", figure),
                    limit="GETs",
                    beside=("link", "GETs, written to sparse files"),
                    mark=mark,
                ),
            ]
            results += summarise(case, unit, subjects, alternate(subjects, self.repeats))
        return results

    def _pinned(self, runs: Runs) -> list[Result]:
        results = []
        with runs.filled_cache() as cache:
            for case, unit, figure, mark in (
                (f"{CASE}, in the cache", "GB/s", _gb_s, OF_LOCAL),
                (f"{CASE}, in the cache, CPU", "s/GB", _cpu_s_gb, None),
            ):
                subjects = [
                    Subject(name="local store", measure=runs.figure("local", figure)),
                    Subject(name="loader", measure=runs.figure("pinned", figure, cache=cache), limit="local store", mark=mark),
                ]
                results += summarise(case, unit, subjects, alternate(subjects, self.repeats))
        return results

    def _first_batches(self, runs: Runs, stores: dict[int, Path]) -> list[Result]:
        needed = f"{ROUND_TRIPS} round trips"
        subjects = [Subject(name=needed, measure=lambda _: ROUND_TRIPS * self.latency_ms)]
        for rows, path in stores.items():
            run = replace(runs.run, name=path.name, store=str(path))
            measure = runs.figure("first_batch", lambda part: 1e3 * part.seconds, run=run)
            subjects.append(Subject(name=f"{rows} rows", measure=measure, limit=needed, mark=OF_ROUND_TRIPS))
        runs.server.set_latency(self.latency_ms / 1e3)
        figures = alternate(subjects, self.repeats)
        runs.server.set_latency(0)
        results = summarise(f"{CASE}, first batch", "ms", subjects, figures)
        rounds, link = range(1, self.repeats + 1), runs.figure("link", _gb_s)
        made: Figures = {needed: [float(ROUND_TRIPS)] * self.repeats}
        of_bytes: Figures = {}
        for rows, path in stores.items():
            run = replace(runs.run, name=path.name, store=str(path))
            trips = runs.figure("first_batch", lambda part: float(part.round_trips), run=run)
            num_bytes = runs.figure("first_batch", lambda part: float(part.needed_bytes), run=run)
            made[f"{rows} rows"] = [trips(number) for number in rounds]
            of_bytes[f"{rows} rows"] = [num_bytes(number) / link(number) / 1e6 for number in rounds]
        results += summarise(f"{CASE}, first batch, round trips made", "round trips", subjects, made)
        alone = [replace(subject, limit=None, mark=None) for subject in subjects[1:]]
        return results + summarise(f"{CASE}, first batch, its bytes at the link's rate", "ms", alone, of_bytes)

    def _bytes(self, runs: Runs, store: Path) -> list[Result]:
        size = line_bytes(store)
        results = []
        for machines in self.machines:
            epochs = runs.bytes_of_epochs(runs.run, machines, self.epochs, None)
            subjects = [f"epoch {number + 1}" for number in range(len(epochs))]
            own = _shares(f"{CASE}, bytes sent, {machines} machines", subjects, [sent / size for sent in epochs])
            marks = (ONCE, *(NEVER_AGAIN for _ in epochs[1:]))
            results += [replace(one, mark=mark) for one, mark in zip(own, marks, strict=True)]
        return results

    def _half(self, runs: Runs, folder: Path) -> list[Result]:
        """Count the bytes of epochs with a cache of half a store: those of every line that is not pinned, once."""
        from bucketline.bench.fixtures.pushed_store import pushed
        from bucketline.bench.fixtures.synthetic_store import StoreShape, kept_store, latent_shape

        rows = self.large_rows_per_shard
        if self.num_shards * rows * (self.row_kib << 10) < LEAST_HALVED:
            return []
        shape = StoreShape(
            num_shards=self.num_shards, rows_per_shard=rows, latent_shape=latent_shape(self.row_kib), tokens=None
        )
        store = kept_store(folder, shape)
        pushed(store, folder / "served")
        size = line_bytes(store)
        run = replace(runs.run, name=store.name, store=str(store), shuffle_window=HALF_WINDOW_ROWS)
        epochs = runs.bytes_of_epochs(run, 1, self.epochs, size // 2)
        ring = max(min(size // 4, 96 * LINE_BYTES), size // 16)
        unpinned = 1 - (size // 2 - ring) / size
        subjects = [f"epoch {number + 1}" for number in range(len(epochs))]
        limits = [1.0, *(unpinned for _ in epochs[1:])]
        return [
            replace(own, limit_ratio=round(own.median / limit, 4), mark=OF_UNPINNED)
            for own, limit in zip(
                _shares(f"{CASE}, bytes sent, a cache of half the store", subjects, [sent / size for sent in epochs]),
                limits,
                strict=True,
            )
        ]


@dataclass(slots=True, kw_only=True)
class Runs:
    """Runs the processes; those of one round are run once for all of their figures."""

    folder: Path
    server: ServerProcess
    run: RemoteRun
    _found: dict[tuple[int, str, str], list[Part]] = field(default_factory=dict)

    def figure(
        self, reader: str, figure: Callable[[Part], float], *, cache: Path | None = None, run: RemoteRun | None = None
    ) -> Callable[[int], float]:
        """Return a measure of a reader's last part."""
        asked = run or self.run

        def measure(number: int) -> float:
            key = number, reader, asked.name
            if key not in self._found:
                self._found[key] = self.parts(replace(asked, reader=reader), cache)
            return figure(self._found[key][-1])

        return measure

    def parts(self, run: RemoteRun, cache: Path | None = None) -> list[Part]:
        """Execute a run in a fresh process, with an empty cache unless one is given.

        Raises:
            BucketlineError: if the process fails; includes its last line of output.
        """
        from bucketline.bench.workers.remote_reader import Part

        with tempfile.TemporaryDirectory(prefix="cache-", dir=self.folder) as empty:
            asked = json.dumps(asdict(replace(run, cache=str(cache or Path(empty) / "lines"))))
            command = [sys.executable, "-P", "-m", "bucketline.bench.workers.remote_reader", asked]
            done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
            raise BucketlineError(f"the run `{run.reader}` failed: {reason}")
        return [Part(**part) for part in json.loads(done.stdout)]

    @contextmanager
    def filled_cache(self) -> Iterator[Path]:
        """Yield a cache that holds every line."""
        with tempfile.TemporaryDirectory(prefix="cache-", dir=self.folder) as own:
            self.parts(replace(self.run, reader="loader"), Path(own))
            yield Path(own) / "0"

    def bytes_of_epochs(self, run: RemoteRun, machines: int, epochs: int, cache_bytes: int | None) -> list[int]:
        """Return the bytes that leave the server in each epoch, over machines with caches of their own."""
        parts = self.parts(replace(run, reader="loader", world_size=machines, epochs=epochs, cache_bytes=cache_bytes))
        return [sum(part.sent_bytes for part in parts[epoch::epochs]) for epoch in range(epochs)]


def _gb_s(part: Part) -> float:
    return (part.sent_bytes or part.num_bytes) / part.seconds / 1e9


def _cpu_s_gb(part: Part) -> float:
    return part.cpu_s / (part.sent_bytes or part.num_bytes) * 1e9


def line_bytes(store: Path) -> int:
    """Return the bytes of all lines of a store."""
    from bucketline.store.format.manifest import read_manifest

    return sum(shard.lmdb.num_bytes for shard in read_manifest(store).shards)


def _shares(case: str, subjects: Sequence[str], values: Sequence[float]) -> list[Result]:
    """Return shares of a store's bytes; they do not vary."""
    rounded = [round(value, 6) for value in values]
    return [
        Result(case=case, subject=subject, unit="of the store", median=value, q1=value, q3=value, repeats=1, limit_ratio=value)
        for subject, value in zip(subjects, rounded, strict=True)
    ]


def main() -> int:
    """Make the stores, serve them, measure and print."""
    return run_case(RemoteDelivery)


if __name__ == "__main__":
    sys.exit(main())
