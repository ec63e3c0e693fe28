"""The bucket and the rows of each step, as bijections that are computed per step."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bucketline.loader.config import WINDOW_BLOCKS, Shuffle
from bucketline.loader.plan.permutation import extend_key, mix_word, permute, permute_all

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_BLOCKS, _WINDOW = 1, 2  # purposes of the keys derived from a pass's key


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive positions within one pass of one bucket."""

    n: int
    key: int  # of the pass
    first: int  # position in the pass
    count: int
    bucket: int  # index in the plan's list
    number: int  # of the pass


def rows_of(spans: Sequence[Span], shuffle: Shuffle, window_rows: int) -> NDArray[np.int64]:
    """Return the rows at the spans' positions, one span after the other. Each position of a pass has a different row.

    `full`: a keyed bijection on all of the bucket's rows.

    `none`: position p reads row p.

    `blocks`: the rows are cut, in stored order, into blocks of `window_rows` // 16 neighbouring rows (the last block may be
    shorter), and the blocks are put in a keyed order. The positions are cut into windows as long as 16 blocks (the last may be
    shorter), and a keyed bijection orders the rows within each window. So reads fall on 16 runs of neighbouring rows at a
    time, or 17 if the short block shifts the others, and a block is read within one window or two consecutive ones.

    `lines` is computed by `lanes.Lanes`, which also needs the shards.
    """
    if shuffle is Shuffle.FULL:
        return permute_all([(_positions(span.first, span.count), span.n, span.key) for span in spans])
    if shuffle is Shuffle.NONE:
        return np.concatenate([_positions(span.first, span.count) for span in spans])
    return _by_blocks(spans, max(1, window_rows // WINDOW_BLOCKS))


def _positions(first: int, count: int) -> NDArray[np.int64]:
    return np.arange(first, first + count, dtype=np.int64)


def _by_blocks(spans: Sequence[Span], block: int) -> NDArray[np.int64]:
    places = _mixed_within_windows(spans, block * WINDOW_BLOCKS)
    parts, offsets, short_rows, at = [], [], [], 0  # by span
    for span in spans:
        own = places[at : at + span.count]
        at += span.count
        num_blocks, rest = divmod(span.n, block)
        key = extend_key(span.key, _BLOCKS)
        short_at = mix_word(key) % (num_blocks + 1) * block  # position of the short block, if there is one
        is_short = (own >= short_at) & (own < short_at + rest)
        number, offset = np.divmod(own - rest * (own >= short_at + rest), block)
        parts.append((np.where(is_short, 0, number), max(1, num_blocks), key))
        offsets.append(offset)
        short_rows.append(np.where(is_short, num_blocks * block + own - short_at, -1))
    rows = permute_all(parts) * block + np.concatenate(offsets)
    short = np.concatenate(short_rows)
    return np.where(short >= 0, short, rows)


def _mixed_within_windows(spans: Sequence[Span], window: int) -> NDArray[np.int64]:
    """Permute positions within their windows. The last window of a pass may be shorter."""
    parts, begins = [], []  # by window that a span touches
    for span in spans:
        at, end, keys = span.first, span.first + span.count, extend_key(span.key, _WINDOW)
        while at < end:
            number = at // window
            begin = number * window
            until = min(end, begin + window)
            parts.append((_positions(at - begin, until - at), min(window, span.n - begin), extend_key(keys, number)))
            begins.append(begin)
            at = until
    return permute_all(parts) + np.repeat(np.array(begins, dtype=np.int64), [len(index) for index, _, _ in parts])


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

    def batches_at(self, steps: Sequence[int], shuffle: Shuffle) -> list[tuple[int, int]]:
        """Return (bucket, batch) for each step: the bucket's index in the plan's list, and the number of its batch.

        `full`: a keyed bijection on the epoch's steps, so that any batch may come at any step.

        `blocks` and `lines`: each bucket's batches come in order, and the buckets take turns as evenly as their counts allow.

        `none`: all batches of the first bucket in order, then those of the next, sorted by name.

        The padded batches follow all others.
        """
        places, others = [step - self.first for step in steps], self.ends[-1]
        ordered = iter(self._ordered([place for place in places if place < others], shuffle))
        return [next(ordered) if place < others else self._padded_batch(self.padded[place - others]) for place in places]

    def _padded_batch(self, bucket: int) -> tuple[int, int]:
        """Return (bucket, batch) of a bucket's padded batch: the one after its last."""
        return bucket, self.before[bucket] + self.ends[bucket] - (self.ends[bucket - 1] if bucket else 0)

    def _ordered(self, places: list[int], shuffle: Shuffle) -> list[tuple[int, int]]:
        if not places:
            return []
        if shuffle in (Shuffle.BLOCKS, Shuffle.LINES):
            return [self._in_turn(place) for place in places]
        if shuffle is Shuffle.FULL:
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
