"""The steps of each epoch, the bucket of each step, and a cursor over their micro-batches.

All is computed per step, from only the sizes of the buckets.

So a machine that has no store and no plan knows the steps, too.

Letters: n rows of a bucket, G its global batch, E the number of epochs if it is finite.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from operator import sub
from typing import TYPE_CHECKING

import numpy as np

from bucketline.command_line import counted
from bucketline.errors import PlanError
from bucketline.forks import cached_property
from bucketline.loader.config import Remainder
from bucketline.loader.plan.permutation import mix_word, permute

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


_KEPT_EPOCHS = 8  # a window of steps touches two, or more if epochs have very few steps


@dataclass(frozen=True, slots=True)
class Epoch:
    """One epoch's steps and the number of batches in each bucket. With `carry`, an epoch of a few rows may have none."""

    number: int
    first: int  # step
    end: int  # the first step of the next epoch
    before: tuple[int, ...]  # by bucket: its batches in all earlier epochs
    ends: tuple[int, ...]  # by bucket: cumulative batches of this epoch, up to and including the bucket
    padded: tuple[int, ...]  # buckets with one more, padded batch at the end, in the order of these steps

    def batches_at(self, steps: Sequence[int], window: int | None, key: int) -> list[tuple[int, int]]:
        """Return (bucket, batch) for each step: the bucket's index in the plan's list, and the number of its batch.

        `key` is the epoch's.

        Without a window, by a keyed bijection on the epoch's steps, so that any batch may come at any step.

        With one, each bucket's batches come in order, and the buckets take turns as evenly as their counts allow.

        With window 0, all batches of the first bucket in order, then those of the next, sorted by name.

        The padded batches follow all others.
        """
        places, others = [step - self.first for step in steps], self.ends[-1]
        ordered = iter(self._ordered([place for place in places if place < others], window, key))
        return [next(ordered) if place < others else self._padded_batch(self.padded[place - others]) for place in places]

    def _padded_batch(self, bucket: int) -> tuple[int, int]:
        """Return (bucket, batch) of a bucket's padded batch: the one after its last."""
        return bucket, self.before[bucket] + self.ends[bucket] - (self.ends[bucket - 1] if bucket else 0)

    def _ordered(self, places: list[int], window: int | None, key: int) -> list[tuple[int, int]]:
        if not places:
            return []
        if window:
            return [self._in_turn(place, key) for place in places]
        if window is None:
            places = permute(np.array(places, dtype=np.int64), self.ends[-1], key).tolist()
        return [self._batch(place) for place in places]

    def _batch(self, place: int) -> tuple[int, int]:
        bucket = bisect_right(self.ends, place)
        return bucket, self.before[bucket] + place - (self.ends[bucket - 1] if bucket else 0)

    def _in_turn(self, place: int, key: int) -> tuple[int, int]:
        """Walk down a binary tree of the buckets. The left half's batches are spread evenly over a node's `total` batches.

        With a shift s below `total`, floor((k x left + s) / total) of the first k batches belong to the left half. This count
        starts at 0, ends at `left`, and grows by 0 or 1 per step, so each half's batches are numbered without gaps.
        """
        low, high, number = 0, len(self.ends), place
        begin, end = 0, self.ends[-1]  # of the node's batches
        while high - low > 1:
            middle = (low + high) // 2
            split, total = self.ends[middle - 1], end - begin
            shift = mix_word(key ^ mix_word(low << 32 | high)) % total
            of_left = (number * (split - begin) + shift) // total
            if ((number + 1) * (split - begin) + shift) // total > of_left:
                high, end, number = middle, split, of_left
            else:
                low, begin, number = middle, split, number - of_left
        return low, self.before[low] + number


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

    def span(self, number: int) -> Epoch:
        """Return the steps of an epoch, counted from 0. After the last, one without steps."""
        before, after = self.batches_before(number), self.batches_before(number + 1)
        first, end, padded = sum(before), sum(after), self.padded if number + 1 == self.epochs else ()
        if self.epochs is not None and self.num_steps is not None and number >= self.epochs:
            first = end = self.num_steps
        return Epoch(number, first, end + len(padded), tuple(before), tuple(accumulate(map(sub, after, before))), padded)

    def at(self, step: int) -> Epoch:
        """Return the epoch that has a step: a cached one, the one after a cached one, or the result of a binary search."""
        known = list(self._known.values())
        for epoch in known:
            if epoch.first <= step < epoch.end:
                return epoch
        following = (self.span(epoch.number + 1) for epoch in known if epoch.end == step)
        found = next((epoch for epoch in following if step < epoch.end), None) or self.span(self.number_at(step))
        if len(self._known) >= _KEPT_EPOCHS:
            self._known.clear()
        self._known[found.number] = found
        return found

    @cached_property
    def _known(self) -> dict[int, Epoch]:
        return {}

    def number_at(self, step: int) -> int:
        """Return the number of the epoch that has a step, by binary search."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """A position among the plan's micro-batches."""

    step: int  # optimizer step of the next micro-batch, from 0
    micro_step: int  # its index within the step, 0 to accumulation - 1
    num_steps: int | None  # the iteration ends before this step; None: endless

    def micro_steps(self, accumulation: int) -> Iterator[tuple[int, int]]:
        """Yield the micro-batches from here to the end: (step, micro step).

        >>> list(Cursor(step=3, micro_step=1, num_steps=5).micro_steps(2))
        [(3, 1), (4, 0), (4, 1)]
        """
        step, micro_step = self.step, self.micro_step
        while self.num_steps is None or step < self.num_steps:
            yield step, micro_step
            micro_step += 1
            if micro_step == accumulation:
                step, micro_step = step + 1, 0

    def after(self, step: int, micro_step: int, accumulation: int) -> Cursor:
        """Return a cursor at the micro-batch that follows this one, with the same end.

        >>> Cursor(step=0, micro_step=0, num_steps=None).after(3, 1, 2)
        Cursor(step=4, micro_step=0, num_steps=None)
        """
        is_last = micro_step + 1 == accumulation
        return Cursor(step=step + is_last, micro_step=0 if is_last else micro_step + 1, num_steps=self.num_steps)
