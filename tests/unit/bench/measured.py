"""A case run in this process, its results held to what every result must be."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bucketline.bench.harness import Case, run_case

FIELDS = {"case", "subject", "unit", "median", "q1", "q3", "repeats", "limit_ratio", "ratios", "mark", "is_met"}


def measured(case: type[Case], capsys: pytest.CaptureFixture[str], *args: object) -> dict[str, dict[str, Any]]:
    """Run a case in this process; return its results, each held to what every result must be.

    They are by subject, with `, FIGURE` after it unless the figure is that of the case itself.
    """
    code = run_case(case, [*map(str, args), "--json"])
    out = capsys.readouterr()
    assert code == 0, out.err
    found = json.loads(out.out)
    for result in found["results"]:
        assert set(result) == FIELDS
        assert result["q1"] <= result["median"] <= result["q3"]
        assert result["repeats"] >= 1
        # a part of the disk's bytes may be none, and so may be a tiny store's share of the ranks' memory, and late graphs
        assert result["limit_ratio"] > 0 or result["unit"] in ("of payload", "MB", "graphs")
        assert all(ratio > 0 for ratio in result["ratios"].values())
        assert (result["mark"] is None) == (result["is_met"] is None)
    cases = [result["case"] for result in found["results"]]
    assert all(case == cases[0] or case.startswith(f"{cases[0]}, ") for case in cases)
    by_name = {result["subject"] + result["case"].removeprefix(cases[0]): result for result in found["results"]}
    assert len(by_name) == len(cases)
    return by_name


def read_results(capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    found = json.loads(capsys.readouterr().out)
    return found["header"], found["results"]
