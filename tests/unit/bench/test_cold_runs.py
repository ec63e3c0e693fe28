"""A cold run counts only if the disk was read, and only if what was read is what is stored."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bucketline.bench.apart import apart
from bucketline.bench.cases.cold import (
    DIRECT,
    ColdRun,
    NotColdError,
    Read,
    cold_rate,
    plan_captions,
    plan_rows,
    read_cold,
)
from bucketline.bench.fixtures.synthetic_store import StoreShape, kept_store
from bucketline.bench.process_usage import drop_pages

pytestmark = pytest.mark.slow

SHAPE = StoreShape(num_shards=2, rows_per_shard=16, latent_shape=(4, 64, 64), tokens=(3, 9), token_width=512)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kept_store(tmp_path_factory.mktemp("cold"), SHAPE)


@pytest.fixture
def rows(store: Path, tmp_path: Path) -> Path:
    plan_rows(store, 4, 3, 7, tmp_path / "rows.npz")
    return tmp_path / "rows.npz"


def read_apart(run: ColdRun) -> Read:
    return Read(**apart(read_cold, run))


def run_of(reader: str, store: Path, plan: Path, **changes: object) -> ColdRun:
    values = {
        "reader": reader,
        "store": str(store),
        "plan": str(plan),
        "batch_size": 4,
        "batches": 3,
        "threads": 2,
    }
    return ColdRun(**{**values, **changes})  # type: ignore[arg-type]


def test_the_limit_reads_its_payload_from_the_disk(store: Path, rows: Path) -> None:
    drop_pages(store)
    read = read_apart(run_of(DIRECT, store, rows))
    assert read.payload_bytes == 12 * SHAPE.latent_bytes
    assert read.counts
    assert read.gb_s > 0


def test_a_loader_reads_its_rows_and_the_tokens_of_their_captions(store: Path, rows: Path) -> None:
    drop_pages(store)
    read = read_apart(run_of("loader", store, rows))
    assert read.payload_bytes > 12 * (SHAPE.latent_bytes + 3 * 2 * SHAPE.token_width)
    assert read.counts


def test_captions_count_their_own_tokens_alone(store: Path, tmp_path: Path) -> None:
    plan_captions(store, 4, 3, 7, tmp_path / "captions.npz")
    with np.load(tmp_path / "captions.npz") as plan:
        lengths = plan["length"]
    assert len(set(lengths.tolist())) > 1
    assert {int(length) // (2 * SHAPE.token_width) for length in lengths} <= set(range(3, 10))
    drop_pages(store)
    read = read_apart(run_of(DIRECT, store, tmp_path / "captions.npz"))
    assert read.payload_bytes == int(lengths.sum())
    assert read.counts


def test_a_run_over_pages_that_are_still_cached_is_refused(store: Path, rows: Path, tmp_path: Path) -> None:
    """The pages of another folder are dropped, so that each try finds the store's in the page cache."""
    for shard in store.rglob("*.lmdb"):
        shard.read_bytes()
    with pytest.raises(NotColdError, match=r"`loader` read \d+ bytes from .* payload of \d+, expected at least 0.95"):
        cold_rate(run_of("loader", store, rows), tmp_path)


def test_a_run_counts_from_nineteen_twentieths_on() -> None:
    assert Read(seconds=1.0, payload_bytes=1000, read_bytes=950).counts
    assert not Read(seconds=1.0, payload_bytes=1000, read_bytes=949).counts


def test_the_same_seed_plans_the_same_distinct_rows(store: Path, rows: Path, tmp_path: Path) -> None:
    plan_rows(store, 4, 3, 7, tmp_path / "again.npz")
    with np.load(rows) as first, np.load(tmp_path / "again.npz") as second:
        assert first["row"].tolist() == second["row"].tolist()
        assert len(set(first["row"].tolist())) == 12
