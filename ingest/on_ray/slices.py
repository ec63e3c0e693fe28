"""The slices of a source: how many there are, which are still to be packed, and how often each was tried."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.errors import RankError

if TYPE_CHECKING:
    from collections.abc import Sequence

SLICES_PER_WORKER = (8, 32)  # at least, so that workers end together; at most, as each slice makes shards of its own
IMAGES_PER_SLICE = (512, 8192)  # enough to fill batches of every bucket; few enough that a lost worker costs little
MAX_ATTEMPTS = 5


def num_slices(num_items: int, num_workers: int) -> int:
    """Return how many slices a source is cut into.

    >>> [num_slices(number, 2) for number in (0, 5, 400, 10_000, 100_000, 10_000_000)]
    [1, 5, 16, 20, 64, 1221]
    """
    least, most = (number * num_workers for number in SLICES_PER_WORKER)
    small, large = (-(-num_items // images) for images in IMAGES_PER_SLICE)
    return max(1, min(num_items, max(least, min(small, most), large)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A slice that a worker packs."""

    number: int  # of the slice
    attempt: int  # how often it was begun before

    @property
    def name(self) -> str:
        """A part of its shards' names."""
        return f"s{self.number:05d}-a{self.attempt}"


class SliceTable:
    """The slices that are still to be packed, the largest first."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """Take the number of images of each slice; those without any are finished."""
        self.sizes = sizes
        order = sorted((number for number, size in enumerate(sizes) if size), key=lambda number: sizes[number])
        self._waiting = [Attempt(number=number, attempt=0) for number in order]
        self._num_left = len(order)

    @property
    def num_left(self) -> int:
        """Number of slices that are not finished."""
        return self._num_left

    def pop(self) -> Attempt | None:
        """Return the next slice to pack; None if all are finished or being packed."""
        return self._waiting.pop() if self._waiting else None

    def finish(self) -> None:
        """Count an attempt as finished: its slice will not be tried again."""
        self._num_left -= 1

    def retry(self, lost: Attempt, why: str) -> None:
        """Have a slice packed again whose worker was lost."""
        if lost.attempt + 1 == MAX_ATTEMPTS:
            raise RankError(
                f"slice {lost.number} of {len(self.sizes)} lost its worker {MAX_ATTEMPTS} times, at last: {why}; "
                "if memory was short, use a smaller --batch-size or fewer workers on a machine; rerun the command to continue"
            )
        self._waiting.append(Attempt(number=lost.number, attempt=lost.attempt + 1))
