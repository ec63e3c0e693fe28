"""What a loader has delivered in its present iteration, and how long the caller waited for it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bucketline.loader.delivery import Supply
    from bucketline.loader.filler import Filled


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketStats:
    """What was delivered of one bucket."""

    batches: int
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderStats:
    """What `Loader.stats` gives: counts since the present iteration began (or the last one, where none is under way)."""

    batches: int  # micro-batches taken by the caller
    samples: int
    bytes: int  # of their tensors
    seconds: float  # from the first `next()` to the end of the last
    waited_s: float  # of these, inside `next()`
    ready: int  # micro-batches filled and not taken yet
    depth: int  # micro-batches that are filled ahead at most
    slabs: int  # made so far: ready, in the caller's hands or free
    by_bucket: dict[str, BucketStats]

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def bytes_per_s(self) -> float:
        return self.bytes / self.seconds if self.seconds else 0.0

    @property
    def waited(self) -> float:
        """The share of the time that the caller waited."""
        return self.waited_s / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class Meter:
    """Counts one iteration."""

    begun: float | None = None
    ended: float = 0.0
    waited_s: float = 0.0
    num_bytes: int = 0
    by_bucket: dict[str, list[int]] = field(default_factory=dict)  # batches, samples

    def note(self, asked: float, filled: Filled) -> None:
        """Count a micro-batch that was asked for at a time and is delivered now."""
        self.ended = time.perf_counter()
        if self.begun is None:
            self.begun = asked
        self.waited_s += self.ended - asked
        self.num_bytes += filled.num_bytes
        counts = self.by_bucket.get(filled.bucket)
        if counts is None:
            counts = self.by_bucket[filled.bucket] = [0, 0]
        counts[0] += 1
        counts[1] += filled.fields[0].shape[0]

    def stats(self, supply: Supply) -> LoaderStats:
        """Give the counts as they are now."""
        by_bucket = {name: BucketStats(batches=own[0], samples=own[1]) for name, own in sorted(self.by_bucket.items())}
        return LoaderStats(
            batches=sum(own.batches for own in by_bucket.values()),
            samples=sum(own.samples for own in by_bucket.values()),
            bytes=self.num_bytes,
            seconds=0.0 if self.begun is None else self.ended - self.begun,
            waited_s=self.waited_s,
            ready=supply.ready,
            depth=supply.depth,
            slabs=supply.slabs,
            by_bucket=by_bucket,
        )
