"""Cost of planning by number of rows, and of `ingest pack`'s work on a listing by samples and shards: time and memory."""

from __future__ import annotations

import time
import tracemalloc
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, product
from typing import TYPE_CHECKING

from bucketline.bench.harness import Case, Mark, Result, Subject, alternate, summarise

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from bucketline.ingest.parallel.items import Outline
    from bucketline.ingest.sources.source import Listing
    from bucketline.loader.plan.epoch_steps import ShardRuns
    from bucketline.loader.plan.plan import Plan

BITS = (10, 20, 40)
SHARDS = 10_000  # of the largest
WINDOW = 4096
FILL = 0.95  # sizes are this fraction of a power of two, so that none is a best or worst case
LARGE = Mark(bound=1.5, is_at_most=True)
NO_DEARER = Mark(bound=1.0, is_at_most=True)
BUCKETS = (1_000, 1_900, 3_500, 6_600, 12_300, 23_100, 43_300, 81_100, 152_000, 285_000, 534_000, 1_000_000)
CAPTION = "a photograph of two boats under a grey sky at noon, {}"  # about 60 characters
# a cost of samples times shards would give 16 at the largest default; values above 1 come from opening a shard (0.3 ms) and
# from colder caches
LINEAR = Mark(bound=2.5, is_at_most=True)


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


@dataclass(frozen=True, kw_only=True)
class ScaleListing(Case):
    """Measure rank 0's work in a run without new images, except listing and publishing's own files, in μs per sample.

    The source has exactly the store's images. The steps are: find new images (to check disk space), find samples that are no
    longer in the source, build each rank's index of packed images, and find rows replaced by those of other shards, with half
    of the shards new. Times are CPU time of one thread, with the stores' sidecars in the page cache. The limit is the smallest
    store's figure, so a cost that grows only with the samples stays near 1. The stores' payload is holes.

    Bytes are those that Python and numpy hold per image of the listing: as it comes from a source, and as kept by rank 0 and
    by another rank once each rank has its images. Ids and captions take about a hundred bytes here.

    Example: python -m bucketline.bench scale --listing --samples 250000 1000000 --shards 50 200
    """

    repeats: int = 3
    """Repeats per subject, in alternation. The first round is a warm-up and not counted."""
    samples: tuple[int, ...] = (250_000, 500_000, 1_000_000)
    """Samples per store, and images per listing."""
    shards: tuple[int, ...] = (50, 100, 200)
    """Shards per store; each is combined with each number of samples."""
    ranks: int = 8
    """Ranks that share a listing when its memory is measured."""

    def measure(self, folder: Path) -> list[Result]:
        timed, least = list[Subject](), dict[str, str]()
        for samples, shards in product(self.samples, self.shards):
            for step, act in _steps(folder, samples, shards).items():
                name = f"{step}: {samples:,} samples, {shards} shards"
                limit = least.setdefault(step, name)
                timed.append(Subject(name=name, measure=partial(_microseconds, act, samples), limit=limit, mark=LINEAR))
        count, ranks = min(self.samples), self.ranks
        makers: dict[str, Callable[[], object]] = {
            "as it comes from a source": partial(_listing, count),
            "kept by rank 0 of 1": partial(_dealt, count, 1, 0),
            f"kept by rank 0 of {ranks}": partial(_dealt, count, ranks, 0),
            f"kept by rank 1 of {ranks}": partial(_dealt, count, ranks, 1),
        }
        held = [Subject(name=f"listing {name}", measure=partial(_bytes_an_image, make, count)) for name, make in makers.items()]
        return [
            *summarise("scale, listing", "μs/sample", timed, alternate(timed, self.repeats)),
            *summarise("scale, listing", "B/image", held, alternate(held, 1, warm_up=False)),
        ]


def _steps(folder: Path, samples: int, shards: int) -> dict[str, Callable[[], object]]:
    """Make a store and return the steps of a run over a source that has exactly its images."""
    from bucketline.bench.fixtures.stores import kept_sparse_store
    from bucketline.ingest.packed_index import PackedIndex, not_in_source, unknown
    from bucketline.store import Store
    from bucketline.store.folder import LocalFolder
    from bucketline.store.write.publish import ChangeBase, replaced

    path = kept_sparse_store(folder, shards, samples)
    outline = _outline_of(path)

    def publishing() -> None:
        manifest = Store.open(path).manifest
        entries, half = manifest.shards, len(manifest.shards) // 2
        base = ChangeBase(LocalFolder(path), replace(manifest, shards=entries[:half]), 1, path)
        if replaced(base, entries[half:], ())[0] != entries:
            raise AssertionError(f"{path}: rows were replaced, and no sample is there twice")

    def new() -> None:
        if unknown(Store.open(path), outline).any():
            raise AssertionError(f"{path}: images are new, and all are its own")

    def gone() -> None:
        if len(not_in_source(Store.open(path), outline)):
            raise AssertionError(f"{path}: samples are not in the source, and all are")

    return {
        "which are new": new,
        "which are gone": gone,
        "what a rank looks up in": lambda: PackedIndex(Store.open(path)),
        "which rows give way": publishing,
    }


def _microseconds(act: Callable[[], object], samples: int, _: int) -> float:
    begin = time.process_time()
    act()
    return (time.process_time() - begin) / samples * 1e6


def _outline_of(path: Path) -> Outline:
    """Return the outline of a source whose images are the store's samples."""
    from bucketline.bench.fixtures.stores import sample_ids
    from bucketline.ingest.parallel.items import take_apart
    from bucketline.ingest.sources.source import Listing, SourceItem
    from bucketline.store import Store

    shards = Store.open(path).manifest.shards
    ids = chain.from_iterable(sample_ids(shard.name, shard.samples) for shard in shards)
    items = [SourceItem(id=sample_id, captions=()) for sample_id in sorted(ids)]
    return take_apart(Listing(items=items), 1)[0]


def _listing(count: int) -> Listing:
    from bucketline.ingest.sources.source import Listing, SourceItem

    items = [SourceItem(id=f"photographs/{n // 1000:05d}/{n:09d}.jpg", captions=(CAPTION.format(n),)) for n in range(count)]
    return Listing(items=items)


def _dealt(count: int, num_ranks: int, rank: int) -> object:
    """Return what a rank keeps: its images, and on rank 0 also the outline of all images."""
    from bucketline.ingest.parallel.items import take_apart

    outline, slices = take_apart(_listing(count), num_ranks)
    return (outline, slices[0]) if rank == 0 else slices[rank]


def _bytes_an_image(make: Callable[[], object], count: int, _: int) -> float:
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        made = make()
        now = tracemalloc.get_traced_memory()[0]
        del made
    finally:
        tracemalloc.stop()
    return (now - before) / count
