"""A pack on a Ray cluster: its workers, its slices, and what is done if a worker is lost. Ray itself is in tests/e2e."""

from __future__ import annotations

from typing import Any

import pytest
import ray
from ray.exceptions import RayError

from bucketline.errors import RankError, UsageError
from bucketline.ingest.config import PackConfig, WantedWorkers
from bucketline.ingest.on_ray import MAX_ATTEMPTS, Attempt, RayWorkers, Workers, _Member, num_slices, workers_of
from bucketline.ingest.pipeline.slice_worker import PackedSlice


def config(**options: object) -> PackConfig:
    return PackConfig(source="images", place="s3://bucket/s", model="model", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("resources", "options", "expected"),
    [
        ({"CPU": 6.0}, {}, (1, 6, 1.0, 0.0)),
        ({"CPU": 64.0, "GPU": 8.0}, {}, (1, 8, 8.0, 1.0)),
        ({"CPU": 64.0, "GPU": 8.0}, {"device": "cpu"}, (1, 64, 1.0, 0.0)),
        ({"CPU": 64.0, "GPU": 8.0}, {"workers": "@0.5gpu"}, (1, 16, 4.0, 0.5)),
        ({"CPU": 4.0, "GPU": 8.0}, {}, (1, 4, 1.0, 1.0)),
        ({"CPU": 64.0, "GPU": 8.0}, {"workers": "@16cpu"}, (1, 4, 16.0, 1.0)),
        ({"CPU": 64.0, "GPU": 8.0}, {"workers": "2:5@1gpu,3cpu"}, (2, 5, 3.0, 1.0)),
        ({"CPU": 2.0}, {"workers": "3:9"}, (3, 9, 1.0, 0.0)),
        ({}, {}, (1, 1, 1.0, 0.0)),
    ],
)
def test_workers_follow_from_the_resources_and_the_options(
    resources: dict[str, float], options: dict[str, object], expected: tuple[int, int, float, float]
) -> None:
    found = workers_of(config(engine="ray", **options), resources)
    assert (found.least, found.most, found.cpus, found.gpus) == expected


def test_a_worker_says_what_it_takes() -> None:
    assert str(Workers(least=1, most=2, cpus=8.0, gpus=0.5)) == "8 CPU and 0.5 GPU each"


@pytest.mark.parametrize("workers", [1, 2, 16, 1000])
@pytest.mark.parametrize("items", [1, 7, 300, 5_000, 3_000_000])
def test_there_are_many_more_slices_than_workers_unless_images_are_few(items: int, workers: int) -> None:
    found = num_slices(items, workers)
    assert 1 <= found <= items
    assert found >= min(items, 8 * workers)
    assert items / found <= 8192


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> RayWorkers:
    pool = RayWorkers(config(), Workers(least=1, most=2, cpus=1.0, gpus=0.0), lambda: None)
    pool._members = [_Member(actor=None, call=None, name="pid 1")]
    monkeypatch.setattr(ray, "kill", lambda _: None)
    monkeypatch.setattr(pool, "_grow", lambda _: None)
    return pool


def test_the_largest_slice_comes_first_and_empty_ones_never(pool: RayWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    def answers() -> list[tuple[_Member, Any]]:
        (member,) = pool._members
        member.call = None
        return [(member, object.__new__(PackedSlice))]

    monkeypatch.setattr(pool, "_poll", answers)
    taken: list[Attempt] = []
    pool.pack([3, 0, 9, 4], lambda _, attempt: attempt, lambda attempt, _: taken.append(attempt))
    assert taken == [Attempt(number=n, attempt=0) for n in (2, 3, 0)]


def test_a_lost_slice_comes_next_as_another_attempt_until_it_was_lost_too_often(pool: RayWorkers) -> None:
    for number in range(MAX_ATTEMPTS - 1):
        pool._members = [_Member(actor=None, call=None, name="pid 1", attempt=Attempt(number=1, attempt=number))]
        pool._lose(pool._members[0], RayError("killed"))
        assert pool._members == []
        assert pool._waiting.pop() == Attempt(number=1, attempt=number + 1)
    pool._members = [_Member(actor=None, call=None, name="pid 1", attempt=Attempt(number=1, attempt=MAX_ATTEMPTS - 1))]
    with pytest.raises(RankError, match=r"slice 1 lost its worker 5 times, at last: killed"):
        pool._lose(pool._members[0], RayError("killed"))


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
