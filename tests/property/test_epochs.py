"""`shuffle=lines` from epoch to epoch: what stays the same for the caches, and what differs as by chance."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bucketline.loader.config import Remainder, Shuffle
from bucketline.loader.plan.lanes import ShardRuns
from bucketline.loader.plan.plan import Plan, PlanBucket

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

WINDOW, BATCH = 128, 16


def plan_over(held: Sequence[Sequence[int]], lanes: int = 1, batch: int = BATCH, seed: int = 0, **more: Remainder) -> Plan:
    """Make a plan; `held`: by bucket, the rows of each shard."""
    runs, buckets = [], []
    for number, rows in enumerate(held, 1):
        shard = np.flatnonzero(rows)
        runs.append(ShardRuns(shard=shard, repeat=np.zeros_like(shard), num_rows=np.array(rows)[shard]))
        buckets.append(PlanBucket(name=f"train/{64 * number}x64", num_rows=sum(rows), global_batch=batch))
    return Plan(
        seed=seed,
        remainder=more.get("remainder", Remainder.CARRY),
        buckets=tuple(buckets),
        source="s",
        shuffle=Shuffle.LINES,
        shuffle_window=WINDOW,
        lanes=lanes,
        runs=tuple(runs),
    )


def epoch_rows(plan: Plan, epoch: int, lane: int = 0, most: int = 1 << 62) -> NDArray[np.int64]:
    """Return the rows that a lane reads in the first steps of an epoch, of a plan with one bucket, in order."""
    steps = range(plan.steps_before(epoch), min(plan.steps_before(epoch + 1), plan.steps_before(epoch) + most))
    return np.concatenate([step.rows for step in plan.draw([(step, lane) for step in steps], plan.lanes)])


@pytest.mark.parametrize("lanes", [1, 4])
@pytest.mark.parametrize("shards", [1, 2, 8, 16, 31, 40])
def test_what_an_epoch_begins_with_comes_anywhere_in_the_next_one(shards: int, lanes: int) -> None:
    """The share of an epoch's first rows among the next one's first rows is that of rows drawn by chance."""
    rows, shares, first = 1920 // shards, list[float](), WINDOW * lanes // BATCH
    for seed in range(24):
        plan = plan_over([[rows] * shards * lanes], lanes, seed=seed)
        epochs = [epoch_rows(plan, epoch, seed % lanes, first) for epoch in range(5)]
        for one, other in itertools.pairwise(epochs):
            shares.append(float(np.isin(one[: WINDOW // 2], other).mean()))
    assert np.mean(shares) == pytest.approx(WINDOW / (rows * shards), abs=0.07)
    assert 0 <= min(shares) < max(shares)


@given(
    lanes=st.sampled_from([1, 2, 3]),
    shards=st.integers(1, 40),
    remainder=st.sampled_from(Remainder),
    seed=st.integers(0, 1 << 40),
    number=st.one_of(st.integers(0, 3), st.integers(0, 1 << 40)),
)
@settings(max_examples=60, deadline=None)
def test_a_pass_has_every_row_once_and_reads_a_stretch_of_a_shard_in_neighbouring_windows(
    lanes: int, shards: int, remainder: Remainder, seed: int, number: int
) -> None:
    """Only the stretch in which a shard's reading begins also ends it, so that each shard has one such place at most."""
    held = np.random.default_rng(seed).integers(0, 90, (2, shards))
    held[:, 0] += 20
    plan = plan_over(held.tolist(), lanes, batch=lanes * 2, seed=seed, remainder=remainder)
    order = plan.lane_order
    for bucket, rows in enumerate(held):
        ends = np.cumsum(rows)
        read: list[NDArray[np.int64]] = []
        for lane in range(lanes):
            reads = order.reads(bucket, number, lane)
            window = np.unique(reads.begin, return_inverse=True)[1]
            own = np.concatenate([np.arange(a, a + n) for a, n in zip(reads.first_row, reads.num_rows, strict=True)])
            window_of = np.repeat(window, reads.num_rows)[np.argsort(own)]
            own.sort()
            read.append(own)
            shard = np.searchsorted(ends, own, side="right")
            for one in np.unique(shard).tolist():  # around the shard, windows go up by at most 1, and down in one place
                steps = np.diff(np.append(window_of[shard == one], window_of[shard == one][0]))
                assert (steps < 0).sum() <= 1
                assert steps.max() <= max(1, -int(steps.min()))
        assert sorted(np.concatenate(read).tolist()) == list(range(rows.sum()))


def test_lanes_keep_their_rows_from_epoch_to_epoch() -> None:
    plan = plan_over([[100] * 12], lanes=4, remainder=Remainder.DROP)
    each = [[set(epoch_rows(plan, epoch, lane).tolist()) for lane in range(4)] for epoch in range(3)]
    for lane in range(4):
        for other in range(4):
            if other != lane:
                assert not each[0][lane] & each[1][other]


def test_a_lane_of_one_shard_mixes_other_rows_in_each_epoch() -> None:
    """Its windows begin at other rows, so they are not the same sets in another order."""
    plan = plan_over([[1024]])
    windows = [
        {frozenset(rows[n : n + WINDOW].tolist()) for n in range(0, len(rows), WINDOW)}
        for rows in (epoch_rows(plan, epoch) for epoch in range(8))
    ]
    assert len(set.union(*windows)) >= 4 * len(windows[0])
