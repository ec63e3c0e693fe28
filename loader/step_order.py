"""Which bucket an epoch's step is of, and which of the bucket's batches it reads: a bijection, computed per step."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bucketline.loader.permutation import mix_word, permute
from bucketline.loader.row_order import Shuffle

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Epoch:
    """One epoch's steps, and what they are made of."""

    number: int
    first: int  # step
    end: int  # step
    before: tuple[int, ...]  # by bucket: its batches in all epochs before
    ends: tuple[int, ...]  # by bucket: the batches of this epoch, of it and of the buckets before it
    key: int

    def batches_at(self, steps: Sequence[int], shuffle: Shuffle) -> list[tuple[int, int]]:
        """Give the bucket of each step, by its place in the plan's list, and the number of its batch of that bucket.

        `full`: a keyed bijection on the epoch's steps, so that any batch may come at any step.

        `blocks`: a bucket's batches come in their own order, and the buckets take turns as evenly as their numbers allow.

        `none`: all batches of the first bucket, in order, then those of the next, by name.
        """
        places = [step - self.first for step in steps]
        if shuffle is Shuffle.BLOCKS:
            return [self._in_turn(place) for place in places]
        if shuffle is Shuffle.FULL:
            places = permute(np.array(places, dtype=np.int64), self.end - self.first, self.key).tolist()
        return [self._batch(place) for place in places]

    def _batch(self, place: int) -> tuple[int, int]:
        bucket = bisect_right(self.ends, place)
        return bucket, self.before[bucket] + place - (self.ends[bucket - 1] if bucket else 0)

    def _in_turn(self, place: int) -> tuple[int, int]:
        """Walk down a tree of the buckets: of a node's `total` batches, those of its left half are spread evenly.

        With a shift s below `total`, floor((k x left + s) / total) of the first k are the left half's: none of none, all of
        all, and one more or the same with each step; so each half's batches are numbered without a gap.
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
