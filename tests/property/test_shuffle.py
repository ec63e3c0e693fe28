"""A shuffled run looks like chance, at the numbers of rows and steps where the bijection is weakest; seeds are fixed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from bucketline.loader.config import Remainder
from bucketline.loader.plan.order import SORTED_BELOW
from bucketline.loader.plan.plan import Plan, PlanBucket

EPOCHS = 6
WEAKEST = [SORTED_BELOW + 1, (1 << 17) + 1, 362 * 363, (1 << 18) + 1]  # small halves, most values outside, none outside
GOOD = 4.5  # standard deviations; all seeds are fixed, so that nothing here depends on luck


def plan_of(*sizes: int, seed: int = 7, batch: int = 1) -> Plan:
    buckets = tuple(PlanBucket(name=f"train/{64 * (k + 1)}x64", num_rows=n, global_batch=batch) for k, n in enumerate(sizes))
    return Plan(seed=seed, remainder=Remainder.CARRY, buckets=buckets, source="s")


def passes_of(n: int, seed: int = 7) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Return the rows of a bucket's first passes, `[EPOCHS, n]`."""
    plan = plan_of(n, seed=seed, batch=n)
    return np.stack([plan.batch(plan.buckets[0], number)[0] for number in range(EPOCHS)])


@pytest.mark.parametrize("n", WEAKEST)
def test_a_rows_position_has_nothing_to_do_with_its_number_nor_with_its_position_before(n: int) -> None:
    orders = passes_of(n)
    positions = np.argsort(orders, axis=1)  # by pass and row
    for one in positions:
        assert abs(np.corrcoef(np.arange(n), one)[0, 1]) * np.sqrt(n) < GOOD
    for one, other in itertools.combinations(positions, 2):
        assert abs(np.corrcoef(one, other)[0, 1]) * np.sqrt(n) < GOOD
    mean = positions.mean(axis=0) / n  # over the passes: as spread as the mean of that many even draws
    assert abs(mean.std() / np.sqrt((1 - 1 / EPOCHS) / 12 / EPOCHS) - np.sqrt(EPOCHS / (EPOCHS - 1))) < 0.02


@pytest.mark.parametrize("n", WEAKEST)
@pytest.mark.parametrize("distance", [1, 2, 3, 256, 257, 363])
def test_rows_that_are_stored_side_by_side_are_not_read_side_by_side(n: int, distance: int) -> None:
    """By chance two rows a distance apart follow one another 2 times a pass. 256, 257 and 363 are widths of the halves."""
    orders = passes_of(n)
    apart = np.abs(np.diff(orders, axis=1))
    expected = EPOCHS * (n - 1) * 2 * (n - distance) / (n * (n - 1))
    assert abs((apart == distance).sum() - expected) < GOOD * np.sqrt(expected)


@pytest.mark.parametrize("n", WEAKEST[:2])
def test_rows_that_meet_in_one_batch_do_not_meet_again_more_often_than_by_chance(n: int) -> None:
    size = 64
    batches = np.argsort(passes_of(n), axis=1) // size  # by pass and row
    met = 0
    for one, other in itertools.combinations(batches, 2):
        pairs = np.bincount(one.astype(np.int64) * (n // size + 1) + other)
        met += int((pairs * (pairs - 1) // 2).sum())  # pairs of rows that share a batch in both
    each = (n // size) * size * (size - 1) / 2 * (size - 1) / (n - 1)
    expected = EPOCHS * (EPOCHS - 1) / 2 * each
    assert abs(met - expected) < GOOD * np.sqrt(expected) + 0.005 * expected  # the last batch of a pass is a short one


@pytest.mark.parametrize("steps", [SORTED_BELOW + 1, (1 << 17) + 1])
def test_buckets_take_turns_as_chance_would(steps: int) -> None:
    sizes = (steps - 30_537, 25_000, 5_000, 537)
    plan = plan_of(*sizes)
    order = np.array(
        [int(step.bucket.split("/")[1].split("x")[0]) // 64 - 1 for step in plan.draw([(k, 0) for k in range(steps)])]
    )
    assert np.bincount(order).tolist() == list(sizes)
    same = sum(size * (size - 1) for size in sizes) / (steps * (steps - 1))
    changes = (order[1:] != order[:-1]).sum()
    assert abs(changes - (steps - 1) * (1 - same)) < GOOD * np.sqrt(steps * same * (1 - same))
    for bucket, size in enumerate(sizes):
        window = max(50, 20 * steps // size)
        counts = (order[: steps // window * window] == bucket).reshape(-1, window).sum(axis=1)
        share = size / steps
        spread = ((counts - window * share) ** 2).sum() / (window * share * (1 - share))
        assert abs(spread - len(counts)) < GOOD * np.sqrt(2 * len(counts))  # chi-square of that many windows
