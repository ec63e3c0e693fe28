"""What a fresh loader's first 512 MB cost in processor time, beside what batches cost once everything is in place."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.bench.harness import Case, Mark, Result, Subject, alternate, run_case, summarise

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MARK = Mark(bound=1.3, is_at_most=True)


@dataclass(frozen=True, kw_only=True)
class FirstPass(Case):
    """Measure the processor's time that a fresh loader takes for its first 512 MB, beside as much later on.

    Both figures are of one process, which reads every word of every batch, as a trainer would; a process a round. The first
    one has what is made once in it: threads, buffers and their first touch, shards that are opened, pages of files that are put
    into the page table. The default of everything that a loader can be told but the batch's size.

    Example: python -m bucketline.bench.loader.first_pass --repeats 9
    """

    num_shards: int = 8
    """Shards of the store."""
    rows_per_shard: int = 512
    """Rows of a shard."""
    row_kib: int = 128
    """KiB of a row's latent."""
    batch_size: int = 32
    """Rows of a batch."""
    step_ms: float = 5.0
    """Milliseconds between two batches; 0 takes them as fast as they come."""

    def measure(self, folder: Path) -> list[Result]:
        from bucketline.bench.fixtures.synthetic_store import StoreShape, kept_store, latent_shape

        shape = StoreShape(
            num_shards=self.num_shards, rows_per_shard=self.rows_per_shard, latent_shape=latent_shape(self.row_kib)
        )
        runs = _Runs(kept_store(folder, shape), self.batch_size, self.step_ms)
        steady = Subject(name="once every row was delivered", measure=runs.figure("steady"))
        first = Subject(name="first 512 MB", measure=runs.figure("first"), limit=steady.name, mark=MARK)
        return summarise("first_pass", "CPU-s/GB", [steady, first], alternate([steady, first], self.repeats))


class _Runs:
    """One process a round tells both figures."""

    def __init__(self, store: Path, batch_size: int, step_ms: float) -> None:
        self._command = [
            sys.executable,
            "-P",
            "-m",
            "bucketline.bench.workers.first_pass",
            str(store),
            str(batch_size),
            str(step_ms),
        ]
        self._figures: dict[int, dict[str, float]] = {}

    def figure(self, name: str) -> Callable[[int], float]:
        """Make a measure of one figure: `first` or `steady`."""

        def measure(number: int) -> float:
            if number not in self._figures:
                done = subprocess.run(self._command, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
                self._figures[number] = json.loads(done.stdout)
            return self._figures[number][name]

        return measure


def main() -> int:
    """Make the store, measure, print."""
    return run_case(FirstPass)


if __name__ == "__main__":
    sys.exit(main())
