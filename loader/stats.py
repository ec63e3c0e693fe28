"""Statistics of an iteration: what was delivered, and how long was waited."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bucketline.loader.collate.buffer_pool import FilledBuffer
    from bucketline.store.remote.cache.fetch_threads import FetchStats


@dataclass(slots=True, kw_only=True)
class Stats:
    """Counts of a loader's present or last iteration; see `Loader.stats`."""

    seconds: float = 0.0  # from the first `next()` to the end of the last
    batches: int = 0  # micro-batches consumed by the caller
    samples: int = 0
    bytes: int = 0  # of their tensors
    waits: int = 0  # for a micro-batch that was not ready, since reading ahead began
    waited_s: float = 0.0  # of the seconds, inside `next()`
    is_waiting: bool = False  # at this moment
    ready: int = 0  # micro-batches filled and not yet consumed
    depth: int = 0  # micro-batches that are filled ahead at present; grows if the caller had to wait
    buffers: int = 0  # allocated so far: ready, held by the caller or free
    by_bucket: dict[str, int] = field(default_factory=dict)  # samples
    fetched: tuple[FetchStats, ...] = ()  # of each store in object storage that this process reads, since it was opened
    begun: float | None = field(default=None, repr=False, compare=False)  # by `time.perf_counter`

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

    def count(self, filled: FilledBuffer, asked: float) -> None:
        """Count a micro-batch that is delivered now; the time since it was `asked` for is waiting."""
        samples = filled.fields[0].shape[0]
        self.batches += 1
        self.samples += samples
        self.bytes += filled.num_bytes
        self.by_bucket[filled.bucket] = self.by_bucket.get(filled.bucket, 0) + samples
        now = time.perf_counter()
        if self.begun is None:
            self.begun = asked
        self.seconds = now - self.begun
        self.waited_s += now - asked

    def copy(self, fetched: tuple[FetchStats, ...] = ()) -> Stats:
        """Return a copy that counts no more."""
        return replace(self, by_bucket=dict(sorted(self.by_bucket.copy().items())), fetched=fetched)
