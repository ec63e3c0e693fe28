"""A share of a store's rows in every pass: others each time until all have come, as a function that has an inverse."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucketline.errors import UsageError
from bucketline.loader import Loader, LoaderConfig, Remainder, WeightedStore
from bucketline.loader.mixture import StoreArgument
from bucketline.loader.plan.shares import PassRows, rows_per_pass
from bucketline.store.format.hashing import sample_digest
from bucketline.store.read.store import StoreRows
from tests.kit import make_store, samples_of

if TYPE_CHECKING:
    from pathlib import Path

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
    with pytest.raises(UsageError, match=r"a\.store has .* repeats, expected a number above 0: 3 to read .* 0\.5 to read half"):
        WeightedStore(paths[0], repeats)


def test_commands_take_shares(paths: tuple[Path, Path]) -> None:
    assert StoreArgument.parse(f"{paths[0]}:0.5").repeats == 0.5
    assert StoreArgument.parse("s3://bucket/a.store:0.25").repeats == 0.25
    whole = StoreArgument.parse(f"{paths[0]}:2.0").repeats
    assert (whole, type(whole)) == (2, int)
    with pytest.raises(UsageError, match=r"has 0\.0 repeats, expected a number above 0"):
        StoreArgument.parse(f"{paths[0]}:0.0")
