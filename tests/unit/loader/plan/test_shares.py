"""A share of a store's rows in every pass: others each time until all have come, as a function that has an inverse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from bucketline.errors import UsageError
from bucketline.loader import Loader, LoaderConfig, Remainder, WeightedStore
from bucketline.loader.plan.order import Purpose, keys_of_rows, mix, normal, uniform, uniform_on_host
from bucketline.loader.plan.plan import PassRows, rows_per_pass
from bucketline.store import Store
from bucketline.store.format.block import sample_digest
from bucketline.store.read.store import StoreRows
from tests.kit import make_store, samples_of

FIRST, SECOND = {"train/64x64": 11, "train/96x64": 4}, {"train/64x64": 6}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("shares")
    make_store(folder / "a.store", samples_of(FIRST, "a/"))
    make_store(folder / "b.store", samples_of(SECOND, "b/"))
    return folder / "a.store", folder / "b.store"


@given(
    sizes=st.lists(st.tuples(st.integers(1, 40), st.floats(0.01, 3)), min_size=1, max_size=3),
    is_mixed=st.booleans(),
    key=st.integers(0, 1 << 63),
)
def test_every_row_comes_once_before_any_comes_twice(*, sizes: list[tuple[int, float]], is_mixed: bool, key: int) -> None:
    starts = np.cumsum([0, *(n for n, _ in sizes)]).tolist()
    parts = [
        StoreRows(first=first, num_rows=n, per_pass=rows_per_pass(n, share))
        for first, (n, share) in zip(starts, sizes, strict=False)
    ]
    shares, total = PassRows(parts, key, is_mixed=is_mixed), sum(part.per_pass for part in parts)
    passes = [shares.rows(np.arange(total), number) for number in range(8)]
    for part in parts:
        own = np.concatenate([rows[(rows >= part.first) & (rows < part.first + part.num_rows)] for rows in passes])
        assert len(own) == 8 * part.per_pass
        for begin in range(0, len(own) - part.num_rows + 1, part.num_rows):
            assert sorted(own[begin : begin + part.num_rows] - part.first) == list(range(part.num_rows))


def ids_by_epoch(loader: Loader, num_batches: int) -> list[tuple[int, bytes]]:
    found = []
    for _, batch in zip(range(num_batches), loader, strict=False):
        found += [(batch.epoch, bytes(digest)) for digest in batch.ids.tolist()]
    return found


def test_two_epochs_of_a_half_read_every_sample_once_and_a_state_resumes(paths: tuple[Path, Path]) -> None:
    config = LoaderConfig(batch_size=2, epochs=2, remainder=Remainder.PARTIAL)
    digests = {sample_digest(sample.id) for sample in samples_of(SECOND, "b/")}
    with Loader(WeightedStore(paths[1], 0.5), config) as loader:
        plan = loader.plan
        steps = [plan.at(step) for step in range(plan.steps_before(2))]
        rows = [int(row) for step in steps for row, weight in zip(step.rows, step.weight, strict=True) if weight]
        assert sorted(rows) == list(range(len(digests)))
    config = LoaderConfig(batch_size=3, seed=2)
    shares: Any = [WeightedStore(paths[0], 0.5), paths[1]]
    with Loader(shares, config) as loader:
        all_of_it = ids_by_epoch(loader, 9)
    with Loader(shares, config) as first:
        begun = ids_by_epoch(first, 4)
        state = first.state_dict()
    with Loader(shares, config) as second:
        second.load_state_dict(state)
        rest = ids_by_epoch(second, len(all_of_it) // 3 - len(begun) // 3)
    assert begun + rest == all_of_it


@pytest.mark.parametrize("window", [None, 16, 0])
@pytest.mark.parametrize("times", [0.3, 0.5, 1.7, 2.5])
def test_shares_are_read_in_any_order_on_any_number_of_machines(
    paths: tuple[Path, Path], window: int | None, times: float
) -> None:
    shares: Any = [WeightedStore(paths[0], times), WeightedStore(paths[1], 2)]
    config = LoaderConfig(batch_size=1, seed=4, window=window, lanes=2 if window else None)
    with Loader(shares, config, world_size=2) as loader:
        plan = loader.plan
        assert [sum(own.num_rows) for own in plan.runs] == ([own.num_rows for own in plan.buckets] if window else [])
        drawn = plan.draw([(step, 0) for step in range(plan.steps_before(10))])
        for bucket, n in (("train/64x64", 11), ("train/96x64", 4)):
            rows = np.concatenate([one.rows for one in drawn if one.bucket == bucket])
            counts = np.bincount(rows[rows < n * (1 if times < 1 or times % 1 else times)], minlength=n)
            assert counts.max() - counts.min() <= 1 + 1, "all come before any comes again, up to a pass that is cut"
            assert counts.sum() == pytest.approx(10 * rows_per_pass(n, times), abs=4)


@pytest.mark.parametrize("repeats", [0, -0.5, float("nan"), float("inf"), "2", True, None])
def test_what_is_not_a_number_above_0_is_refused(paths: tuple[Path, Path], repeats: Any) -> None:
    for store in (paths[0], Store.open(paths[0])):
        with pytest.raises(UsageError, match=r"a\.store has .* repeats, expected a number above 0: 3 to read .* 0\.5 to read"):
            WeightedStore(store, repeats)


# Draws depend only on their key, are the same on host and device, and have the distribution that they say.


def keys_of_step(seed: int, step: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    return keys_of_rows(seed, np.full(len(positions), step), positions)


KEYS = torch.from_numpy(keys_of_step(7, 11, np.arange(20_000)))


@given(words=st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=1, max_size=50), purpose=st.sampled_from(Purpose))
def test_host_and_device_draw_the_same_number(words: list[int], purpose: Purpose) -> None:
    keys = np.array(words, dtype=np.int64)
    assert np.array_equal(uniform_on_host(keys, purpose), uniform(torch.from_numpy(keys), purpose).numpy())


@pytest.mark.parametrize("purpose", Purpose)
def test_uniform_numbers_are_even_over_their_range(purpose: Purpose) -> None:
    values = uniform(KEYS, purpose).numpy()
    assert values.min() >= 0
    assert values.max() < 1
    counts = np.histogram(values, 50, (0, 1))[0]
    assert abs(((counts - 400) ** 2 / 400).sum() - 49) < 5 * np.sqrt(98)
    pairs = np.histogram2d(values[:-1], values[1:], 10, [[0, 1], [0, 1]])[0]
    assert abs(((pairs - pairs.sum() / 100) ** 2 / (pairs.sum() / 100)).sum() - 99) < 5 * np.sqrt(198)


def test_normal_numbers_have_a_normals_moments_and_tails() -> None:
    values = normal(KEYS[:500], Purpose.NOISE, (4, 32, 32)).double().flatten()
    num = len(values)
    assert num == 500 * 4096
    assert abs(values.mean()) < 5 / num**0.5
    assert abs(values.var() - 1) < 5 * (2 / num) ** 0.5
    assert abs((values**3).mean()) < 5 * (15 / num) ** 0.5
    assert abs((values**4).mean() - 3) < 5 * (96 / num) ** 0.5
    assert 4.5 < values.abs().max() < 7
    assert abs((values > 1.959964).double().mean() - 0.025) < 0.0006
    assert abs((values < -1.959964).double().mean() - 0.025) < 0.0006


def test_the_two_numbers_of_a_pair_and_of_neighbouring_rows_are_independent() -> None:
    values = normal(KEYS[:4000], Purpose.NOISE, (64,)).double()
    for one, other in ((values[:, 0::2], values[:, 1::2]), (values[:-1], values[1:]), (values[:, :-1], values[:, 1:])):
        assert abs((one * other).mean()) < 5 / one.numel() ** 0.5
        assert abs((one**2 * other**2).mean() - 1) < 5 * (8 / one.numel()) ** 0.5


@pytest.mark.parametrize("shape", [(), (1,), (3,), (4, 5, 7), (2, 8, 8)])
def test_a_row_is_the_same_whatever_batch_it_stands_in(shape: tuple[int, ...]) -> None:
    whole = normal(KEYS[:16], Purpose.NOISE, shape)
    assert whole.shape == (16, *shape)
    assert whole.dtype is torch.float32
    assert bool(torch.isfinite(whole).all())
    for rows in ([3], [5, 3], list(range(15, -1, -1)), [7] * 4):
        assert torch.equal(normal(KEYS[rows], Purpose.NOISE, shape), whole[rows])
        assert torch.equal(uniform(KEYS[rows], Purpose.FLIP), uniform(KEYS[:16], Purpose.FLIP)[rows])


def test_a_longer_row_begins_as_a_shorter_one_does() -> None:
    assert torch.equal(normal(KEYS[:3], Purpose.NOISE, (10,))[:, :7], normal(KEYS[:3], Purpose.NOISE, (7,)))


def test_purposes_draw_independently() -> None:
    drawn = torch.stack([uniform(KEYS, purpose) for purpose in Purpose])
    assert float((torch.corrcoef(drawn) - torch.eye(len(Purpose))).abs().max()) < 5 / len(KEYS) ** 0.5


@given(seed=st.integers(0, (1 << 63) - 1), step=st.integers(0, 1 << 50))
def test_keys_of_a_step_are_apart_and_follow_from_seed_step_and_position(seed: int, step: int) -> None:
    keys = keys_of_step(seed, step, np.arange(64))
    assert len(np.unique(keys)) == 64
    assert np.array_equal(keys_of_step(seed, step, np.array([5, 63])), keys[[5, 63]])
    assert not np.isin(keys_of_step(seed, step + 1, np.arange(64)), keys).any()
    assert not np.isin(keys_of_step(seed ^ 1, step, np.arange(64)), keys).any()


@given(
    seed=st.integers(0, (1 << 63) - 1),
    steps=st.lists(st.tuples(st.integers(0, 1 << 50), st.integers(1, 5)), min_size=1, max_size=6, unique_by=lambda s: s[0]),
    first=st.integers(0, 1 << 30),
)
def test_keys_of_rows_of_many_steps_are_those_of_each_step_alone(seed: int, steps: list[tuple[int, int]], first: int) -> None:
    of_step = np.repeat([step for step, _ in steps], [count for _, count in steps]).astype(np.int64)
    positions = np.concatenate([np.arange(first, first + count) for _, count in steps])
    alone = [key for step, count in steps for key in keys_of_step(seed, step, np.arange(first, first + count)).tolist()]
    assert keys_of_rows(seed, of_step, positions).tolist() == alone


def test_extreme_words_give_finite_normals() -> None:
    """A word of all ones or of none is where a logarithm or a rounded half could go wrong."""
    words = np.array([0, (1 << 64) - 1, 0xFFFFFFFF, 0xFFFFFFFF00000000, 1 << 63], dtype=np.uint64)
    assert len(np.unique(mix(words))) == 5
    values = normal(torch.from_numpy(words.view(np.int64)), Purpose.NOISE, (4096,))
    assert bool(torch.isfinite(values).all())


def test_the_draws_of_a_given_key_never_change() -> None:
    """Literals: a run of last year continues with the same noise today."""
    keys = torch.from_numpy(keys_of_step(1, 2, np.arange(3)))
    assert keys.tolist() == KEYS_LITERAL
    assert uniform(keys, Purpose.TIMESTEP).tolist() == UNIFORM_LITERAL
    torch.testing.assert_close(normal(keys, Purpose.NOISE, (2,)), torch.tensor(NORMAL_LITERAL), rtol=1e-6, atol=1e-7)


KEYS_LITERAL = [4223570037136168277, -2595853454741170741, -3904406321379266172]
UNIFORM_LITERAL = [0.8293100920204539, 0.2260693725794768, 0.39639393782708576]
NORMAL_LITERAL = [
    [-1.5272324085235596, -1.1741681098937988],
    [-0.5565486550331116, 0.37026628851890564],
    [0.5010904669761658, -0.097856305539608],
]
