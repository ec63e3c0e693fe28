"""Bytes that leave a store in object storage, by epoch, over machines with caches of their own."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bucketline.bench.fixtures.stores import SECOND, StoreShape
from tests.small_lines import LINE_BYTES, Found, Run, run_machines

SHAPE = StoreShape(num_shards=5, rows_per_shard=3211, latent_shape=(4, 16, 32), tokens=(10, 20), token_width=48)  # 2,002 lines
RAGGED = StoreShape(
    num_shards=7, rows_per_shard=900, latent_shape=(4, 16, 32), tokens=(10, 20), token_width=48, second_tokens=(5, 40)
)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("small-lines")


def expect_once(found: Found) -> None:
    """Check that the first epoch has fetched each line once, in a request each; a few are not read, others by two machines."""
    assert 0.95 <= found.bytes_fetched[0] / found.store_bytes <= 1.02
    assert found.gets[0] == pytest.approx(found.bytes_fetched[0] / LINE_BYTES, rel=0.03)


def test_each_line_leaves_the_store_once_for_all_machines(folder: Path) -> None:
    carried, padded = run_machines(
        folder, SHAPE, [Run(cache=1.2, machines=8), Run(cache=1.2, machines=4, epochs=3, remainder="partial")]
    )
    for found in (carried, padded):
        expect_once(found)
    assert carried.bytes_fetched[1] / carried.store_bytes <= 0.002  # a line of a cut, since a pass begins within a batch
    assert padded.bytes_fetched[1:] == [0, 0]


def test_a_cache_of_half_the_store_keeps_half_and_one_of_two_windows_fetches_each_line_once(folder: Path) -> None:
    half, windows, tiny = run_machines(folder, SHAPE, [Run(cache=0.5), Run(cache=0.03, epochs=1), Run(cache=0.008)])
    for found in (half, windows):
        expect_once(found)
    assert 1 - half.bytes_fetched[1] / half.store_bytes >= 0.47
    assert windows.window < half.window  # rows, as the smaller cache can hold
    assert "in windows of 16 rows, lines would be fetched again" in tiny.error


def test_machines_with_small_caches_fetch_the_lines_of_ragged_groups_once(folder: Path) -> None:
    two, ragged = run_machines(
        folder, RAGGED, [Run(cache=0.2, machines=2, ragged=(SECOND,)), Run(cache=0.4, window=300, ragged=(SECOND,))]
    )
    for found in (two, ragged):
        expect_once(found)


@pytest.mark.parametrize("shards", [1, 3])
def test_many_buckets_in_few_shards_are_fetched_a_few_times_or_refused(shards: int, folder: Path) -> None:
    """With half of such a store cached, each batch fetched most of it again."""
    draw = random.Random(shards)
    shares = tuple(draw.choice([1.0, 1.0, 0.3]) for _ in range(12))
    shape = StoreShape(
        num_shards=shards,
        rows_per_shard=1320 // shards,
        latent_shape=(4, 8, 16),
        tokens=(5, 15),
        token_width=48,
        bucket_shares=shares,
    )
    runs = [
        Run(cache=draw.uniform(0.45, 0.9), batch_size=draw.choice([2, 4, 8]), machines=draw.choice([1, 1, 2])) for _ in range(4)
    ]
    found = run_machines(folder, shape, runs)
    for run, one in zip(runs, found, strict=True):
        if one.error:
            assert run.cache < 0.8, one.error
            assert "lines would be fetched again and again" in one.error
        else:
            assert max(one.bytes_fetched) <= 3 * one.store_bytes, run
    assert any(not one.error for one in found)
