"""The bucket and the rows of each step, as bijections that are computed per step."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bucketline.loader.plan.permutation import mix_word, permute, permute_all

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive positions within one pass of one bucket."""

    n: int
    key: int  # of the pass
    first: int  # position in the pass
    count: int
    bucket: int  # index in the plan's list
    number: int  # of the pass


def rows_of(spans: Sequence[Span], window: int | None) -> NDArray[np.int64]:
    """Return the rows at the spans' positions, one span after the other. Each position of a pass has a different row.

    Without a window, by a keyed bijection on all of the bucket's rows; with window 0, position p has row p. A window of some
    rows is computed by `lanes.Lanes`, which also needs the shards.
    """
    every = [(np.arange(span.first, span.first + span.count, dtype=np.int64), span.n, span.key) for span in spans]
    return permute_all(every) if window is None else np.concatenate([positions for positions, _, _ in every])


@dataclass(frozen=True, slots=True)
class Epoch:
    """One epoch's steps and the number of batches in each bucket."""

    number: int
    first: int  # step
    end: int  # step
    before: tuple[int, ...]  # by bucket: its batches in all earlier epochs
    ends: tuple[int, ...]  # by bucket: cumulative batches of this epoch, up to and including the bucket
    padded: tuple[int, ...]  # buckets with one more, padded batch at the end, in the order of these steps
    key: int

    def batches_at(self, steps: Sequence[int], window: int | None) -> list[tuple[int, int]]:
        """Return (bucket, batch) for each step: the bucket's index in the plan's list, and the number of its batch.

        Without a window, by a keyed bijection on the epoch's steps, so that any batch may come at any step.

        With one, each bucket's batches come in order, and the buckets take turns as evenly as their counts allow.

        With window 0, all batches of the first bucket in order, then those of the next, sorted by name.

        The padded batches follow all others.
        """
        places, others = [step - self.first for step in steps], self.ends[-1]
        ordered = iter(self._ordered([place for place in places if place < others], window))
        return [next(ordered) if place < others else self._padded_batch(self.padded[place - others]) for place in places]

    def _padded_batch(self, bucket: int) -> tuple[int, int]:
        """Return (bucket, batch) of a bucket's padded batch: the one after its last."""
        return bucket, self.before[bucket] + self.ends[bucket] - (self.ends[bucket - 1] if bucket else 0)

    def _ordered(self, places: list[int], window: int | None) -> list[tuple[int, int]]:
        if not places:
            return []
        if window:
            return [self._in_turn(place) for place in places]
        if window is None:
            places = permute(np.array(places, dtype=np.int64), self.ends[-1], self.key).tolist()
        return [self._batch(place) for place in places]

    def _batch(self, place: int) -> tuple[int, int]:
        bucket = bisect_right(self.ends, place)
        return bucket, self.before[bucket] + place - (self.ends[bucket - 1] if bucket else 0)

    def _in_turn(self, place: int) -> tuple[int, int]:
        """Walk down a binary tree of the buckets. The left half's batches are spread evenly over a node's `total` batches.

        With a shift s below `total`, floor((k x left + s) / total) of the first k batches belong to the left half. This count
        starts at 0, ends at `left`, and grows by 0 or 1 per step, so each half's batches are numbered without gaps.
        """
        low, high, number = 0, len(self.ends), place
        begin, end = 0, self.ends[-1]  # of the node's batches
        while high - low > 1:
            middle = (low + high) // 2
            split, total = self.ends[middle - 1], end - begin
            shift = mix_word(self.key ^ mix_word(low << 32 | high)) % total
            of_left = (number * (split - begin) + shift) // total
            if ((number + 1) * (split - begin) + shift) // total > of_left:
                high, end, number = middle, split, of_left
            else:
                low, begin, number = middle, split, number - of_left
        return low, self.before[low] + number
