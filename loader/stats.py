"""Statistics of a loader's current iteration: what was delivered, and how long the caller waited."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bucketline.loader.collate.buffer_pool import FilledBuffer
    from bucketline.loader.prefetch.threads import QueueStats
    from bucketline.store.remote.cache.held_line import FetchStats


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketStats:
    """Counts of one bucket's delivered batches."""

    batches: int
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderStats:
    """Counts since the current iteration began, or of the last iteration if none is running. See `Loader.stats`."""

    batches: int  # micro-batches consumed by the caller
    samples: int
    bytes: int  # of their tensors
    seconds: float  # from the first `next()` to the end of the last
    waited_s: float  # of these, inside `next()`
    ready: int  # micro-batches filled and not yet consumed
    depth: int  # micro-batches that are filled ahead at present; grows if the caller had to wait
    buffers: int  # allocated so far: ready, held by the caller or free
    by_bucket: dict[str, BucketStats]
    fetched: tuple[FetchStats, ...] = ()  # of each store in object storage that this process reads, since it was opened

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def bytes_per_s(self) -> float:
        return self.bytes / self.seconds if self.seconds else 0.0

    @property
    def waited(self) -> float:
        """The fraction of the time that the caller waited."""
        return self.waited_s / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class Meter:
    """Counts one iteration."""

    begun: float | None = None
    ended: float = 0.0
    waited_s: float = 0.0
    num_bytes: int = 0
    by_bucket: dict[str, list[int]] = field(default_factory=dict)  # batches, samples

    def note(self, asked: float, filled: FilledBuffer) -> None:
        """Count a micro-batch that was requested at time `asked` and is delivered now."""
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

    def stats(self, queue_stats: QueueStats, fetched: tuple[FetchStats, ...] = ()) -> LoaderStats:
        """Return the current counts."""
        by_bucket = {name: BucketStats(batches=own[0], samples=own[1]) for name, own in sorted(self.by_bucket.items())}
        return LoaderStats(
            batches=sum(own.batches for own in by_bucket.values()),
            samples=sum(own.samples for own in by_bucket.values()),
            bytes=self.num_bytes,
            seconds=0.0 if self.begun is None else self.ended - self.begun,
            waited_s=self.waited_s,
            ready=queue_stats.ready,
            depth=queue_stats.depth,
            buffers=queue_stats.buffers,
            by_bucket=by_bucket,
            fetched=fetched,
        )
