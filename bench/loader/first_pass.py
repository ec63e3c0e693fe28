"""CPU time of a fresh loader's first 512 MB, compared with that of the same amount in the steady state."""

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
    """Measure the CPU time that a fresh loader takes for its first 512 MB, and for as much in the steady state.

    Both figures come from one process per round, which reads every word of every batch, as a trainer would. The first one
    includes all one-time work: starting threads, allocating and touching buffers, opening shards, filling the page table. Every
    option of the loader except the batch size has its default.

    Example: python -m bucketline.bench.loader.first_pass --repeats 9
    """

    num_shards: int = 8
    """Shards of the store."""
    rows_per_shard: int = 512
    """Rows per shard."""
    row_kib: int = 128
    """KiB per row of latents."""
    batch_size: int = 32
    """Rows per batch."""
    step_ms: float = 5.0
    """Milliseconds between two batches; 0: as fast as possible."""

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
    """Measures both figures with one process per round."""

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
        """Return a measure of one figure: `first` or `steady`."""

        def measure(number: int) -> float:
            if number not in self._figures:
                done = subprocess.run(self._command, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
                self._figures[number] = json.loads(done.stdout)
            return self._figures[number][name]

        return measure


def main() -> int:
    """Make the store, measure and print."""
    return run_case(FirstPass)


if __name__ == "__main__":
    sys.exit(main())
