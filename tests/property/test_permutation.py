"""The shuffle is a bijection at every size, and as even as chance, at the sizes where such networks are worst."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from bucketline.loader.config import Remainder
from bucketline.loader.plan import order as permutation
from bucketline.loader.plan.epoch_steps import ShardRuns
from bucketline.loader.plan.order import SORTED_BELOW, extend_key, key_of, mix, mix_word, permute, permute_all
from bucketline.loader.plan.plan import Plan, PlanBucket

KEYS = st.integers(0, (1 << 64) - 1)
WORST = [SORTED_BELOW + 1, SORTED_BELOW + 2, (1 << 17) - 1, 1 << 17, (1 << 17) + 1, (1 << 18) + 1, 200_003]


def is_bijection(values: np.ndarray[tuple[int], np.dtype[np.int64]], n: int) -> bool:
    return values.dtype == np.int64 and len(values) == n and bool((np.bincount(values, minlength=n) == 1).all())


@given(n=st.integers(1, 3000), key=KEYS)
@settings(max_examples=300)
def test_small_sizes_are_permuted_without_loss(n: int, key: int) -> None:
    assert is_bijection(permute(np.arange(n), n, key), n)


@pytest.mark.parametrize("n", [*WORST, SORTED_BELOW - 1, SORTED_BELOW])
def test_the_worst_sizes_are_permuted_without_loss(n: int) -> None:
    for key in (0, 1, key_of(7, 9)):
        assert is_bijection(permute(np.arange(n), n, key), n)


@given(bits=st.integers(17, 61), above=st.integers(-3, 3), key=KEYS, start=st.integers(0, 1 << 16))
@settings(max_examples=150)
def test_sizes_too_large_to_enumerate_stay_in_range_and_apart(bits: int, above: int, key: int, start: int) -> None:
    n = (1 << bits) + above
    index = np.concatenate([np.arange(start, start + 500), np.arange(n - 500, n)])
    values = permute(index, n, key)
    assert values.min() >= 0
    assert values.max() < n
    assert len(np.unique(values)) == len(np.unique(index))


def chi_square(counts: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> float:
    """Return the statistic in standard deviations from what chance gives, for equally likely cells."""
    expected = counts.sum() / counts.size
    degrees = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - degrees) / np.sqrt(2 * degrees))


@pytest.mark.parametrize("n", [2, 3, 5, 7, 30])
def test_at_small_sizes_every_place_is_equally_likely_for_every_index(n: int) -> None:
    keys = [key_of(key) for key in range(400 * n)]
    counts = np.zeros((n, n), np.int64)
    for key in keys:
        counts[np.arange(n), permute(np.arange(n), n, key)] += 1
    assert abs(chi_square(counts)) < 5


def test_all_orders_of_four_rows_are_equally_likely() -> None:
    orders: dict[tuple[int, ...], int] = {}
    for key in range(24 * 200):
        order = tuple(permute(np.arange(4), 4, key_of(key, 1)).tolist())
        orders[order] = orders.get(order, 0) + 1
    assert len(orders) == 24
    assert abs(chi_square(np.array(list(orders.values())))) < 5


@pytest.mark.parametrize("n", WORST)
def test_at_the_worst_sizes_neighbours_go_to_places_that_have_nothing_to_do_with_each_other(n: int) -> None:
    """Pairs of places of neighbours, and places by index, on a grid of 16 x 16: as even as chance, over several keys."""
    pairs, places = np.zeros((16, 16), np.int64), np.zeros((16, 16), np.int64)
    steps = np.zeros(16, np.int64)
    for key in range(6):
        values = permute(np.arange(n), n, key_of(key, n))
        cell = values * 16 // n
        np.add.at(pairs, (cell[:-1], cell[1:]), 1)
        np.add.at(places, (np.arange(n) * 16 // n, cell), 1)
        np.add.at(steps, (np.diff(values) % n) * 16 // n, 1)
    assert abs(chi_square(pairs)) < 5
    assert abs(chi_square(steps)) < 5
    # a bijection fills each row and column exactly, so that 15 x 15 cells are free
    expected = places.sum() / 256
    assert abs((((places - expected) ** 2 / expected).sum() - 225) / np.sqrt(450)) < 5


def same_difference(n: int) -> float:
    """Count how often two indices of one low half land as far apart in their high halves as they were; in standard deviations.

    It gives a Feistel network of too few rounds away.
    """
    high, low = permutation._halves(n)
    index = np.arange(n)
    hits = expected = 0.0
    for key in range(4):
        values = permute(index, n, key_of(key)) // low
        for difference in range(1, high, 37):
            other = (index // low + difference) % high * low + index % low
            inside = other < n
            apart = (values[other[inside]] - values[inside]) % high
            hits += int((apart == difference).sum())
            expected += int(inside.sum()) / high
    return float((hits - expected) / np.sqrt(2 * expected))


@pytest.mark.parametrize("n", [SORTED_BELOW + 1, 256 * 257, 1 << 17, 300 * 300])
def test_two_indices_that_differ_in_one_half_do_not_land_as_far_apart_as_they_were(n: int) -> None:
    assert abs(same_difference(n)) < 5


def test_a_network_of_four_rounds_would_be_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permutation, "ROUNDS", 4)
    assert same_difference(1 << 17) > 50


@given(st.lists(st.tuples(st.integers(1, 1 << 50), KEYS, st.lists(st.integers(0, 1 << 60), max_size=9)), max_size=9))
@settings(max_examples=200)
def test_many_parts_together_go_where_each_goes_alone(drawn: list[tuple[int, int, list[int]]]) -> None:
    parts = [(np.array([index % n for index in own], dtype=np.int64), n, key) for n, key, own in drawn]
    together = permute_all(parts)
    assert together.tolist() == [value for part in parts for value in permute(*part).tolist()]


@given(n=st.integers(2, 1 << 62))
@settings(max_examples=500)
def test_hardly_a_value_falls_outside_whatever_the_size(n: int) -> None:
    high, low = permutation._halves(n)
    assert n <= high * low < n + high
    assert high < 1 << 32  # so that a half and a hash of 48 bits add up without overflow
    assert 0 <= high - low <= 1 + high // low


@given(word=st.integers(0, (1 << 64) - 1), words=st.lists(st.integers(-(1 << 63), 1 << 70), min_size=1, max_size=4))
def test_words_are_hashed_alike_one_by_one_and_together(word: int, words: list[int]) -> None:
    assert mix_word(word) == int(mix(np.array([word], dtype=np.uint64))[0])
    assert key_of(*words) == extend_key(key_of(*words[:-1]), words[-1])


def test_sorted_orders_are_kept_up_to_a_number_of_bytes_and_the_newest_stay() -> None:
    orders = permutation._SortedOrders(100_000)
    sizes = [(1000, 1), (5000, 2), (20_000, 3), (30_000, 4), (1000, 5)]
    for n, key in sizes:
        assert np.array_equal(orders.orders([(n, key)])[n, key], permute(np.arange(n), n, key))
        assert orders.num_bytes <= 100_000
    newest = orders.orders([(1000, 5)])
    assert orders.orders([(1000, 5)])[1000, 5] is newest[1000, 5]
    many = [(60_000, 6)]  # more than may be kept
    assert orders.orders(many)[many[0]] is not orders.orders(many)[many[0]]


def test_orders_made_together_are_those_made_one_by_one() -> None:
    wanted = [(1, 3), (1024, 1), (2000, 2), (1, 3), (700, 1), (1025, 9), (0, 4)]
    together = permutation._SortedOrders(1 << 20).orders(wanted)
    assert set(together) == set(wanted)
    for n, key in wanted:
        (alone,) = permutation._SortedOrders(1 << 20).orders([(n, key)]).values()
        assert np.array_equal(together[n, key], alone)
        assert sorted(alone.tolist()) == list(range(n))


@given(values=st.lists(st.integers(0, (1 << 64) - 1), min_size=1, max_size=50, unique=True))
def test_the_hash_of_words_is_a_bijection(values: list[int]) -> None:
    assert len(np.unique(mix(np.array(values, dtype=np.uint64)))) == len(values)


# A shuffled run looks like chance, at the numbers of rows and steps where the bijection is weakest; seeds are fixed.


GOOD = 4.5  # standard deviations; all seeds are fixed, so that nothing here depends on luck


def plan_of(*sizes: int, seed: int = 7, batch: int = 1) -> Plan:
    buckets = tuple(PlanBucket(name=f"train/{64 * (k + 1)}x64", num_rows=n, global_batch=batch) for k, n in enumerate(sizes))
    return Plan(seed=seed, remainder=Remainder.CARRY, buckets=buckets, source="s")


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


# Every order mixes within an epoch, and epochs differ: what came first does not come first again.


SHARDS, ROWS, BATCH, WINDOW, MIXED_EPOCHS = 64, 512, 64, 1024, 5
SHARD = np.repeat(np.arange(SHARDS), ROWS)


def orders(window: int | None, lanes: int, seed: int) -> list[NDArray[np.int64]]:
    runs = ShardRuns(shard=np.arange(SHARDS), repeat=np.zeros(SHARDS, dtype=np.int64), num_rows=np.full(SHARDS, ROWS))
    bucket = PlanBucket(name="train/64x64", num_rows=SHARDS * ROWS, global_batch=BATCH)
    more: dict[str, Any] = {"window": window, "lanes": lanes, "runs": (runs,)}
    plan = Plan(seed=seed, remainder=Remainder.DROP, buckets=(bucket,), source="s", **more)
    ends = [plan.steps_before(epoch) for epoch in range(MIXED_EPOCHS + 1)]
    return [np.concatenate([step.rows for step in plan.draw([(k, 0) for k in range(*pair)])]) for pair in pairwise(ends)]


@pytest.mark.parametrize(
    ("window", "lanes", "neighbours", "shards", "spread"),
    [
        (None, 1, 0.003, 38, 0.95),
        (WINDOW, 1, 0.1, 12, 0.05),
        (WINDOW, 8, 0.02, 38, 0.3),
    ],
)
def test_an_order_mixes_within_an_epoch_and_epochs_differ(
    window: int | None, lanes: int, neighbours: float, shards: int, spread: float
) -> None:
    """Neighbours in one batch at most, shards in a batch and a shard's spread over a full shuffle's at least."""
    for seed in (1, 2):
        epochs = orders(window, lanes, seed)
        for rows in epochs:
            assert len(np.unique(rows)) == len(rows) == SHARDS * ROWS
            position = np.argsort(rows)
            apart = np.diff(position // BATCH)[np.diff(SHARD) == 0]
            assert (apart == 0).mean() <= neighbours
            assert np.mean([len(np.unique(batch)) for batch in SHARD[rows].reshape(-1, BATCH)]) >= shards
            of_shards = position.reshape(SHARDS, ROWS).std(axis=1).mean()
            assert of_shards / (len(rows) / np.sqrt(12)) >= spread
        first = WINDOW * lanes
        again = [np.isin(one[: first // 2], other[:first]).mean() for one, other in pairwise(epochs)]
        assert np.mean(again) < first / len(epochs[0]) + 0.15, "hardly more than by chance"
