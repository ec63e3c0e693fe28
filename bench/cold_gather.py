"""What delivering rows from the disk costs, beside O_DIRECT reads of the same size and py-lmdb's `get`."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bucketline.bench.harness import Case, Result, alternate, run_case


@dataclass(frozen=True, kw_only=True)
class ColdGather(Case):
    """Measure cold delivery of random rows: every repeat is a process of its own, after the store's pages were dropped.

    A repeat counts only if the process's `read_bytes` grew by 0.95 of its payload at least; otherwise it is tried again, and
    then refused. The limit is O_DIRECT random reads of a row's size with the number of threads that is fastest here. py-lmdb
    is measured on the store's own shards (a value is a block of rows) and on a file with one row a value.

    Example: python -m bucketline.bench.cold_gather --size-mib 2048 --batches 128
    """

    size_mib: int = 512
    """MiB of the store's latents."""
    num_shards: int = 32
    """Shards of the store; a batch spans most of them."""
    row_kib: int = 128
    """KiB of a row's latent."""
    batch_size: int = 32
    """Rows of a batch."""
    batches: int = 96
    """Batches of one repeat, of distinct rows; at most what the store has."""
    batches_of_get: int = 6
    """Batches of one repeat of py-lmdb's `get`, which is slow."""
    ahead: int = 2
    """Batches asked for ahead."""
    depths: tuple[int, ...] = (4, 8, 16, 32)
    """Threads of O_DIRECT reads; the fastest is the limit."""
    reading_threads: int = 16
    """Threads of the plain reads of `FileGather`."""

    def measure(self, folder: Path) -> list[Result]:
        from bucketline.bench.cold_subjects import cold_rows, kept_rows_file, with_best_depth
        from bucketline.bench.synthetic_store import StoreShape, kept_store, latent_shape

        rows_per_shard = max(1, (self.size_mib << 10) // self.row_kib // self.num_shards)
        shape = StoreShape(
            num_shards=self.num_shards, rows_per_shard=rows_per_shard, latent_shape=latent_shape(self.row_kib), tokens=None
        )
        path = kept_store(folder, shape)
        with tempfile.TemporaryDirectory() as plans:
            subjects = cold_rows(self, path, kept_rows_file(path), Path(plans))
            return with_best_depth("cold_gather", subjects, alternate(subjects, self.repeats))


def main() -> int:
    """Make the store, measure, print."""
    return run_case(ColdGather)


if __name__ == "__main__":
    sys.exit(main())
