"""Bytes that leave a store in object storage, by epoch, over machines with caches of their own, and their forecast."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bucketline.bench.fixtures.synthetic_store import SECOND, StoreShape
from tests.small_lines import Found, Run, run_machines

if TYPE_CHECKING:
    from pathlib import Path

SHAPE = StoreShape(num_shards=5, rows_per_shard=3211, latent_shape=(4, 16, 32), tokens=(10, 20), token_width=48)  # 2,002 lines
RAGGED = StoreShape(
    num_shards=7, rows_per_shard=900, latent_shape=(4, 16, 32), tokens=(10, 20), token_width=48, second_tokens=(5, 40)
)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("small-lines")


def expect_forecast(found: Found) -> None:
    """Compare the bytes and requests of each epoch with the bill's: within 2 %, or one line."""
    for measured, forecast in ((found.bytes_fetched, found.bill_bytes), (found.gets, found.bill_gets)):
        for own, expected in zip(measured, forecast, strict=True):
            assert expected == pytest.approx(own, rel=0.02), (found.window, measured, forecast)


def test_each_line_leaves_the_store_once_for_all_machines(folder: Path) -> None:
    carried, padded = run_machines(
        folder, SHAPE, [Run(cache=1.2, machines=8), Run(cache=1.2, machines=4, epochs=3, remainder="partial")]
    )
    for found in (carried, padded):
        assert 1.0 <= found.bytes_fetched[0] / found.read_bytes <= 1.02
        expect_forecast(found)
    assert carried.bytes_fetched[1] / carried.read_bytes <= 0.002  # a line of a cut, since a pass begins within a batch
    assert padded.bytes_fetched[1:] == [0, 0]


def test_a_cache_of_half_the_store_keeps_half_and_one_of_two_windows_fetches_each_line_once(folder: Path) -> None:
    half, windows, tiny = run_machines(folder, SHAPE, [Run(cache=0.5), Run(cache=0.03, epochs=1), Run(cache=0.008)])
    for found in (half, windows):
        assert found.bytes_fetched[0] / found.read_bytes <= 1.02
        expect_forecast(found)
    assert 1 - half.bytes_fetched[1] / half.read_bytes >= 0.48
    assert windows.window < half.window  # rows, as the smaller cache can hold
    assert "of 1 lane need" in tiny.error


def test_the_forecast_holds_for_machines_with_small_caches_and_ragged_groups(folder: Path) -> None:
    two, ragged = run_machines(
        folder, RAGGED, [Run(cache=0.2, machines=2, ragged=(SECOND,)), Run(cache=0.4, window=300, ragged=(SECOND,))]
    )
    for found in (two, ragged):
        assert found.bytes_fetched[0] / found.read_bytes <= 1.02
        expect_forecast(found)
