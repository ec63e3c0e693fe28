"""Cost of delivering batches compared with memcpy of the same bytes, with a hot page cache."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from bucketline.bench.harness import Case, Mark, Result, Subject, alternate, rate, run_case, summarise
from bucketline.bench.memcpy import Copies
from bucketline.loader import Loader, LoaderConfig
from bucketline.loader.collate.gather import Gather
from bucketline.store.read.preadv import FileGather

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bucketline.store import Store


@dataclass(frozen=True, kw_only=True)
class HotGather(Case):
    """Measure hot delivery of random rows against memcpy of the same bytes, with one thread and with two.

    The limit is libc's memcpy with as many threads. `gather, bare` has its rows located in advance. `gather, located together`
    locates the rows of several batches at once and then copies batch by batch, as a loader with readahead does. `gather,
    located one by one` locates each batch's rows before copying them. `plain reads` is `FileGather`; `loader` reads all
    columns.

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
    """Batches whose rows are located at once."""
    threads: tuple[int, ...] = (1, 2)
    """Numbers of copying threads; each is measured."""

    def measure(self, folder: Path) -> list[Result]:
        from bucketline.bench.fixtures.synthetic_store import StoreShape, kept_store, latent_shape
        from bucketline.bench.store.hot_gather import hot_subjects
        from bucketline.store import Store

        shape = StoreShape(
            num_shards=self.num_shards, rows_per_shard=self.rows_per_shard, latent_shape=latent_shape(self.row_kib)
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
    """Prepare the subjects, limits first. Each run delivers `config.batches` batches and returns their bytes."""
    ours = HotRows(config, store)
    lengths = [config.batch_size * ours.column.row_bytes] * config.batches
    copies = Copies(ours.bucket.num_rows * ours.column.row_bytes, ours.out)
    subjects = []
    for n in config.threads:
        threads = f"{n} thread{'s' if n > 1 else ''}"
        limit, copy = f"memcpy, {threads}", f"torch copy_, {threads}"
        mark = Mark(bound=0.9) if n in MARKED_THREADS else None
        named: list[tuple[str, Callable[[], int], Mark | None]] = [
            ("gather, bare", ours.bare(n), mark),
            ("gather, located together", ours.located_together(n), mark),
            ("gather, located one by one", ours.located_one_by_one(n), None),
            ("plain reads", ours.plain_reads(n), None),
            ("loader", ours.end_to_end(n), None),
        ]
        subjects += [
            Subject(name=limit, measure=rate(copies.memcpy(lengths, n))),
            Subject(name=copy, measure=rate(copies.torch_copy(lengths, n)), limit=limit),
            *(
                Subject(name=f"{name}, {threads}", measure=rate(run), limit=limit, beside=(copy,), mark=own)
                for name, run, own in named
            ),
        ]
    return subjects


class HotRows:
    """Gathers batches of random rows of a store into one buffer `out`, `[B, C, h, w]`."""

    def __init__(self, config: HotGather, store: Store) -> None:
        self._config, self._store = config, store
        self.bucket = store.buckets("train")[0]
        self.column = self.bucket.spec.column("latent")
        self.out = torch.empty((config.batch_size, *self.column.shape), dtype=torch.float16)
        self._gather = Gather(store)
        random = np.random.default_rng(0)
        self._rows = random.integers(0, self.bucket.num_rows, (config.batches, config.batch_size))
        self._num_bytes = self._rows.size * self.column.row_bytes

    def bare(self, num_threads: int) -> Callable[[], int]:
        """Gather rows that were located in advance."""
        located = [self.bucket.locate(rows) for rows in self._rows]

        def run() -> int:
            torch.set_num_threads(num_threads)
            for place in located:
                self._gather.rows(place, self.column, self.out)
            return self._num_bytes

        return run

    def located_together(self, num_threads: int) -> Callable[[], int]:
        """Locate the rows of several batches at once, then gather batch by batch."""
        size, together = self._config.batch_size, self._config.together

        def run() -> int:
            torch.set_num_threads(num_threads)
            memory = self.out.view(-1).view(torch.uint8).numpy()
            for first in range(0, len(self._rows), together):
                rows = self._rows[first : first + together].reshape(-1)
                gather_index = self._gather.gather_index(self.bucket.locate(rows), self.column)
                if gather_index is None:
                    raise AssertionError("a store that was made here is read out of the map")
                for begin in range(0, len(rows), size):
                    self._gather.take(gather_index.part(begin, begin + size), memory)
            return self._num_bytes

        return run

    def located_one_by_one(self, num_threads: int) -> Callable[[], int]:
        """Locate and gather batch by batch."""

        def run() -> int:
            torch.set_num_threads(num_threads)
            for rows in self._rows:
                self._gather.rows(self.bucket.locate(rows), self.column, self.out)
            return self._num_bytes

        return run

    def plain_reads(self, num_threads: int) -> Callable[[], int]:
        """Read rows that were located in advance with plain reads, shards in parallel if there are threads for it."""
        gather, out = FileGather(self._store, num_threads), self.out.numpy()
        located = [self.bucket.locate(rows) for rows in self._rows]

        def run() -> int:
            for place in located:
                gather.rows(place, self.column, out)
            return self._num_bytes

        return run

    def end_to_end(self, num_threads: int) -> Callable[[], int]:
        """Take batches from the loader and count every tensor. The loader's own thread copies, regardless of `num_threads`."""
        loader = Loader(self._store, LoaderConfig(batch_size=self._config.batch_size))

        def run() -> int:
            torch.set_num_threads(num_threads)
            num_bytes = 0
            for number, batch in enumerate(loader, 1):
                num_bytes += sum(tensor.numel() * tensor.element_size() for tensor in batch.tensors())
                if number == self._config.batches:
                    break
            loader.close()
            return num_bytes

        return run
