"""The subjects of `hot_gather`: ways to deliver batches of random rows that lie in the page cache, and their limits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from bucketline.bench.copying import Copies
from bucketline.bench.harness import Mark, Subject, rate
from bucketline.loader import Loader, LoaderConfig
from bucketline.loader.gather import Gather
from bucketline.store.file_gather import FileGather

if TYPE_CHECKING:
    from collections.abc import Callable

    from bucketline.bench.hot_gather import HotGather
    from bucketline.store import Store

MARKED_THREADS = (1, 2)


def hot_subjects(config: HotGather, store: Store) -> list[Subject]:
    """Prepare the subjects, limits first; each run delivers `config.batches` batches and gives their bytes."""
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
    """Batches of random rows of a store, into one buffer `out`, `[B, C, h, w]`."""

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
        """Gather rows that were located before."""
        located = [self.bucket.locate(rows) for rows in self._rows]

        def run() -> int:
            torch.set_num_threads(num_threads)
            for place in located:
                self._gather.rows(place, self.column, self.out)
            return self._num_bytes

        return run

    def located_together(self, num_threads: int) -> Callable[[], int]:
        """Locate the rows of some batches at once, and gather batch by batch."""
        size, together = self._config.batch_size, self._config.together

        def run() -> int:
            torch.set_num_threads(num_threads)
            memory = self.out.view(-1).view(torch.uint8).numpy()
            for first in range(0, len(self._rows), together):
                rows = self._rows[first : first + together].reshape(-1)
                aim = self._gather.aim(self.bucket.locate(rows), self.column)
                if aim is None:
                    raise AssertionError("a store that was made here is read out of the map")
                for begin in range(0, len(rows), size):
                    self._gather.take(aim.part(begin, begin + size), memory)
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
        """Read rows that were located before by plain reads, shards side by side where there are threads for it."""
        gather, out = FileGather(self._store, num_threads), self.out.numpy()
        located = [self.bucket.locate(rows) for rows in self._rows]

        def run() -> int:
            for place in located:
                gather.rows(place, self.column, out)
            return self._num_bytes

        return run

    def end_to_end(self, num_threads: int) -> Callable[[], int]:
        """Take batches from the loader, every tensor of them counted; its own thread copies, whatever ours are."""
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
