"""What delivering whole batches costs beside memcpy of the same bytes: latents, captions, masks, sizes, hot, or cold."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bucketline.bench.harness import Case, Mark, Result, Subject, alternate, rate, run_case, summarise

if TYPE_CHECKING:
    from collections.abc import Callable

    from bucketline.loader import LoaderConfig
    from bucketline.store import Store


@dataclass(frozen=True, kw_only=True)
class Delivery(Case):
    """Measure a loader's batches, end to end, beside memcpy of the same bytes with as many threads in the same run.

    memcpy copies into as many slabs in turn as the loader has, out of as many bytes as the store holds. A loader's figure is
    of a loop that takes batches and touches nothing, once every row has been delivered; what was filled ahead is taken before
    the clock starts. Only the loader that is measured runs. Bytes are those of the tensors, padding included.

    Example: python -m bucketline.bench.delivery --num-shards 32 --threads 1 2 --json
    """

    num_shards: int = 32
    """Shards of the store; a batch spans most of them."""
    rows_per_shard: int = 128
    """Rows of a shard."""
    row_kib: int = 128
    """KiB of a row's latent."""
    batch_size: int = 32
    """Rows of a batch."""
    batches: int = 192
    """Batches of one repeat."""
    prefetch_mib: int = 64
    """MiB filled ahead."""
    threads: tuple[int, ...] = (1, 2)
    """Threads that fill; each number is measured."""
    cold: bool = False
    """Measure cold delivery instead, each repeat in a process of its own, beside O_DIRECT random reads of a row's size."""
    depths: tuple[int, ...] = (8, 16, 32)
    """Threads of O_DIRECT reads; the fastest is the limit."""

    def measure(self, folder: Path) -> list[Result]:
        from bucketline.bench.synthetic_store import StoreShape, kept_store, latent_shape
        from bucketline.store import Store

        shape = StoreShape(
            num_shards=self.num_shards, rows_per_shard=self.rows_per_shard, latent_shape=latent_shape(self.row_kib)
        )
        path = kept_store(folder, shape)
        if self.cold:
            from bucketline.bench.cold_subjects import cold_delivery, with_best_depth

            with tempfile.TemporaryDirectory() as plans:
                subjects = cold_delivery(self, path, Path(plans))
                return with_best_depth("delivery, cold", subjects, alternate(subjects, self.repeats))
        subjects = _subjects(self, Store.open(path))
        return summarise("delivery", "GB/s", subjects, alternate(subjects, self.repeats))


def _subjects(config: Delivery, store: Store) -> list[Subject]:
    """Prepare the subjects, limits first."""
    from bucketline.bench.copying import RingCopies
    from bucketline.loader import Loader, LoaderConfig

    subjects = []
    for n in config.threads:
        threads = f"{n} thread{'s' if n > 1 else ''}"
        asked = LoaderConfig(batch_size=config.batch_size, prefetch_bytes=config.prefetch_mib << 20, threads=n)
        with Loader(store, asked) as loader:
            slab_bytes = sum(tensor.nbytes for tensor in next(iter(loader)).tensors())
            copies = RingCopies(slab_bytes, loader.stats().depth + 2, store.manifest.payload_bytes)
        limit, mark = f"memcpy, {threads}", Mark(bound=0.85)
        subjects += [
            Subject(name=limit, measure=rate(copies.memcpy(config.batches, n))),
            Subject(name=f"loader, {threads}", measure=_delivering(config, store, asked, None), limit=limit, mark=mark),
            Subject(name=f"service, {threads}", measure=_delivering(config, store, asked, "auto"), limit=limit, mark=mark),
        ]
    return subjects


def _delivering(config: Delivery, store: Store, asked: LoaderConfig, service: str | None) -> Callable[[int], float]:
    """Make a measure of a loader's rate, from when all is as it stays and all that was filled ahead is taken.

    That is when no more is asked ahead, and then every row was read once: a page that a process meets for the first time has to
    be put into its page table; a batch of such pages takes 1.7 times as long.
    """
    from bucketline.loader import Loader
    from bucketline.loader.lookahead import WARM_AFTER

    one_pass = config.num_shards * config.rows_per_shard // config.batch_size

    def measure(_: int) -> float:
        for file in store.path.rglob("*"):  # some systems drop pages that were not read for a minute
            if file.is_file():
                file.read_bytes()
        with Loader(store, asked, service=service) as loader:
            batches = iter(loader)
            for _ in range(WARM_AFTER + one_pass):
                next(batches)
            while loader.stats().ready:
                next(batches)
            return rate(lambda: sum(sum(t.nbytes for t in next(batches).tensors()) for _ in range(config.batches)))(0)

    return measure


def main() -> int:
    """Make the store, measure, print."""
    return run_case(Delivery)


if __name__ == "__main__":
    sys.exit(main())
