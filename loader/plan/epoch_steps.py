"""The steps of each epoch, computed from only the sizes of the buckets: also on a machine that has no store and no plan.

Letters: n rows of a bucket, G its global batch, E the number of epochs if it is finite.
"""

from __future__ import annotations

from dataclasses import dataclass

from bucketline.command_line import counted
from bucketline.errors import PlanError
from bucketline.forks import cached_property
from bucketline.loader.config import Remainder


@dataclass(frozen=True, slots=True)
class EpochSpan:
    """The steps of one epoch. With `carry`, an epoch of a few rows may have none."""

    number: int
    first: int
    end: int  # the first step of the next epoch


@dataclass(frozen=True, kw_only=True)
class EpochSteps:
    """Number of batches in each epoch.

    With `carry` and E epochs, E n mod G rows of a bucket fill no batch. The last epoch ends with one padded batch for each such
    bucket, after all other steps. So a step before these means the same, whatever E.
    """

    sizes: tuple[tuple[int, int], ...]  # by bucket: rows and global batch
    remainder: Remainder
    epochs: int | None = None  # E; None: endless

    def batches_before(self, epoch: int) -> list[int]:
        """Return the number of each bucket's batches in the epochs before `epoch`, without the padded ones of `carry`."""
        if self.remainder is Remainder.CARRY:
            return [epoch * n // size for n, size in self.sizes]
        return [epoch * per_pass for per_pass in self.per_pass]

    @cached_property
    def per_pass(self) -> list[int]:
        """Return the number of each bucket's batches in a pass; with `carry` a batch may be of two passes."""
        drops = self.remainder is Remainder.DROP
        return [n // size if drops else -(-n // size) for n, size in self.sizes]

    @cached_property
    def padded(self) -> tuple[int, ...]:
        """Return the indices of the buckets that the last epoch completes with a padded batch, in the order of these steps."""
        if self.epochs is None or self.remainder is not Remainder.CARRY:
            return ()
        return tuple(number for number, (n, size) in enumerate(self.sizes) if self.epochs * n % size)

    @cached_property
    def num_steps(self) -> int | None:
        """Return the number of steps in all epochs; None if they are endless."""
        return None if self.epochs is None else self.steps_before(self.epochs) + len(self.padded)

    @cached_property
    def has_steps(self) -> bool:
        """Return True if epochs have steps. With `drop`, they have none if every bucket is smaller than its global batch."""
        return self.remainder is not Remainder.DROP or any(self.per_pass)

    def steps_before(self, epoch: int) -> int:
        """Return the number of steps in the epochs before `epoch`, without the padded ones of `carry`."""
        return sum(self.batches_before(epoch))

    def without_batch(self) -> str:
        """Return a message that says why an epoch has no batch, and what to do."""
        rows, size = max(self.sizes, key=lambda one: one[0] / one[1])
        return (
            f"this epoch has no batch: by remainder='carry' its rows wait until they fill a global batch, which takes {size}, "
            f"and the bucket that is nearest to that has {counted(rows, 'row')}; use a smaller batch, fewer ranks, or "
            "remainder='partial', or count steps over forever()"
        )

    def span(self, number: int) -> EpochSpan:
        """Return the steps of an epoch, counted from 0. After the last, one without steps."""
        if self.num_steps is not None and self.epochs is not None and number >= self.epochs - 1:
            first = self.steps_before(number) if number < self.epochs else self.num_steps
            return EpochSpan(number, first, self.num_steps)
        return EpochSpan(number, self.steps_before(number), self.steps_before(number + 1))

    def number_at(self, step: int) -> int:
        """Return the number of the epoch that has a step, by binary search.

        Raises:
            PlanError: if none has it.
        """
        if not self.has_steps or (self.num_steps is not None and step >= self.num_steps):
            raise PlanError(f"there is no step {step}: the plan has {self.num_steps or 0} steps (epochs={self.epochs})")
        past = 1
        while self.steps_before(past) <= step and past != self.epochs:
            past = min(2 * past, self.epochs or 2 * past)
        first = 0  # steps_before(first) <= step, and `step` is before the end of the epochs before `past`
        while past - first > 1:
            middle = (first + past) // 2
            first, past = (middle, past) if self.steps_before(middle) <= step else (first, middle)
        return first
