"""The slices of a source on a cluster: how many, in which order, and how often each is tried."""

from __future__ import annotations

import pytest

from bucketline.errors import RankError, UsageError
from bucketline.ingest.config import PackConfig, WantedWorkers
from bucketline.ingest.on_ray.slices import MAX_ATTEMPTS, Attempt, SliceTable, num_slices


def config(**options: object) -> PackConfig:
    return PackConfig(source="images", place="s3://bucket/s", model="model", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [1, 2, 16, 1000])
@pytest.mark.parametrize("items", [1, 7, 300, 5_000, 3_000_000])
def test_there_are_many_more_slices_than_workers_unless_images_are_few(items: int, workers: int) -> None:
    found = num_slices(items, workers)
    assert 1 <= found <= items
    assert found >= min(items, 8 * workers)
    assert items / found <= 8192


def test_the_largest_slice_comes_first_and_empty_ones_never() -> None:
    table = SliceTable([3, 0, 9, 4])
    assert table.num_left == 3
    assert [table.pop() for _ in range(4)] == [*(Attempt(number=n, attempt=0) for n in (2, 3, 0)), None]


def test_a_lost_slice_comes_next_as_another_attempt_until_it_was_lost_too_often() -> None:
    table = SliceTable([3, 4])
    attempt = table.pop()
    for number in range(1, MAX_ATTEMPTS):
        assert attempt is not None
        table.retry(attempt, "killed")
        attempt = table.pop()
        assert attempt == Attempt(number=1, attempt=number)
    assert table.num_left == 2
    with pytest.raises(RankError, match=r"slice 1 of 2 lost its worker 5 times, at last: killed; .*rerun the command"):
        table.retry(Attempt(number=1, attempt=MAX_ATTEMPTS - 1), "killed")


def test_finished_slices_are_counted() -> None:
    table = SliceTable([1, 1])
    table.finish()
    assert table.num_left == 1


@pytest.mark.parametrize("text", ["0", "3:2", "0:2", "two", "1:2:3", "", "-1", "@", "2@", "2@1", "2@gpu", "@1gpu,1gpu"])
def test_an_impossible_number_of_workers_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--workers is .*, expected .* 2:8"):
        WantedWorkers.parse(text, "--workers")


def test_workers_need_the_engine() -> None:
    with pytest.raises(UsageError, match="--workers 2: it is for --engine ray"):
        config(workers="2")


def test_what_ray_decides_is_refused() -> None:
    with pytest.raises(UsageError, match="--device cuda:1: Ray gives each worker GPUs of its own"):
        config(engine="ray", device="cuda:1")
    with pytest.raises(UsageError, match="--workers is '@-1gpu'"):
        config(engine="ray", workers="@-1gpu")
    with pytest.raises(UsageError, match="--engine is 'spark', expected ray"):
        config(engine="spark")
