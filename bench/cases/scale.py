"""Cost of planning by number of rows: time and memory."""

from __future__ import annotations

import time
import tracemalloc
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bucketline.bench.harness import Case, Mark, Result, Subject, alternate, summarise

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from bucketline.loader.plan.epoch_steps import ShardRuns
    from bucketline.loader.plan.plan import Plan

BITS = (10, 20, 40)
SHARDS = 10_000  # of the largest
WINDOW = 4096
FILL = 0.95  # sizes are this fraction of a power of two, so that none is a best or worst case
LARGE = Mark(bound=1.5, is_at_most=True)
NO_DEARER = Mark(bound=1.0, is_at_most=True)
BUCKETS = (1_000, 1_900, 3_500, 6_600, 12_300, 23_100, 43_300, 81_100, 152_000, 285_000, 534_000, 1_000_000)


@dataclass(frozen=True, kw_only=True)
class Scale(Case):
    """Measure planning: microseconds per micro-batch, and MiB, for a thousand, a million and a million million rows.

    The sizes are 0.95 of 2^10, 2^20 and 2^40 rows in one bucket, and 12 buckets of 1,000 to 1,000,000 rows, in 1 to 10,000
    shards. `drawn together` plans consecutive micro-batches, as many at once as the loader does. `drawn one by one` plans one
    at an unrelated position. Times are CPU time, since planning waits for nothing. Memory is the peak of a plan with a new seed
    while it draws, its sorted orders included.

    Example: python -m bucketline.bench scale --batch-size 32 --json
    """

    batch_size: int = 32
    """Rows per micro-batch."""
    together: int = 32
    """Micro-batches planned at once."""
    windows: int = 64
    """Number of such windows per figure."""

    def measure(self, folder: Path) -> list[Result]:
        del folder
        timed = [*self._by_rows(None, LARGE), *self._by_rows(WINDOW, None), *self._by_rows(0, None)]
        memory = [
            Subject(
                name=f"memory: {name}",
                measure=self._memory(plan),
                limit=limit and f"memory: {limit}",
                mark=LARGE if mark is LARGE else None,
            )
            for name, plan, limit, mark in self._plans(None, LARGE)
        ]
        return [
            *summarise("scale", "us", timed, alternate(timed, self.repeats)),
            *summarise("scale", "MiB", memory, alternate(memory, 1)),
        ]

    def _plans(self, window: int | None, large: Mark | None) -> list[tuple[str, Plan, str | None, Mark | None]]:
        """Return (name, plan, limit, target) tuples; the plan of a million rows is the limit of the others."""
        thousand, million, most = (int(FILL * (1 << bits)) for bits in BITS)
        limit = f"{million:,} rows"
        no_dearer = large and NO_DEARER
        return [
            (f"{thousand:,} rows", self._plan((thousand,), window), limit, no_dearer),
            (limit, self._plan((million,), window), None, None),
            (f"{most:,} rows", self._plan((most,), window), limit, large),
            ("12 buckets", self._plan(BUCKETS, window), limit, None),
        ]

    def _plan(self, sizes: Sequence[int], window: int | None) -> Plan:
        from bucketline.loader.config import Remainder
        from bucketline.loader.plan.plan import Plan, PlanBucket

        buckets = tuple(
            PlanBucket(name=f"train/{64 * number}x64", num_rows=rows, global_batch=self.batch_size)
            for number, rows in enumerate(sizes, 1)
        )
        runs = tuple(in_shards(rows) for rows in sizes)
        return Plan(seed=0, remainder=Remainder.CARRY, buckets=buckets, source="made up", window=window, runs=runs)

    def _by_rows(self, window: int | None, large: Mark | None) -> list[Subject]:
        subjects = []
        for how, measure in (("drawn together", self._together), ("drawn one by one", self._alone)):
            for name, plan, limit, mark in self._plans(window, large):
                at = f"{'all shuffled' if window is None else f'window {window}'}, {how}"
                subjects.append(
                    Subject(name=f"{at}: {name}", measure=measure(plan), limit=limit and f"{at}: {limit}", mark=mark)
                )
        return subjects

    def _together(self, plan: Plan) -> Callable[[int], float]:
        def measure(number: int) -> float:
            first = number * self.windows * self.together
            begin = time.thread_time()
            for at in range(first, first + self.windows * self.together, self.together):
                plan.draw([(at + step, 0) for step in range(self.together)])
            return (time.thread_time() - begin) / self.windows / self.together * 1e6

        return measure

    def _alone(self, plan: Plan) -> Callable[[int], float]:
        """Draw steps scattered over one epoch: the cost of a resume, without the search for its epoch."""
        steps = [step * 7_919 % plan.steps_before(1) for step in range(self.windows)]

        def measure(_: int) -> float:
            begin = time.thread_time()
            for step in steps:
                plan.at(step)
            return (time.thread_time() - begin) / self.windows * 1e6

        return measure

    def _memory(self, plan: Plan) -> Callable[[int], float]:
        """Return a measure of a plan with a new seed, of which nothing is cached yet."""

        def measure(number: int) -> float:
            fresh = replace(plan, seed=number + 1)
            tracemalloc.start()
            try:
                for at in range(0, self.windows * self.together, self.together):
                    fresh.draw([(at + step, 0) for step in range(self.together)])
                return tracemalloc.get_traced_memory()[1] / (1 << 20)
            finally:
                tracemalloc.stop()

        return measure


def in_shards(rows: int) -> ShardRuns:
    """Spread rows evenly over shards of at least a thousand, at most 10,000 shards."""
    import numpy as np

    from bucketline.loader.plan.epoch_steps import ShardRuns

    num_shards = min(SHARDS, max(1, rows // 1000))
    ends = np.arange(1, num_shards + 1) * rows // num_shards
    return ShardRuns(
        shard=np.arange(num_shards), repeat=np.zeros(num_shards, dtype=np.int64), num_rows=np.diff(ends, prepend=0)
    )
