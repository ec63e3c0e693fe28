"""What opening a store costs: by rows, by shards, and with a first row located in each shard."""

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

OPENS = 20  # in one figure: an open takes a few ms


@dataclass(frozen=True, kw_only=True)
class OpenCost(Case):
    """Measure opening a store and naming its buckets: with few and with many rows, and with 1, 30 and 300 shards.

    The stores have sidecars of full length and files that are mostly holes, so that ten million rows fit anywhere. Times are
    of one open in a process that has opened stores before, its files in the page cache; memory is of a fresh process, by
    VmRSS: pages of mapped sidecars count, though they belong to the page cache.

    Example: python -m bucketline.bench.open_cost --rows 1000 10000000 --num-shards 32
    """

    rows: tuple[int, int] = (1_000, 10_000_000)
    """Rows of the small and of the large store."""
    num_shards: int = 32
    """Shards of both."""
    shards: tuple[int, ...] = (1, 30, 300)
    """Numbers of shards to open, of ten rows each."""

    def measure(self, folder: Path) -> list[Result]:
        from bucketline.bench.opening import open_and_locate, open_store
        from bucketline.bench.sparse_store import kept_sparse_store

        names = [f"{rows:,} rows, {self.num_shards} shards" for rows in self.rows]
        stores = [kept_sparse_store(folder, self.num_shards, rows) for rows in self.rows]
        sizes = {f"{n} shard{'s' if n > 1 else ''}": kept_sparse_store(folder, n, 10 * n) for n in self.shards}
        timed: list[Subject] = []
        for action, act in (("open", open_store), ("open and locate a row of each shard", open_and_locate)):
            timed += _pair([f"{action}: {name}" for name in names], [milliseconds(act, path) for path in stores])
        timed += [Subject(name=f"open: {name}", measure=milliseconds(open_store, path)) for name, path in sizes.items()]
        grown = [
            subject
            for action in ("open", "open and locate a row of each shard")
            for subject in _pair(
                [f"memory to {action}: {name}" for name in names], [memory(action != "open", path) for path in stores]
            )
        ]
        return [
            *summarise("open_cost", "ms", timed, alternate(timed, self.repeats)),
            *summarise("open_cost, memory", "MiB", grown, alternate(grown, self.repeats)),
        ]


def _pair(names: list[str], measures: list[Callable[[int], float]]) -> list[Subject]:
    """Make the subjects of the small and the large store; what the small one costs is the other's limit."""
    small, large = (Subject(name=name, measure=measure) for name, measure in zip(names, measures, strict=True))
    return [small, replace(large, limit=small.name, mark=Mark(bound=1.5, is_at_most=True))]


def milliseconds(act: Callable[[Path], object], path: Path) -> Callable[[int], float]:
    """Make a measure of what one call takes."""

    def measure(_: int) -> float:
        begin = time.perf_counter()
        for _again in range(OPENS):
            act(path)
        return (time.perf_counter() - begin) / OPENS * 1e3

    return measure


def memory(locate: bool, path: Path) -> Callable[[int], float]:  # noqa: FBT001 - said once, by one caller
    """Make a measure of what one call adds to the resident memory of a fresh process, in MiB."""

    def measure(_: int) -> float:
        command = [sys.executable, "-m", "bucketline.bench.opening", str(path), json.dumps(locate)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
        return float(json.loads(done.stdout)["grown_kib"]) / 1024

    return measure


def main() -> int:
    """Make the stores, measure, print."""
    return run_case(OpenCost)


if __name__ == "__main__":
    sys.exit(main())
