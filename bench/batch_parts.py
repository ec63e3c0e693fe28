"""What is left between us and memcpy: where the microseconds of a batch go, part by part, beside memcpy of its bytes."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from bucketline.bench.harness import Case, Result, Subject, alternate, run_case, summarise

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bucketline.bench.copying import RingCopies
    from bucketline.loader.loader import Loader
    from bucketline.store import Store

MEMCPY, COPIED, OTHER = "memcpy of its bytes", "filled: the large columns copied", "filled: all else worked out and copied"
PLANNED, TAKEN, BESIDES = "planned and located", "taken: next() of a batch that is ready", "all but the copying"
PARTS = (MEMCPY, PLANNED, COPIED, OTHER, TAKEN, BESIDES)


@dataclass(frozen=True, kw_only=True)
class BatchParts(Case):
    """Measure the parts of delivering one batch, hot, in microseconds of one thread.

    The filling thread's parts are timed by doing its work here: the micro-batches that come, located ahead of time; the large
    columns copied (latents and tokens); what is left of the filling, which is drawing captions, finding where they lie and the
    small columns. `taken` is the trainer's side, of batches that are ready. `all but the copying` is what is left between a
    delivery and its copies, and `filled: the large columns copied` beside memcpy is what random rows cost beside one long copy.

    Example: python -m bucketline.bench.batch_parts --num-shards 32 --json
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

    def measure(self, folder: Path) -> list[Result]:
        from bucketline.bench.copying import RingCopies
        from bucketline.bench.synthetic_store import StoreShape, kept_store, latent_shape
        from bucketline.loader import Loader, LoaderConfig
        from bucketline.store import Store

        shape = StoreShape(
            num_shards=self.num_shards, rows_per_shard=self.rows_per_shard, latent_shape=latent_shape(self.row_kib)
        )
        store = Store.open(kept_store(folder, shape))
        with Loader(store, LoaderConfig(batch_size=self.batch_size)) as loader:
            slab_bytes = sum(tensor.nbytes for tensor in next(iter(loader)).tensors())
            copies = RingCopies(slab_bytes, loader.stats().depth + 2, store.manifest.payload_bytes)
            parts = _Parts(self, store, loader, copies)
            subjects = [Subject(name=name, measure=parts.of(name), limit=None if name == MEMCPY else MEMCPY) for name in PARTS]
            return summarise("batch_parts", "us", subjects, alternate(subjects, self.repeats))


class _Parts:
    """One run a round tells all parts."""

    def __init__(self, config: BatchParts, store: Store, loader: Loader, copies: RingCopies) -> None:
        self._config, self._store, self._loader, self._copies = config, store, loader, copies
        self._found: dict[int, dict[str, float]] = {}

    def of(self, name: str) -> Callable[[int], float]:
        """Make a measure of a part, in microseconds per batch."""

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
        """Fill batches in this thread, hot; give the seconds of planning, of the large copies, and of all filling."""
        import torch

        from bucketline.loader.delivery import Beginning
        from bucketline.loader.filler import Filler
        from bucketline.loader.gather import Gather
        from bucketline.loader.lookahead import WARM_AFTER, WINDOW, Lookahead
        from bucketline.loader.ring import Ring

        class Timed(Gather):
            """Adds up what its copies take."""

            copied_s = 0.0

            def take(self, *arguments: object) -> None:
                begun = time.perf_counter()
                super().take(*arguments)  # type: ignore[arg-type]
                self.copied_s += time.perf_counter() - begun

        gather = Timed(self._store)
        filler = Filler(self._store, self._loader.plan, self._loader.config, 0, 1, gather=gather)
        ring = Ring(filler.slab_bytes, 8, pinned=False)
        steps = Beginning(step=0, micro_step=0, num_steps=None, accumulation=1).micro_steps()
        coming = iter(Lookahead(filler, steps))
        torch.set_num_threads(1)
        slabs = [ring.take() for _ in range(8)]
        for number, one in enumerate(islice(coming, WARM_AFTER + 2 * WINDOW)):
            filler.fill(slabs[number % len(slabs)], one)
        gather.copied_s = planned = filled = 0.0
        for number in range(self._config.batches):
            begun = time.perf_counter()
            one = next(coming)
            located = time.perf_counter()
            filler.fill(slabs[number % len(slabs)], one)
            planned, filled = planned + located - begun, filled + time.perf_counter() - located
        return planned, gather.copied_s, filled

    def _taken(self) -> float:
        """Take batches that are ready; give the seconds that so many would take."""
        batches = iter(self._loader)
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
    """Make the store, measure, print."""
    return run_case(BatchParts)


if __name__ == "__main__":
    sys.exit(main())
