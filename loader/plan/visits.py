"""The plan inverted: the steps and positions at which rows come, a few operations for each row and pass.

Letters: n rows of a bucket, G its global batch, R requested rows, V visits.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np

from bucketline.loader.config import Remainder, Shuffle
from bucketline.loader.plan.order import positions_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from bucketline.loader.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Visits:
    """The places of rows in an order of steps; `[V]` each. Padding, with weight 0, is not counted."""

    index: NDArray[np.int64]  # of the row among those requested
    step: NDArray[np.int64]
    epoch: NDArray[np.int64]
    position: NDArray[np.int64]  # in the step's global batch


def visits(plan: Plan, bucket: int, rows: NDArray[np.int64], first: int, end: int) -> Iterator[Visits]:
    """Yield the visits of rows, `[R]`, of the bucket with this index, in the steps from `first` to before `end`, by pass."""
    if end <= first:
        return
    own = plan.buckets[bucket]
    n, size, carries = own.num_rows, own.global_batch, plan.remainder is Remainder.CARRY
    begin = plan.batches_before(own, plan.epoch_at(first).number)
    last = plan.epoch_at(end - 1)
    past = plan.batches_before(own, last.number + 1) + (bucket in last.padded)
    if begin == past:
        return
    per_pass = plan.per_pass(own)
    passes = range(begin * size // n, -(-past * size // n)) if carries else range(begin // per_pass, past // per_pass)
    if plan.epochs is not None:  # what a padded batch has of later passes is not counted
        passes = range(passes.start, min(passes.stop, plan.epochs))
    for number in passes:
        span = plan.span(bucket, number, 0, n)
        which_row, at = np.arange(len(rows)), rows
        if (shares := plan.pass_rows(bucket)) is not None:
            which_row, at = shares.numbers(rows, number)
        if plan.shuffle is Shuffle.LINES:
            at = plan.lane_order.positions_of(span, at)
        else:
            at = positions_of(span, at, plan.shuffle, plan.shuffle_window)
        # Python's integers keep products of large numbers exact; within a pass, batches are counted from its first one
        before, offset = divmod(number * n, size) if carries else (number * per_pass, 0)
        batch, position = np.divmod(at + offset, size)
        index = np.flatnonzero((batch >= begin - before) & (batch < min(past - before, 1 << 62 if carries else per_pass)))
        batches, which = np.unique(batch[index], return_inverse=True)
        step, epoch = _steps_of(plan, bucket, [before + one for one in batches.tolist()])
        inside = ((step >= first) & (step < end))[which]
        yield Visits(
            index=which_row[index][inside],
            step=step[which][inside],
            epoch=epoch[which][inside],
            position=position[index][inside],
        )


def _steps_of(plan: Plan, bucket: int, batches: list[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the step and the epoch of each of a bucket's batches, given by number, ascending: `[batches]` each."""
    own = plan.buckets[bucket]
    steps, epochs = [], []
    if plan.remainder is Remainder.CARRY:  # the first epoch by whose end so many rows have come, or the last
        each = [-(-(number + 1) * own.global_batch // own.num_rows) - 1 for number in batches]
        each = each if plan.epochs is None else [min(number, plan.epochs - 1) for number in each]
    else:
        each = [number // plan.per_pass(own) for number in batches]
    for number, of_epoch in groupby(zip(each, batches, strict=True), key=itemgetter(0)):
        found = plan.epoch_numbered(number).steps_of(bucket, [batch for _, batch in of_epoch], plan.shuffle)
        steps += found
        epochs += [number] * len(found)
    return np.array(steps, dtype=np.int64), np.array(epochs, dtype=np.int64)
