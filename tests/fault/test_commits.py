"""Writers that commit to one store at once lose nothing, on a disk and in object storage."""

from __future__ import annotations

import sys

import pytest

from tests.commands import ROOT, spawn


@pytest.mark.parametrize("place", ["disk", "s3"])
def test_writers_that_commit_at_once_lose_nothing_and_each_commit_is_a_generation(place: str) -> None:
    asked = ["--writers", 6, "--commits", 3, "--place", place]
    found = spawn([sys.executable, "-m", "tests.fault.commits", *asked], PYTHONPATH=str(ROOT)).json
    assert (found["lost"], found["generations"]) == (0, 18)
    assert found["retries"] <= (180 if place == "s3" else 0)
