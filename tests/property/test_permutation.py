"""The shuffle is a bijection at every size, and as even as chance, at the sizes where such networks are worst."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bucketline.loader.plan import order as permutation
from bucketline.loader.plan.order import SORTED_BELOW, extend_key, key_of, mix, mix_word, permute, permute_all

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


@pytest.mark.parametrize("n", [SORTED_BELOW + 1, (1 << 17) + 1])
def test_at_the_worst_sizes_one_index_goes_everywhere_over_the_keys(n: int) -> None:
    """A small Feistel network reaches some places too often; low bits are looked at, where the halves are narrowest."""
    index = np.array([0, 1, n // 2, n - 1])
    values = np.stack([permute(index, n, key_of(key)) for key in range(3000)])
    for column in values.T:
        assert abs(chi_square(np.bincount(column % 32, minlength=32))) < 5
        assert abs(chi_square(np.bincount(column * 32 // n, minlength=32))) < 5


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
        assert np.array_equal(orders.order(n, key), permutation._sorted_order(n, key))
        assert orders.num_bytes <= 100_000
    newest = orders.order(1000, 5)
    assert orders.order(1000, 5) is newest
    assert orders.order(60_000, 6) is not orders.order(60_000, 6)  # more than may be kept


def test_two_keys_give_orders_that_agree_no_more_often_than_chance() -> None:
    n = SORTED_BELOW + 1
    orders = [permute(np.arange(n), n, key) for key in range(8)]
    same = sum(int((orders[a] == orders[b]).sum()) for a in range(8) for b in range(a))
    assert same < 60  # 28 pairs, one agreement each by chance


@given(values=st.lists(st.integers(0, (1 << 64) - 1), min_size=1, max_size=50, unique=True))
def test_the_hash_of_words_is_a_bijection(values: list[int]) -> None:
    assert len(np.unique(mix(np.array(values, dtype=np.uint64)))) == len(values)
