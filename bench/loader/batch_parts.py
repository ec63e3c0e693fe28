"""The gap between the loader and memcpy: the time of a batch, part by part, compared with memcpy of its bytes."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from bucketline.bench.harness import Case, Result, Subject, alternate, run_case, summarise

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from bucketline.bench.memcpy import RingCopies
    from bucketline.loader.collate.window import CopyPlan, PendingBatch
    from bucketline.loader.loader import Loader
    from bucketline.store import Store

MEMCPY, COPIED, OTHER = "memcpy of its bytes", "filled: the large columns copied", "filled: all else worked out and copied"
PLANNED, TAKEN, BESIDES = "planned and located", "taken: next() of a batch that is ready", "all but the copying"
PARTS = (MEMCPY, PLANNED, COPIED, OTHER, TAKEN, BESIDES)


@dataclass(frozen=True, kw_only=True)
class BatchParts(Case):
    """Measure the parts of delivering one batch, hot, in microseconds of one thread.

    The filling thread's parts are timed by doing its work in this process: planning and locating micro-batches, copying the
    large columns (latents and tokens), and the rest of the filling (drawing and locating captions, and the small columns).
    `taken` is the trainer's side, for batches that are ready. `all but the copying` is the loader's overhead over its copies.
    `filled: the large columns copied` compared with memcpy is the cost of random rows compared with one long copy.

    Example: python -m bucketline.bench.loader.batch_parts --num-shards 32 --json
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

    def measure(self, folder: Path) -> list[Result]:
        from bucketline.bench.fixtures.synthetic_store import StoreShape, kept_store, latent_shape
        from bucketline.bench.memcpy import RingCopies
        from bucketline.loader import Loader, LoaderConfig
        from bucketline.store import Store

        shape = StoreShape(
            num_shards=self.num_shards, rows_per_shard=self.rows_per_shard, latent_shape=latent_shape(self.row_kib)
        )
        store = Store.open(kept_store(folder, shape))
        with Loader(store, LoaderConfig(batch_size=self.batch_size)) as loader:
            buffer_bytes = sum(tensor.nbytes for tensor in next(loader.forever()).tensors())
            copies = RingCopies(buffer_bytes, loader.stats().depth + 2, store.manifest.payload_bytes)
            parts = _Parts(self, store, loader, copies)
            subjects = [Subject(name=name, measure=parts.of(name), limit=None if name == MEMCPY else MEMCPY) for name in PARTS]
            return summarise("batch_parts", "us", subjects, alternate(subjects, self.repeats))


class _Parts:
    """Measures all parts with one run per round."""

    def __init__(self, config: BatchParts, store: Store, loader: Loader, copies: RingCopies) -> None:
        self._config, self._store, self._loader, self._copies = config, store, loader, copies
        self._found: dict[int, dict[str, float]] = {}

    def of(self, name: str) -> Callable[[int], float]:
        """Return a measure of a part, in microseconds per batch."""

        def measure(number: int) -> float:
            if number not in self._found:
                self._found[number] = self._measured()
            return self._found[number][name]

        return measure

    def _measured(self) -> dict[str, float]:
        planned, copied, filled = self._filled()
        parts = {
            MEMCPY: _seconds(self._copies.memcpy(self._config.batches, 1)),
            PLANNED: planned,
            COPIED: copied,
            OTHER: filled - copied,
            TAKEN: self._taken(),
        }
        parts[BESIDES] = parts[PLANNED] + parts[OTHER] + parts[TAKEN]
        return {name: seconds / self._config.batches * 1e6 for name, seconds in parts.items()}

    def _filled(self) -> tuple[float, float, float]:
        """Fill batches in this thread, hot; return the seconds of planning, of the large copies, and of all filling."""
        import torch

        from bucketline.loader.collate.batch_builder import BatchBuilder
        from bucketline.loader.collate.buffer_pool import BufferPool
        from bucketline.loader.collate.gather import Gather
        from bucketline.loader.plan.cursor import Cursor
        from bucketline.loader.prefetch.readahead import WARM_AFTER, WINDOW, Readahead

        class TimedGather(Gather):
            """A `Gather` that adds up the time of its copies."""

            copied_s = 0.0

            def take(self, *arguments: object) -> None:
                begun = time.perf_counter()
                super().take(*arguments)  # type: ignore[arg-type]
                self.copied_s += time.perf_counter() - begun

        class TimedBuilder(BatchBuilder):
            """A `BatchBuilder` that adds up the time of its copy plans."""

            copy_plans_s = 0.0

            def copy_plans(self, batches: Sequence[PendingBatch], *, plainly: bool) -> list[CopyPlan]:
                begun = time.perf_counter()
                copy_plans = super().copy_plans(batches, plainly=plainly)
                self.copy_plans_s += time.perf_counter() - begun
                return copy_plans

        gather = TimedGather(self._store)
        builder = TimedBuilder(self._store, self._loader.plan, self._loader.config, 0, 1, gather=gather)
        pool = BufferPool(builder.buffer_bytes, 8, pinned=False)
        copy_plans = iter(Readahead(builder, Cursor(step=0, micro_step=0, num_steps=None).micro_steps(1)))
        torch.set_num_threads(1)
        buffers = [pool.take() for _ in range(8)]
        for number, one in enumerate(islice(copy_plans, WARM_AFTER + 2 * WINDOW)):
            builder.fill(buffers[number % len(buffers)], one)
        gather.copied_s = builder.copy_plans_s = planned = filled = 0.0
        for number in range(self._config.batches):
            begun = time.perf_counter()
            one = next(copy_plans)
            located = time.perf_counter()
            builder.fill(buffers[number % len(buffers)], one)
            planned, filled = planned + located - begun, filled + time.perf_counter() - located
        return planned - builder.copy_plans_s, gather.copied_s, filled + builder.copy_plans_s

    def _taken(self) -> float:
        """Take batches that are ready; return the seconds that `batches` of them would take."""
        batches = self._loader.forever()
        seconds, taken = 0.0, 0
        next(batches)
        while taken < self._config.batches:
            while (ready := self._loader.stats().ready) < min(4, self._loader.stats().depth):
                time.sleep(1e-4)
            begun = time.perf_counter()
            for _ in range(ready):
                next(batches)
            seconds, taken = seconds + time.perf_counter() - begun, taken + ready
        return seconds / taken * self._config.batches


def _seconds(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def main() -> int:
    """Make the store, measure and print."""
    return run_case(BatchParts)


if __name__ == "__main__":
    sys.exit(main())
