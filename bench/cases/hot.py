"""Cost of delivering complete batches (latents, captions, masks, sizes), hot, compared with memcpy of their bytes."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.bench.harness import Case, Mark, Result, Subject, alternate, rate, run_case, summarise

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bucketline.loader import LoaderConfig
    from bucketline.store import Store


@dataclass(frozen=True, kw_only=True)
class Hot(Case):
    """Measure a loader's batches end to end against memcpy of the same bytes, with as many threads, in the same run.

    memcpy copies into as many buffers in turn as the loader has, from as many bytes as the store holds. A loader's figure is
    that of a loop that takes batches without touching them, after every row has been delivered once. Prefetched batches are
    taken before the clock starts. Only the measured loader runs. Bytes are those of the tensors, padding included.

    Example: python -m bucketline.bench hot --num-shards 32 --threads 1 2 --json
    """

    num_shards: int = 32
    """Shards of the store. A batch spans most of them."""
    rows_per_shard: int = 128
    """Rows per shard."""
    row_kib: int = 128
    """KiB per row of latents."""
    batch_size: int = 32
    """Rows per batch."""
    batches: int = 192
    """Batches per repeat."""
    prefetch_mib: int = 64
    """MiB of batches filled ahead."""
    threads: tuple[int, ...] = (1, 2)
    """Numbers of prefetch threads; each is measured."""

    def measure(self, folder: Path) -> list[Result]:
        from bucketline.bench.fixtures.synthetic_store import StoreShape, kept_store, latent_shape
        from bucketline.store import Store

        shape = StoreShape(
            num_shards=self.num_shards, rows_per_shard=self.rows_per_shard, latent_shape=latent_shape(self.row_kib)
        )
        path = kept_store(folder, shape)
        subjects = _subjects(self, Store.open(path))
        return summarise("hot", "GB/s", subjects, alternate(subjects, self.repeats))


def _subjects(config: Hot, store: Store) -> list[Subject]:
    """Prepare the subjects, limits first."""
    from bucketline.bench.memcpy import Copies
    from bucketline.loader import Loader, LoaderConfig

    subjects = []
    for n in config.threads:
        threads = f"{n} thread{'s' if n > 1 else ''}"
        asked = LoaderConfig(batch_size=config.batch_size, prefetch_bytes=config.prefetch_mib << 20, threads=n)
        with Loader(store, asked) as loader:
            buffer_bytes = sum(tensor.nbytes for tensor in next(loader.forever()).tensors())
            copies = Copies(buffer_bytes, loader.stats().depth + 2, store.manifest.payload_bytes)
        limit, mark = f"memcpy, {threads}", Mark(bound=0.85)
        subjects += [
            Subject(name=limit, measure=rate(copies.memcpy(config.batches, n))),
            Subject(name=f"loader, {threads}", measure=delivering(config, store, asked, None), limit=limit, mark=mark),
            Subject(name=f"service, {threads}", measure=delivering(config, store, asked, "auto"), limit=limit, mark=mark),
        ]
    return subjects


def delivering(config: Hot, store: Store, asked: LoaderConfig, service: str | None) -> Callable[[int], float]:
    """Return a measure of a loader's rate in steady state, after all prefetched batches were taken.

    Steady state starts once readahead has stopped and every row was read once after that: a page that a process touches for
    the first time must enter its page table, and a batch of such pages takes 1.7 times as long.
    """
    from bucketline.loader import Loader
    from bucketline.loader.prefetch.readahead import WARM_AFTER

    one_pass = config.num_shards * config.rows_per_shard // config.batch_size

    def measure(_: int) -> float:
        for file in store.path.rglob("*"):  # some systems drop pages that nobody has read for a minute
            if file.is_file():
                file.read_bytes()
        with Loader(store, asked, service=service) as loader:
            batches = loader.forever()
            for _ in range(WARM_AFTER + one_pass):
                next(batches)
            while loader.stats().ready:
                next(batches)
            return rate(lambda: sum(sum(t.nbytes for t in next(batches).tensors()) for _ in range(config.batches)))(0)

    return measure


def main() -> int:
    """Make the store, measure and print."""
    return run_case(Hot)


if __name__ == "__main__":
    sys.exit(main())
