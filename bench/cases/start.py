"""Cost of opening a store: by rows, by shards, and with one row located in each shard."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bucketline.bench.harness import Case, Mark, Result, Subject, alternate, run_case, summarise

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MARK = Mark(bound=1.5, is_at_most=True)
OPENS = 20  # per figure, because one open takes only a few ms


@dataclass(frozen=True, kw_only=True)
class OpenCost(Case):
    """Measure opening a store and listing its buckets: with few and with many rows, and with 1, 30 and 300 shards.

    The stores have full-length sidecars and files that are mostly holes, so that ten million rows fit anywhere. Times are for
    one open in a process that has opened stores before, with the files in the page cache. Memory is that of a fresh process.
    Resident memory includes the touched pages of mapped sidecars, which belong to the page cache; private memory does not.

    Example: python -m bucketline.bench start --rows 1000 10000000 --num-shards 32
    """

    rows: tuple[int, int] = (1_000, 10_000_000)
    """Rows of the small and the large store."""
    num_shards: int = 32
    """Shards of both stores."""
    shards: tuple[int, ...] = (1, 30, 300)
    """Numbers of shards to open, with ten rows each."""

    def measure(self, folder: Path) -> list[Result]:
        from bucketline.bench.fixtures.sparse_store import kept_sparse_store
        from bucketline.bench.workers.open_store import open_and_locate, open_store

        names = [f"{rows:,} rows, {self.num_shards} shards" for rows in self.rows]
        stores = [kept_sparse_store(folder, self.num_shards, rows) for rows in self.rows]
        sizes = {f"{n} shard{'s' if n > 1 else ''}": kept_sparse_store(folder, n, 10 * n) for n in self.shards}
        timed: list[Subject] = []
        for action, act in (("open", open_store), ("open and locate a row of each shard", open_and_locate)):
            timed += _pair([f"{action}: {name}" for name in names], [milliseconds(act, path) for path in stores], MARK)
        least = f"open: {next(iter(sizes))}"
        for name, path in sizes.items():
            limit = None if f"open: {name}" == least else least
            timed.append(Subject(name=f"open: {name}", measure=milliseconds(open_store, path), limit=limit))
        memory = _Memory()
        grown: list[Subject] = []
        for action in ("open", "open and locate a row of each shard"):
            for kind in ("resident", "private"):
                subjects = [f"{kind} memory to {action}: {name}" for name in names]
                grown += _pair(subjects, [memory.mib(kind, path, locate=action != "open") for path in stores], None)
        return [
            *summarise("start", "ms", timed, alternate(timed, self.repeats)),
            *summarise("start", "MiB", grown, alternate(grown, self.repeats)),
        ]


def _pair(names: list[str], measures: list[Callable[[int], float]], mark: Mark | None) -> list[Subject]:
    """Return the subjects of the small and the large store; the small one is the limit of the large one."""
    small, large = (Subject(name=name, measure=measure) for name, measure in zip(names, measures, strict=True))
    return [small, replace(large, limit=small.name, mark=mark)]


def milliseconds(act: Callable[[Path], object], path: Path) -> Callable[[int], float]:
    """Return a measure of one call's time in ms."""

    def measure(_: int) -> float:
        begin = time.perf_counter()
        for _again in range(OPENS):
            act(path)
        return (time.perf_counter() - begin) / OPENS * 1e3

    return measure


class _Memory:
    """Measures by how much one call grows the memory of a fresh process. One process per round reports all kinds."""

    def __init__(self) -> None:
        self._grown: dict[tuple[int, Path, bool], dict[str, int]] = {}

    def mib(self, kind: str, path: Path, *, locate: bool) -> Callable[[int], float]:
        """Return a measure in MiB: `resident` (with pages of mapped sidecars) or `private` (without them)."""

        def measure(number: int) -> float:
            if (number, path, locate) not in self._grown:
                command = [sys.executable, "-P", "-m", "bucketline.bench.workers.open_store", str(path), json.dumps(locate)]
                done = subprocess.run(command, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
                self._grown[number, path, locate] = json.loads(done.stdout)
            return self._grown[number, path, locate][f"{kind}_kib"] / 1024

        return measure


def main() -> int:
    """Make the stores, measure and print."""
    return run_case(OpenCost)


if __name__ == "__main__":
    sys.exit(main())
