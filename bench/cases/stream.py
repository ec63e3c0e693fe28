"""Cost of delivering from a store on a server: against raw ranged GETs of its lines, and a local store."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from bucketline.bench.harness import Case, Mark, Result, Subject, alternate, run_case, summarise
from bucketline.errors import BucketlineError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bucketline.bench.fixtures.server_process import ServerProcess
    from bucketline.bench.workers.remote_reader import Part, RemoteRun

CASE = "stream"
OF_GETS, CPU_OF_GETS, OF_LOCAL = Mark(bound=0.9), Mark(bound=1.3, is_at_most=True), Mark(bound=0.95)
OF_ROUND_TRIPS = Mark(bound=1.5, is_at_most=True)
# of the first batch of a store without captions, one after the other: manifest; extents with the checksums of lines, and the
# generation after it, which is not there; lines
ROUND_TRIPS = 3


@dataclass(frozen=True, kw_only=True)
class RemoteDelivery(Case):
    """Measure a loader that reads from a server on this machine through a cache, each run in a fresh process.

    The server is a process of its own that sends files by `sendfile`. The first epoch, with an empty cache, is held against
    `obstore`'s ranged GETs of the same lines, with as many requests at a time, whose bytes are dropped. GB are the lines'
    bytes; CPU is that of the reading process. An epoch whose lines are all in the cache is held against the same of the local
    store. The first batch is timed on stores of several sizes, whose files are mostly holes, with a latency before each of the
    server's answers, and held against the round trips that it needs.

    Example: python -m bucketline.bench stream --repeats 3
    """

    num_shards: int = 16
    """Shards of the store."""
    rows_per_shard: int = 256
    """Rows per shard."""
    row_kib: int = 128
    """KiB per row of latents."""
    batch_size: int = 32
    """Rows per batch."""
    first_batch_rows: tuple[int, ...] = (10_000, 100_000, 1_000_000)
    """Rows of the stores whose first batch is timed."""
    latency_ms: float = 30.0
    """Milliseconds before each of the server's answers, for the first batch."""

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
            ]

    def _first_epoch(self, runs: Runs) -> list[Result]:
        results = []
        for case, unit, figure, mark in (
            (f"{CASE}, first epoch", "GB/s", _gb_s, OF_GETS),
            (f"{CASE}, first epoch, CPU", "s/GB", _cpu_s_gb, CPU_OF_GETS),
        ):
            subjects = [
                Subject(name="GETs", measure=runs.figure("gets", figure)),
                Subject(name="loader", measure=runs.figure("loader", figure), limit="GETs", mark=mark),
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
        return summarise(f"{CASE}, first batch", "ms", subjects, figures)


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
            yield Path(own) / "lines"


def _gb_s(part: Part) -> float:
    return (part.sent_bytes or part.num_bytes) / part.seconds / 1e9


def _cpu_s_gb(part: Part) -> float:
    return part.cpu_s / (part.sent_bytes or part.num_bytes) * 1e9


def main() -> int:
    """Make the stores, serve them, measure and print."""
    return run_case(RemoteDelivery)


if __name__ == "__main__":
    sys.exit(main())
