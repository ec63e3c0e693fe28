"""Time to the first batch, from a fresh start and after a resume."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.bench.harness import Case, Mark, Result, Subject, alternate, run_case, summarise

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MARK = Mark(bound=1.1, is_at_most=True)
RESUMED_AT = 0.9  # of the first epoch


@dataclass(frozen=True, kw_only=True)
class FirstBatch(Case):
    """Measure the time to the first batch, from a fresh start and resumed at nine tenths of an epoch.

    Each figure comes from a separate process, in alternation. `loader` is the time from creating the loader to holding a
    batch, with everything already imported. `process` is the time from the process's start to its end, imports included. The
    store has full-length sidecars and files that are mostly holes, in the page cache. The resumed process loads a state, and
    the benchmark checks that it continued at the right step.

    Example: python -m bucketline.bench start --batch --rows 1000000 --repeats 15
    """

    rows: int = 10_000_000
    """Rows of the store."""
    num_shards: int = 32
    """Shards of the store."""
    batch_size: int = 32
    """Rows per batch."""

    def measure(self, folder: Path) -> list[Result]:
        from bucketline.bench.fixtures.sparse_store import kept_sparse_store

        runs = _Runs(kept_sparse_store(folder, self.num_shards, self.rows), self.batch_size)
        subjects = []
        for part in ("loader", "process"):
            anew = Subject(name=f"{part}: fresh start", measure=runs.milliseconds(part, 0.0))
            resumed = Subject(
                name=f"{part}: resumed at {RESUMED_AT:.0%} of an epoch",
                measure=runs.milliseconds(part, RESUMED_AT),
                limit=anew.name,
                mark=MARK,
            )
            subjects += [anew, resumed]
        return summarise("start, batch", "ms", subjects, alternate(subjects, self.repeats))


class _Runs:
    """Measures both figures with one process per round and position in the epoch."""

    def __init__(self, store: Path, batch_size: int) -> None:
        self._store, self._batch_size = store, batch_size
        self._seconds: dict[tuple[int, float], dict[str, float]] = {}

    def milliseconds(self, part: str, share: float) -> Callable[[int], float]:
        """Return a measure in ms of a part: `loader` or `process`."""

        def measure(number: int) -> float:
            if (number, share) not in self._seconds:
                self._seconds[number, share] = self._run(share)
            return self._seconds[number, share][part] * 1e3

        return measure

    def _run(self, share: float) -> dict[str, float]:
        arguments = [str(self._store), str(self._batch_size), str(share)]
        begin = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-P", "-m", "bucketline.bench.workers.first_batch", *arguments],
            capture_output=True,
            text=True,
            check=True,
            stdin=subprocess.DEVNULL,
        )
        process_s = time.perf_counter() - begin
        told = json.loads(done.stdout)
        if (told["step"] > 0) != (share > 0):
            raise AssertionError(f"a run at {share} of an epoch began with step {told['step']}")
        return {"loader": told["took_s"], "process": process_s}


def main() -> int:
    """Make the store, measure and print."""
    return run_case(FirstBatch)


if __name__ == "__main__":
    sys.exit(main())
