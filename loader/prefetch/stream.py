"""Batch streams: the batches of one iteration in order, filled by threads of this process or by a service."""

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
    """The first and the last step of an iteration."""

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
    """Current fill level of a batch stream."""

    ready: int  # micro-batches filled and not yet taken
    depth: int  # micro-batches currently filled ahead
    buffers: int  # allocated so far: ready, held by the caller, or free


class BatchStream(Protocol):
    """One iteration's batches."""

    def next(self) -> tuple[FilledBuffer, Tensor] | None:
        """Wait for the next filled buffer; return it with its bytes on the caller's device, or None at the end.

        Raises:
            BucketlineError: if filling failed, in its turn: everything before it has been delivered.
        """

    def queue_stats(self) -> QueueStats:
        """Return the current fill level."""

    def close(self) -> None:
        """End the threads or the connection and drop what was not taken, before this returns. Batches still held stay valid."""
