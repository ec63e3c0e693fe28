"""Cost of making batches of random rows compared with memcpy of the same bytes, with a hot page cache."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

from bucketline.bench.batches import Batches
from bucketline.bench.harness import Case, Mark, Result, Subject, alternate, rate, run_case, summarise
from bucketline.bench.memcpy import Copies
from bucketline.loader import Loader, LoaderConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from bucketline.loader.collate.window import CopyPlan
    from bucketline.store import Store


@dataclass(frozen=True, kw_only=True)
class HotGather(Case):
    """Measure how fast hot batches of random rows are made against memcpy of the same bytes, with one thread and with two.

    Batches are made as the loader's prefetch threads make them: rows drawn by the plan, located, and all columns copied into
    pooled buffers, each thread a batch of its own. Samples have the empty caption. The limit is libc's memcpy into the same
    buffers, with as many threads. `gather, bare` times the copies only. `gather, located together` plans and locates several
    batches at once, as the loader does; `gather, located one by one` each by itself. `plain reads` copies without the map
    (`plain_reads=True`); `loader` is a loader with as many prefetch threads, its delivery included.

    Example: python -m bucketline.bench.store.hot_gather --num-shards 32 --threads 1 2 --json
    """

    num_shards: int = 32
    """Shards of the store. A batch spans most of them."""
    rows_per_shard: int = 128
    """Rows per shard."""
    row_kib: int = 128
    """KiB per row of latents."""
    batch_size: int = 32
    """Rows per batch."""
    batches: int = 96
    """Batches per repeat."""
    together: int = 32
    """Batches that are planned and located at once."""
    threads: tuple[int, ...] = (1, 2)
    """Numbers of threads that make batches; each is measured."""

    def measure(self, folder: Path) -> list[Result]:
        from bucketline.bench.fixtures.synthetic_store import StoreShape, kept_store, latent_shape
        from bucketline.bench.store.hot_gather import hot_subjects
        from bucketline.store import Store

        shape = StoreShape(
            num_shards=self.num_shards,
            rows_per_shard=self.rows_per_shard,
            latent_shape=latent_shape(self.row_kib),
            tokens=None,
        )
        subjects = hot_subjects(self, Store.open(kept_store(folder, shape)))
        return summarise("hot_gather", "GB/s", subjects, alternate(subjects, self.repeats))


def main() -> int:
    """Make the store, measure and print."""
    return run_case(HotGather)


if __name__ == "__main__":
    sys.exit(main())


MARKED_THREADS = (1, 2)


def hot_subjects(config: HotGather, store: Store) -> list[Subject]:
    """Prepare the subjects, limits first. Each run makes `config.batches` batches and counts the bytes of their buffers."""
    asked = LoaderConfig(batch_size=config.batch_size)
    mapped, plain = Batches(store, asked), Batches(store, replace(asked, plain_reads=True))
    lengths = [filled.num_bytes for filled in mapped.fill(mapped.planned(config.batches, config.together))]
    copies = Copies(store.manifest.payload_bytes, mapped.buffers)
    subjects = []
    for n in config.threads:
        threads = f"{n} thread{'s' if n > 1 else ''}"
        limit, copy = f"memcpy, {threads}", f"torch copy_, {threads}"
        mark = Mark(bound=0.9) if n in MARKED_THREADS else None
        named: list[tuple[str, Callable[[int], float], Mark | None]] = [
            ("gather, bare", _bare(config, mapped, n), mark),
            ("gather, located together", _made(config, mapped, config.together, n), mark),
            ("gather, located one by one", _made(config, mapped, 1, n), None),
            ("plain reads", _made(config, plain, config.together, n), None),
            ("loader", _end_to_end(config, store, replace(asked, threads=n)), None),
        ]
        subjects += [
            Subject(name=limit, measure=rate(copies.memcpy(lengths, n))),
            Subject(name=copy, measure=rate(copies.torch_copy(lengths, n)), limit=limit),
            *(
                Subject(name=f"{name}, {threads}", measure=measure, limit=limit, beside=(copy,), mark=own)
                for name, measure, own in named
            ),
        ]
    return subjects


def _bare(config: HotGather, batches: Batches, num_threads: int) -> Callable[[int], float]:
    """Return a measure of the copies: the batches were located, and their copy plans made, before the clock starts."""

    def measure(number: int) -> float:
        copy_plans = list(batches.planned(config.batches, config.batches))
        return _rate_of(batches, lambda: copy_plans, num_threads)(number)

    return measure


def _made(config: HotGather, batches: Batches, together: int, num_threads: int) -> Callable[[int], float]:
    """Return a measure of making batches from the plan's rows to the filled buffer, `together` located at once."""
    return _rate_of(batches, lambda: batches.planned(config.batches, together), num_threads)


def _rate_of(batches: Batches, copy_plans: Callable[[], Iterable[CopyPlan]], num_threads: int) -> Callable[[int], float]:
    return rate(lambda: sum(filled.num_bytes for filled in batches.fill(copy_plans(), num_threads)))


def _end_to_end(config: HotGather, store: Store, asked: LoaderConfig) -> Callable[[int], float]:
    """Return a measure of taking batches from the loader, with as many prefetch threads."""
    loader = Loader(store, asked)

    def run() -> int:
        num_bytes = sum(sum(tensor.nbytes for tensor in batch.tensors()) for batch in islice(loader.forever(), config.batches))
        loader.close()
        return num_bytes

    return rate(run)
