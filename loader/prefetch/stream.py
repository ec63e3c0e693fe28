"""What a loader's iteration stands on: batches delivered in order, by threads of this process or by a service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from bucketline.loader.collate.pending import FilledBuffer
    from bucketline.loader.config import LoaderConfig


MIN_DEPTH, MAX_DEPTH = 2, 64  # micro-batches


def depth_of(config: LoaderConfig, buffer_bytes: int) -> int:
    """Return how many micro-batches of `buffer_bytes` each are filled ahead."""
    return min(max(config.prefetch_bytes // buffer_bytes, MIN_DEPTH), MAX_DEPTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """Where an iteration begins, and where it ends."""

    step: int
    micro_step: int
    num_steps: int | None  # None: without end
    accumulation: int

    def micro_steps(self) -> Iterator[tuple[int, int]]:
        """Yield the micro-batches from here on: (step, micro step)."""
        step, micro_step = self.step, self.micro_step
        while self.num_steps is None or step < self.num_steps:
            yield step, micro_step
            micro_step += 1
            if micro_step == self.accumulation:
                step, micro_step = step + 1, 0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStats:
    """How much is ready for the caller, at this moment."""

    ready: int  # micro-batches filled and not taken yet
    depth: int  # micro-batches that are filled ahead at present
    buffers: int  # made so far, whether ready, in the caller's hands or free


class BatchStream(Protocol):
    """One iteration's batches."""

    def next(self) -> tuple[FilledBuffer, Tensor] | None:
        """Return what was filled and its bytes on the caller's device, waiting for it; None at the end.

        Raises:
            BucketlineError: what went wrong, in its place: everything before it has been delivered.
        """

    def queue_stats(self) -> QueueStats:
        """Say how much is ready."""

    def close(self) -> None:
        """End: threads, connections and what was not taken are gone when this returns. Batches that are held stay valid."""
