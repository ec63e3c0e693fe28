from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from bucketline.bench.harness import Case, Mark, Result, Subject, alternate, header, rate, report, run_case, summarise

HEADER = {"bucketline", "torch", "python", "numpy", "lmdb", "machine", "cpu", "cores", "kernel"}


def told(values: list[float]) -> Callable[[int], float]:
    return lambda number: values[number]


def test_every_subject_is_measured_once_a_round_and_the_first_round_is_not_counted() -> None:
    seen: list[tuple[int, str]] = []

    def noted(name: str) -> Callable[[int], float]:
        def measure(number: int) -> float:
            seen.append((number, name))
            return float(number)

        return measure

    figures = alternate([Subject(name=name, measure=noted(name)) for name in "abc"], 4)
    assert figures == {name: [1.0, 2.0, 3.0, 4.0] for name in "abc"}
    rounds = [seen[at : at + 3] for at in range(0, len(seen), 3)]
    assert [sorted(own) for own in rounds] == [[(number, name) for name in "abc"] for number in range(5)]
    assert len({tuple(name for _, name in own) for own in rounds}) > 1, "the order never changed"


def test_a_ratio_is_the_median_of_each_rounds_own() -> None:
    limit = Subject(name="limit", measure=told([9.0, 1.0, 10.0, 100.0]))
    ours = Subject(name="ours", measure=told([9.0, 0.9, 5.0, 95.0]), limit="limit", beside=("limit",), mark=Mark(bound=0.9))
    first, second = summarise("case", "GB/s", [limit, ours], alternate([limit, ours], 3))
    assert (first.median, first.limit_ratio, first.is_met) == (10.0, 1.0, None)
    assert (second.median, second.q1, second.q3, second.repeats) == (5.0, 2.95, 50.0, 3)
    assert second.limit_ratio == statistics.median([0.9, 0.5, 0.95])
    assert second.ratios == {"limit": 0.9}
    assert second.is_met is True


def test_a_mark_is_a_bound_from_above_or_below() -> None:
    assert Mark(bound=0.9).is_met_by(0.9)
    assert not Mark(bound=0.9).is_met_by(0.899)
    assert Mark(bound=1.01, is_at_most=True).is_met_by(1.01)
    assert not Mark(bound=1.01, is_at_most=True).is_met_by(1.0101)
    assert (str(Mark(bound=0.9)), str(Mark(bound=1.5, is_at_most=True))) == ("at least 0.9", "at most 1.5")


def test_a_rate_is_the_bytes_over_the_time_that_they_took() -> None:
    assert rate(lambda: 10**15)(0) > 0


def test_the_header_names_versions_and_the_machine() -> None:
    about = header()
    assert set(about) - {"commit"} == HEADER
    assert all(about.values())


def result(**changes: object) -> Result:
    values = {
        "case": "c",
        "subject": "s",
        "unit": "GB/s",
        "median": 2.0,
        "q1": 1.0,
        "q3": 3.0,
        "repeats": 7,
        "limit_ratio": 0.5,
    }
    return Result(**{**values, **changes})  # type: ignore[arg-type]


def test_the_table_says_whether_a_mark_is_met(capsys: pytest.CaptureFixture[str]) -> None:
    report([result(mark=Mark(bound=0.9)), result(subject="t", mark=Mark(bound=0.1), ratios={"u": 2.0})], as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert "0.5 of limit [at least 0.9: MISSED]" in lines[-2]
    assert "[at least 0.1: met], 2 of u" in lines[-1]


def test_the_object_has_a_header_and_results(capsys: pytest.CaptureFixture[str]) -> None:
    report([result()], as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"header", "results"}
    assert found["results"][0] == {
        "case": "c",
        "subject": "s",
        "unit": "GB/s",
        "median": 2.0,
        "q1": 1.0,
        "q3": 3.0,
        "repeats": 7,
        "limit_ratio": 0.5,
        "ratios": {},
        "mark": None,
        "is_met": None,
    }


@dataclass(frozen=True, kw_only=True)
class Noted(Case):
    """A case that notes where its stores would go.

    Example: none
    """

    sizes: tuple[int, ...] = (1, 2)
    """Sizes."""

    def measure(self, folder: Path) -> list[Result]:
        (folder / "made").touch()
        return [result(subject=str(folder))]


def test_a_case_refuses_a_number_below_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_case(Noted, ["--repeats", "0"]) == 2
    assert "--repeats is 0, expected 1 or more" in capsys.readouterr().err
    assert run_case(Noted, ["--sizes", "3", "-1"]) == 2


def test_stores_are_kept_where_a_folder_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_case(Noted, ["--json", "--stores", str(tmp_path / "kept")]) == 0
    assert (tmp_path / "kept" / "made").exists()
    capsys.readouterr()
    assert run_case(Noted, ["--json"]) == 0
    assert not Path(json.loads(capsys.readouterr().out)["results"][0]["subject"]).exists()
