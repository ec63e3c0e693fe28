"""The number of workers in a cluster of given resources."""

from __future__ import annotations

import pytest

from bucketline.ingest.config import PackConfig
from bucketline.ingest.on_ray.cluster import Workers, workers_of


def of(resources: dict[str, float], **options: object) -> Workers:
    return workers_of(PackConfig(source="a", place="s3://b/s", model="m", engine="ray", **options), resources)  # type: ignore[arg-type]


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
    found = of(resources, **options)
    assert (found.least, found.most, found.cpus, found.gpus) == expected


def test_a_worker_says_what_it_takes() -> None:
    assert str(Workers(least=1, most=2, cpus=8.0, gpus=0.5)) == "8 CPU and 0.5 GPU each"
