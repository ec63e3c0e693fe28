"""The workers of a pack on a Ray cluster. Ray itself is in tests/e2e."""

from __future__ import annotations

import pytest

from bucketline.errors import UsageError
from bucketline.ingest.config import PackConfig, WantedWorkers
from bucketline.ingest.on_ray import workers_of


def config(**options: object) -> PackConfig:
    return PackConfig(source="images", place="s3://bucket/s", model="model", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("resources", "options", "expected"),
    [
        ({"CPU": 6.0}, {}, (6, 1.0, 0.0)),
        ({"CPU": 64.0, "GPU": 8.0}, {}, (8, 8.0, 1.0)),
        ({"CPU": 64.0, "GPU": 8.0}, {"device": "cpu"}, (64, 1.0, 0.0)),
        ({"CPU": 64.0, "GPU": 8.0}, {"workers": "@0.5gpu"}, (16, 4.0, 0.5)),
        ({"CPU": 4.0, "GPU": 8.0}, {}, (4, 1.0, 1.0)),
        ({"CPU": 64.0, "GPU": 8.0}, {"workers": "@16cpu"}, (4, 16.0, 1.0)),
        ({"CPU": 64.0, "GPU": 8.0}, {"workers": "5@1gpu,3cpu"}, (5, 3.0, 1.0)),
        ({"CPU": 2.0}, {"workers": "9"}, (9, 1.0, 0.0)),
        ({}, {}, (1, 1.0, 0.0)),
    ],
)
def test_workers_follow_from_the_resources_and_the_options(
    resources: dict[str, float], options: dict[str, object], expected: tuple[int, float, float]
) -> None:
    found = workers_of(config(engine="ray", **options), resources)
    assert (found.most, found.cpus, found.gpus) == expected


@pytest.mark.parametrize("text", ["0", "2:8", "two", "", "-1", "@", "2@", "2@1", "2@gpu", "@1gpu,1gpu"])
def test_an_impossible_number_of_workers_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--workers is .*, expected .* 8@1gpu,4cpu"):
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
