"""How well the orders mix: rows that are neighbours in the store, and the rows of a shard; and how epochs differ."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from bucketline.bench.harness import Case, Result, Subject, alternate, run_case, summarise
from bucketline.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import TypeAlias

    from numpy.typing import NDArray

    from bucketline.loader.config import Shuffle

    Order: TypeAlias = Callable[[int, int], NDArray[np.int64]]  # from a seed and an epoch to rows

FULL = "shuffle full"


@dataclass(frozen=True, kw_only=True)
class Mixing(Case):
    """Measure how well the orders mix, by arithmetic: no row is read.

    Figures have a new seed per round. Of one epoch: `same batch` and `within 2 batches`: the share of stored neighbours that
    come in one global batch, or at most two apart. `spread`: the standard deviation of the positions of a shard's rows, mean
    over the shards, as a share of that of rows anywhere in the epoch. `shards`: distinct shards in a batch. Over `--epochs`:
    `again first`: the share of the rows that come first in an epoch (half a window of each lane) that come first (a window of
    each) in the next one too, mean over the epochs.

    `shards and a buffer` is the usual rule of readers of tar shards: each of `--lanes` readers takes whole shards in a new
    order, and swaps every row with a random one of a buffer of `--buffer` rows.

    Example: python -m bucketline.bench.loader.mixing --store photos.store --lanes 2 --json
    """

    store: str | None = None
    """Measure the largest bucket of this store, instead of made-up shards."""
    shards: int = 256
    """Made-up shards."""
    rows_per_shard: int = 2048
    """Rows of each."""
    global_batch: int = 256
    """Rows of a global batch."""
    lanes: int = 8
    """Lanes of `lines`, and readers of `shards and a buffer`."""
    window: int = 4096
    """Rows of a window of `blocks`, and of each lane of `lines`."""
    buffer: int = 4096
    """Rows of a reader's buffer."""
    epochs: int = 5
    """Epochs of which each is compared with the next."""

    def measure(self, folder: Path) -> list[Result]:
        del folder
        from bucketline.loader.config import Shuffle

        held = self._held()
        if len(held) < self.lanes:
            raise UsageError(f"there are {len(held)} shards, expected at least one for each of {self.lanes} lanes")
        if self.epochs < 2:
            raise UsageError(f"--epochs is {self.epochs}, expected 2 or more")
        orders: dict[str, Order] = {
            FULL: partial(self._planned, held, Shuffle.FULL, 1),
            "shuffle blocks": partial(self._planned, held, Shuffle.BLOCKS, 1),
            "shuffle lines, 1 lane": partial(self._planned, held, Shuffle.LINES, 1),
            f"shuffle lines, {self.lanes} lanes": partial(self._planned, held, Shuffle.LINES, self.lanes),
            f"shards and a buffer, {self.lanes} readers": partial(self._buffered, held),
        }
        results = []
        of_one = {"same batch": "share", "within 2 batches": "share", "spread": "share", "shards": "in a batch"}
        units = {**of_one, "again first": "share"}
        for figure, unit in units.items():
            subjects = [
                Subject(
                    name=f"{figure}: {name}",
                    measure=partial(self._figure, figure, held, order) if figure in of_one else partial(self._again, order),
                    limit=None if name == FULL else f"{figure}: {FULL}",
                )
                for name, order in orders.items()
            ]
            results += summarise("mixing", unit, subjects, alternate(subjects, self.repeats, warm_up=False))
        return results

    def _held(self) -> NDArray[np.int64]:
        """Return the rows of each shard."""
        if self.store is None:
            return np.full(self.shards, self.rows_per_shard)
        from bucketline.store import Store

        largest = max(Store.open(self.store).buckets(), key=lambda bucket: bucket.num_rows)
        held: NDArray[np.int64] = largest.runs()[2]
        return held

    def _planned(self, held: NDArray[np.int64], shuffle: Shuffle, lanes: int, seed: int, epoch: int) -> NDArray[np.int64]:
        """Return the rows of an epoch's batches, in order."""
        from bucketline.loader.config import Remainder, Shuffle
        from bucketline.loader.plan.lanes import ShardRuns
        from bucketline.loader.plan.plan import Plan, PlanBucket

        runs = ShardRuns(shard=np.arange(len(held)), repeat=np.zeros(len(held), dtype=np.int64), num_rows=held)
        plan = Plan(
            seed=seed,
            remainder=Remainder.DROP,
            buckets=(PlanBucket(name="train/64x64", num_rows=int(held.sum()), global_batch=self.global_batch),),
            source="made up",
            shuffle=shuffle,
            shuffle_window=self.window,
            lanes=lanes if shuffle is Shuffle.LINES else 1,
            runs=(runs,),
        )
        steps = range(plan.steps_before(epoch), plan.steps_before(epoch + 1))
        return np.concatenate([step.rows for step in plan.draw([(step, 0) for step in steps])])

    def _buffered(self, held: NDArray[np.int64], seed: int, epoch: int) -> NDArray[np.int64]:
        """Return an epoch of readers that take shards by turns and mix through a buffer each."""
        random = np.random.default_rng((seed, epoch))
        ends = np.cumsum(held)
        shards = random.permutation(len(held))
        streams = []
        for reader in range(self.lanes):
            rows = np.concatenate([np.arange(ends[s] - held[s], ends[s]) for s in shards[reader :: self.lanes]])
            buffer, picks, mixed = rows[: self.buffer].copy(), random.random(len(rows)), np.empty_like(rows)
            for n, row in enumerate(rows[self.buffer :].tolist()):
                at = int(picks[n] * len(buffer))
                mixed[n], buffer[at] = buffer[at], row
            mixed[len(rows) - len(buffer) :] = random.permutation(buffer)
            streams.append(mixed)
        share = self.global_batch // self.lanes
        batches = min(map(len, streams)) // share
        return np.stack([stream[: batches * share].reshape(batches, share) for stream in streams], axis=1).reshape(-1)

    def _again(self, order: Order, number: int) -> float:
        first = self.window * self.lanes
        epochs = [order(number, epoch)[:first] for epoch in range(self.epochs)]
        return float(np.mean([np.isin(one[: first // 2], other).mean() for one, other in pairwise(epochs)]))

    def _figure(self, figure: str, held: NDArray[np.int64], order: Order, number: int) -> float:
        rows = order(number, 0)
        position = np.full(int(held.sum()), -1)
        position[rows] = np.arange(len(rows))
        shard = np.repeat(np.arange(len(held)), held)
        if figure == "shards":
            batches = shard[rows[: len(rows) // self.global_batch * self.global_batch]].reshape(-1, self.global_batch)
            return float(np.mean([len(np.unique(batch)) for batch in batches]))
        if figure == "spread":
            of_shard = np.split(position, np.cumsum(held)[:-1])
            deviations = [np.std(own[own >= 0]) for own in of_shard if (own >= 0).sum() > 1]
            return float(np.mean(deviations) / (len(rows) / np.sqrt(12)))
        both = (position[1:] >= 0) & (position[:-1] >= 0) & (shard[1:] == shard[:-1])
        apart = np.abs(np.diff(position // self.global_batch))[both]
        return float((apart <= (0 if figure == "same batch" else 2)).mean())


def main() -> int:
    """Measure and print."""
    return run_case(Mixing)


if __name__ == "__main__":
    sys.exit(main())
