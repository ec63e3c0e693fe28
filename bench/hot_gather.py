"""What delivering batches costs beside memcpy of the same bytes, with the page cache hot."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.bench.harness import Case, Result, alternate, run_case, summarise

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class HotGather(Case):
    """Measure hot delivery of random rows beside memcpy of the same bytes, with one thread and with two.

    The limit is libc's memcpy with as many threads. `gather, bare` has its rows located before; `gather, located together`
    finds the rows of some batches at once and then copies batch by batch, as a loader that looks ahead does; `gather,
    located one by one` finds each batch's rows before it copies them. `plain reads` is `FileGather`, `loader` all columns.

    Example: python -m bucketline.bench.hot_gather --num-shards 32 --threads 1 2 --json
    """

    num_shards: int = 32
    """Shards of the store; a batch spans most of them."""
    rows_per_shard: int = 128
    """Rows of a shard."""
    row_kib: int = 128
    """KiB of a row's latent."""
    batch_size: int = 32
    """Rows of a batch."""
    batches: int = 96
    """Batches of one repeat."""
    together: int = 32
    """Batches whose rows are located at once."""
    threads: tuple[int, ...] = (1, 2)
    """Threads that copy; each number is measured."""

    def measure(self, folder: Path) -> list[Result]:
        from bucketline.bench.hot_rows import hot_subjects
        from bucketline.bench.synthetic_store import StoreShape, kept_store, latent_shape
        from bucketline.store import Store

        shape = StoreShape(
            num_shards=self.num_shards, rows_per_shard=self.rows_per_shard, latent_shape=latent_shape(self.row_kib)
        )
        subjects = hot_subjects(self, Store.open(kept_store(folder, shape)))
        return summarise("hot_gather", "GB/s", subjects, alternate(subjects, self.repeats))


def main() -> int:
    """Make the store, measure, print."""
    return run_case(HotGather)


if __name__ == "__main__":
    sys.exit(main())
