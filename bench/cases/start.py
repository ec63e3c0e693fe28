"""Cost of opening a store, by rows, by shards, and with one row located in each shard; and time to the first batch."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from bucketline.bench.apart import apart
from bucketline.bench.harness import Case, Clock, Mark, Result, Subject, alternate, compare, summarise

if TYPE_CHECKING:
    from collections.abc import Callable

    from bucketline.store import Store

MARK, BATCH_MARK = Mark(bound=1.5, is_at_most=True), Mark(bound=1.1, is_at_most=True)
OPENS = 20  # per figure, because one open takes only a few ms
OPEN_MANY = Mark(bound=50, is_at_most=True)  # ms of CPU
RESUMED_AT = 0.9  # of the first epoch
LOCATE = "open and locate a row of each shard"


@dataclass(frozen=True, kw_only=True)
class Start(Case):
    """Measure opening a store and listing its buckets: few and many rows; 1,000 buckets or shards.

    The stores have full-length sidecars and files that are mostly holes, so that ten million rows fit anywhere. Times are for
    one open in a process that has opened stores before, with the files in the page cache.

    Example: python -m bucketline.bench start --rows 1000 10000000 --num-shards 32
    """

    rows: tuple[int, int] = (1_000, 10_000_000)
    """Rows of the small and the large store."""
    num_shards: int = 32
    """Shards of both stores."""
    many: int = 1000
    """Buckets, and shards, of two more stores."""
    many_rows: int = 32_000
    """Rows of each of these."""

    def measure(self, folder: Path) -> list[Result]:
        from bucketline.bench.fixtures.stores import kept_sparse_store, kept_store, many_buckets, many_shards

        timed = []
        for action in ("open", LOCATE):
            names = [f"{action}: {rows:,} rows, {self.num_shards} shards" for rows in self.rows]
            for name, rows in zip(names, self.rows, strict=True):
                path, locate = kept_sparse_store(folder, self.num_shards, rows), action == LOCATE
                one = Subject(name=name, measure=_milliseconds(path, locate=locate))
                timed.append(one if name == names[0] else replace(one, limit=names[0], mark=MARK))
        shapes = {"buckets": many_buckets(self.many, self.many_rows), "shards": many_shards(self.many, self.many_rows)}
        many = [
            Subject(name=f"open: {self.many:,} {what}", measure=_cpu_ms(kept_store(folder, shape)))
            for what, shape in shapes.items()
        ]
        opened = alternate(many, self.repeats)
        return [
            *summarise("start", "ms", timed, alternate(timed, self.repeats)),
            *(Result.of("start, many, CPU", name, "ms", values, mark=OPEN_MANY) for name, values in opened.items()),
        ]


def _open(path: Path, *, locate: bool) -> Store:
    """Open a store and list its buckets; `locate`: and locate the last row of each of its shards."""
    import numpy as np

    from bucketline.store import Store

    store = Store.open(path)
    buckets = store.buckets()
    if locate:
        (bucket,) = buckets
        ends = np.cumsum([shard.groups[bucket.name].rows for shard in store.manifest.shards])
        located = bucket.locate(ends - 1)
        if located.shard.tolist() != list(range(len(store.shards))):
            raise AssertionError(f"{path}: the last rows of its shards were located in shards {located.shard.tolist()}")
    return store


def _milliseconds(path: Path, *, locate: bool) -> Callable[[int], float]:
    def measure(_: int) -> float:
        begin = time.perf_counter()
        for _again in range(OPENS):
            _open(path, locate=locate)
        return (time.perf_counter() - begin) / OPENS * 1e3

    return measure


def _cpu_ms(path: Path) -> Callable[[int], float]:
    def measure(_: int) -> float:
        clock = Clock()
        _open(path, locate=False)
        return clock.spent()[1] * 1e3

    return measure


@dataclass(frozen=True, kw_only=True)
class FirstBatch(Case):
    """Measure the time to the first batch, from a fresh start and resumed at nine tenths of an epoch.

    Each figure comes from a separate process, in alternation. The first is the time from creating the loader to holding a
    batch, with everything already imported. `process` is the time from the process's start to its end, imports included. The
    store has full-length sidecars and files that are mostly holes, in the page cache. The resumed process loads a state, and
    the benchmark checks that it continued at the right step. `CPU` is of all threads, from creating the loader to holding a
    batch, of the first loader of a process and of a second one in the same process.

    Example: python -m bucketline.bench start --batch --rows 1000000 --repeats 15
    """

    rows: int = 10_000_000
    """Rows of the store."""
    num_shards: int = 32
    """Shards of the store."""
    batch_size: int = 32
    """Rows per batch."""

    def measure(self, folder: Path) -> list[Result]:
        from bucketline.bench.fixtures.stores import kept_sparse_store

        path = kept_sparse_store(folder, self.num_shards, self.rows)

        def begun(share: float, loaders: int = 1) -> Callable[[int], dict[str, float]]:
            def measure(_: int) -> dict[str, float]:
                begin = time.perf_counter()
                loader_s, cpu_s, step = apart(first_batch, path, self.batch_size, share, loaders)
                if (step > 0) != (share > 0):
                    raise AssertionError(f"a run at {share} of an epoch began with step {step}")
                return {"": loader_s * 1e3, "CPU": cpu_s * 1e3, "process": (time.perf_counter() - begin) * 1e3}

            return measure

        fresh = Subject(name="fresh start", measure=begun(0.0))
        resumed = Subject(
            name=f"resumed at {RESUMED_AT:.0%} of an epoch",
            measure=begun(RESUMED_AT),
            limit=fresh.name,
            mark=BATCH_MARK,
            marks={"process": BATCH_MARK},
        )
        second = Subject(name="a second loader of the process", measure=begun(0.0, loaders=2))
        return [
            *compare("start, batch", {"": "ms", "process": "ms"}, [fresh, resumed], self.repeats),
            *compare("start, batch", {"CPU": "ms"}, [second, replace(fresh, limit=second.name)], self.repeats),
        ]


def first_batch(path: str, batch_size: int, share: float, loaders: int) -> tuple[float, float, int]:
    """Take the first batch of loaders, one after the other, set to `share` of the first epoch if not 0.

    Return the last one's seconds and CPU seconds, and its batch's step.
    """
    from bucketline.loader.config import LoaderConfig
    from bucketline.loader.loader import Loader

    if loaders > 1:
        first_batch(path, batch_size, share, loaders - 1)
    clock = Clock()
    with Loader(Path(path), LoaderConfig(batch_size=batch_size)) as loader:
        if share > 0:
            loader.load_state_dict({**loader.state_dict(), "step": int(share * loader.plan.steps_before(1))})
        batch = next(_kept := loader.forever())  # whose end waits for what is being read ahead
        return *clock.spent(), batch.step
