"""Cost of making batches of rows from the disk, compared with O_DIRECT reads of the same size and py-lmdb's `get`."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from bucketline.bench.cold_runs import DIRECT, GET, GET_ROW, MARK, ColdRun, _count, _per_round, _subject, plan_rows
from bucketline.bench.harness import Case, Result, Subject, alternate, run_case
from bucketline.loader.prefetch.readahead import AHEAD_BYTES
from bucketline.store import Store


@dataclass(frozen=True, kw_only=True)
class ColdGather(Case):
    """Measure how fast cold batches of random rows are made. Every repeat is a fresh process with the store's pages dropped.

    Batches are made as the loader's prefetch thread makes them: rows drawn by the plan, read ahead, and all columns copied
    into pooled buffers with plain reads. Only the latents' bytes count. `no readahead` copies out of the map.

    A repeat counts only if the process's `read_bytes` grew by at least 0.95 of its payload. Otherwise it is retried, and then
    the case fails. The limit is O_DIRECT random reads of a row's size, with the fastest number of threads on this machine.
    py-lmdb is measured on the store's own shards (a value is a block of rows) and on a file with one row per value.

    Example: python -m bucketline.bench.store.cold_gather --size-mib 2048 --batches 128
    """

    size_mib: int = 512
    """MiB of the store's latents."""
    num_shards: int = 32
    """Shards of the store. A batch spans most of them."""
    row_kib: int = 128
    """KiB per row of latents."""
    batch_size: int = 32
    """Rows per batch."""
    batches: int = 96
    """Batches per repeat, of distinct rows; at most as many as the store has."""
    batches_of_get: int = 6
    """Batches per repeat of py-lmdb's `get`, which is slow."""
    ahead_mib: int = AHEAD_BYTES >> 20
    """MiB of batches between two stages of readahead, at least one batch. Default: the loader's own."""
    depths: tuple[int, ...] = (4, 8, 16, 32)
    """Thread counts of the O_DIRECT reads; the fastest is the limit."""
    reading_threads: int = 16
    """Threads of `FileGather`'s plain reads."""

    def measure(self, folder: Path) -> list[Result]:
        from bucketline.bench.cold_runs import kept_rows_file, with_best_depth
        from bucketline.bench.fixtures.synthetic_store import StoreShape, kept_store, latent_shape
        from bucketline.bench.store.cold_gather import cold_rows

        rows_per_shard = max(1, (self.size_mib << 10) // self.row_kib // self.num_shards)
        shape = StoreShape(
            num_shards=self.num_shards, rows_per_shard=rows_per_shard, latent_shape=latent_shape(self.row_kib), tokens=None
        )
        path = kept_store(folder, shape)
        with tempfile.TemporaryDirectory() as plans:
            subjects = cold_rows(self, path, kept_rows_file(path), Path(plans))
            return with_best_depth("cold_gather", subjects, alternate(subjects, self.repeats))


def main() -> int:
    """Make the store, measure and print."""
    return run_case(ColdGather)


if __name__ == "__main__":
    sys.exit(main())


def cold_rows(config: ColdGather, store: Path, rows_file: Path, plans: Path) -> list[Subject]:
    """Prepare the subjects of `cold_gather`."""
    num_rows = Store.open(store).buckets("train")[0].num_rows
    batches = _count(config.batches, config.batch_size, num_rows, "rows")
    size, of_get = config.batch_size, min(config.batches_of_get, batches)
    plan = _per_round(lambda number, path: plan_rows(store, rows_file, size, batches, number, path), plans)
    run = ColdRun(reader="", store=str(store), plan="", batch_size=size, batches=batches)
    ours, get, threads = replace(run, reader="batches"), replace(run, batches=of_get), config.reading_threads
    named = [
        *((f"{DIRECT}, {n} threads", replace(run, reader="direct", threads=n), store, None) for n in config.depths),
        ("gather, all columns, with readahead", replace(ours, ahead_mib=config.ahead_mib), store, MARK),
        ("gather, all columns, no readahead", ours, store, None),
        (f"plain reads, latents, {threads} threads", replace(run, reader="plain_reads", threads=threads), store, None),
        *(
            (f"{GET}, readahead {s}", replace(get, reader="lmdb_blocks", readahead=s == "on"), store, None)
            for s in ("on", "off")
        ),
        *(
            (f"{GET_ROW}, readahead {s}", replace(get, reader="lmdb_rows", readahead=s == "on"), rows_file, None)
            for s in ("on", "off")
        ),
    ]
    return [
        _subject(name, own, cold, plan, mark, *(() if own.reader in ("direct", "lmdb_blocks", "lmdb_rows") else (GET, GET_ROW)))
        for name, own, cold, mark in named
    ]
