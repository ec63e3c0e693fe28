"""In which order a pass reads a bucket's rows: a bijection from the positions of the pass to the rows, computed per position.

Letters: n rows of a bucket.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from bucketline.loader.permutation import extend_key, mix_word, permute_all

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

WINDOW_BLOCKS = 16  # blocks of neighbouring rows whose rows are mixed
_BLOCKS, _WINDOW = 1, 2  # what a key is for, of a pass's own


class Shuffle(StrEnum):
    """How the rows of a pass, and the steps of an epoch, are ordered."""

    FULL = "full"  # any row may come at any position, any bucket at any step
    BLOCKS = "blocks"  # reads stay within a window of rows at a time; buckets take turns in proportion
    NONE = "none"  # as stored, bucket after bucket


@dataclass(frozen=True, slots=True)
class Span:
    """Positions that follow one another within one pass of one bucket."""

    n: int
    key: int  # of the pass
    first: int  # position in the pass
    count: int


def rows_of(spans: Sequence[Span], shuffle: Shuffle, window_rows: int) -> NDArray[np.int64]:
    """Give the rows at the spans' positions, one span after the other; each position of a pass has a row of its own.

    `full`: a keyed bijection on all of the bucket's rows.

    `none`: position p reads row p.

    `blocks`: the rows are cut, as they are stored, into blocks of `window_rows` // 16 neighbouring rows (the last block may be
    shorter), and the blocks are laid one after the other in a keyed order. The positions are cut into windows of 16 blocks'
    length (the last may be shorter), and within a window a keyed bijection orders the rows that lie there. So at a time reads
    fall on 16 stretches of neighbouring rows, or 17 where the short block shifts the others, and a block is read within
    one window, or two that follow one another.
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
        short_at = mix_word(key) % (num_blocks + 1) * block  # where the short block lies, if there is one
        is_short = (own >= short_at) & (own < short_at + rest)
        number, offset = np.divmod(own - rest * (own >= short_at + rest), block)
        parts.append((np.where(is_short, 0, number), max(1, num_blocks), key))
        offsets.append(offset)
        short_rows.append(np.where(is_short, num_blocks * block + own - short_at, -1))
    rows = permute_all(parts) * block + np.concatenate(offsets)
    short = np.concatenate(short_rows)
    return np.where(short >= 0, short, rows)


def _mixed_within_windows(spans: Sequence[Span], window: int) -> NDArray[np.int64]:
    """Move each position to another of its window; the last window of a pass may be shorter."""
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
