"""Cost of `loader seen` for one sample, by number of rows and of epochs."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.bench.harness import Case, Mark, Result, Subject, alternate, run_case, summarise

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bucketline.loader.config import Shuffle
    from bucketline.loader.seen import Seen

IDS = 8  # per figure
MARK = Mark(bound=20.0, is_at_most=True)


@dataclass(frozen=True, kw_only=True)
class SeenCost(Case):
    """Measure finding one sample's steps: its row by id in the index, and the steps by the inverted plan.

    The state is that of a run in the midst of its last epoch. `first` opens the stores, makes the plan and finds one id; the
    other figures find an id in stores that are open. Stores have full-length sidecars and files that are mostly holes; in the
    indexes only each shard's first sample is real. They are in the page cache.

    Example: python -m bucketline.bench.loader.seen_cost --rows 1000 1000000000
    """

    rows: tuple[int, ...] = (1_000, 1_000_000_000)
    """Rows of the stores; the first one is the limit of the others."""
    num_shards: int = 32
    """Shards of each store."""
    epochs: tuple[int, ...] = (1, 100)
    """Epochs of the run."""
    batch_size: int = 256
    """Rows per batch."""

    def measure(self, folder: Path) -> list[Result]:
        from bucketline.bench.fixtures.sparse_store import kept_sparse_store
        from bucketline.loader.config import Shuffle

        subjects: list[Subject] = []
        for shuffle in (Shuffle.FULL, Shuffle.BLOCKS, Shuffle.LINES):
            for epochs in self.epochs:
                limit: str | None = None
                for rows in self.rows:
                    path = kept_sparse_store(folder, self.num_shards, rows, is_indexed=False)
                    name = f"{shuffle}, {epochs} epoch{'s' if epochs > 1 else ''}: {rows:,} rows"
                    measure = self._find(path, shuffle, epochs)
                    subjects.append(Subject(name=name, measure=measure, limit=limit, mark=MARK if limit else None))
                    limit = limit or name
        first: list[Subject] = []
        for rows in self.rows:
            path = kept_sparse_store(folder, self.num_shards, rows, is_indexed=False)
            limit = first[0].name if first else None
            measure = self._first(path, Shuffle.FULL)
            first.append(Subject(name=f"first: {rows:,} rows", measure=measure, limit=limit, mark=MARK if limit else None))
        return summarise("seen_cost", "ms", [*subjects, *first], alternate([*subjects, *first], self.repeats))

    def _seen(self, path: Path, shuffle: Shuffle, epochs: int) -> Seen:
        import json

        from bucketline.loader import Loader, LoaderConfig
        from bucketline.loader.mixture import parse_stores
        from bucketline.loader.seen import Seen, read_run

        file = path.parent / f"{path.stem}-{shuffle}-{epochs}.json"
        if not file.exists():
            with Loader(path, LoaderConfig(batch_size=self.batch_size, shuffle=shuffle)) as loader:
                step = loader.plan.steps_before(epochs) - loader.plan.steps_before(1) // 2
                file.write_text(json.dumps({**loader.state_dict(), "step": step}))
        return Seen(read_run(file), parse_stores([path]))

    def _find(self, path: Path, shuffle: Shuffle, epochs: int) -> Callable[[int], float]:
        opened: list[Seen] = []

        def measure(_: int) -> float:
            if not opened:
                opened.append(self._seen(path, shuffle, epochs))
                opened[0].find(_id(0))
            begin = time.perf_counter()
            for shard in range(IDS):
                found, _buckets = opened[0].find(_id(shard % self.num_shards))
                if abs(len(found) - epochs) > 1:
                    raise AssertionError(f"{path}: a sample was seen {len(found)} times in {epochs} epochs")
            return (time.perf_counter() - begin) / IDS * 1e3

        return measure

    def _first(self, path: Path, shuffle: Shuffle) -> Callable[[int], float]:
        def measure(_: int) -> float:
            begin = time.perf_counter()
            self._seen(path, shuffle, self.epochs[0]).find(_id(0))
            return (time.perf_counter() - begin) * 1e3

        return measure


def _id(shard: int) -> str:
    """Return the id of a shard's first sample."""
    return f"s{shard:04d}/000000.png"


def main() -> int:
    """Make the stores, measure and print."""
    return run_case(SeenCost)


if __name__ == "__main__":
    sys.exit(main())
