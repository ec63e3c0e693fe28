"""The report of a run: the page says what is lost, the plots are of the results, the same results give the same files."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bucketline.bench.harness import Case, Mark, Result, Subject, alternate, rate, report, run_case, summarise
from bucketline.bench.report import losses, markdown, publish, read_document, with_run
from bucketline.errors import BucketlineError

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


# test report


def row(case: str, subject: str, median: float, **more: Any) -> dict[str, Any]:
    unit = "GB/s" if "delivered" in case else "s/GB"
    spread = {"q1": median * 0.9, "q3": median * 1.1, "repeats": 7, "limit_ratio": 0.5, "ratios": {}}
    return {"case": case, "subject": subject, "unit": unit, "median": median, **spread, "mark": None, "is_met": None, **more}


OURS, PEER = "bucketline, 1 thread", "LMDB in a DataLoader, 0 workers"
RESULTS = [
    row("peers, hot, delivered", "memcpy, 1 thread", 9.0),
    row("peers, hot, delivered", OURS, 7.0),
    row("peers, hot, delivered", PEER, 2.0),
    row("peers, hot, CPU", OURS, 0.5, mark="at most 1.3", is_met=False, limit_ratio=1.4),
    row("peers, hot, CPU", PEER, 0.4),
    row("open_cost", "open", 3.0, mark="at most 1.5", is_met=True),
]
REPORT_HEADER = {
    "cores": 2,
    "peers": {
        "environments": {"torch": {"torch": "2.13.0"}},
        "left_out": {"environment litdata": "pip ended with 1"},
        "capabilities": [{"question": "resumes", "loader": "LitData", "can": "no", "why": "there is no state"}],
    },
}


def test_a_missed_mark_and_a_peer_ahead_are_losses_and_a_limit_is_none() -> None:
    found = [(loss.case, loss.subject, loss.text) for loss in losses(RESULTS)]
    assert found == [
        ("peers, hot, CPU", OURS, "1.4 of its limit, target at most 1.3"),
        ("peers, hot, CPU", OURS, f"{PEER} has 0.4, we 0.5 s/GB"),
    ]


def test_the_page_says_what_is_lost_and_who_was_left_out(tmp_path: Path) -> None:
    written = publish({"header": REPORT_HEADER, "results": RESULTS}, tmp_path / "out")
    assert [path.name for path in written] == [
        "results.json",
        "RESULTS.md",
        *("peers-hot.png", "peers-hot.svg", "peers-hot-cpu.png", "peers-hot-cpu.svg"),
    ]
    page = (tmp_path / "out" / "RESULTS.md").read_text(encoding="utf-8")
    assert (
        page.index("## Where Bucketline loses")
        < page.index("LMDB in a DataLoader, 0 workers has 0.4")
        < page.index("## All figures")
    )
    assert "- environment litdata: pip ended with 1" in page
    assert "| peers, hot, CPU | bucketline, 1 thread | 1.4 | at most 1.3 | **missed** |" in page
    assert "- LitData, resumes: no: there is no state" in page
    assert "![peers-hot.png](peers-hot.png)" in page
    assert read_document(tmp_path / "out" / "results.json")["results"] == RESULTS


def test_the_same_results_give_the_same_files(tmp_path: Path) -> None:
    first, second = (publish({"header": REPORT_HEADER, "results": RESULTS}, tmp_path / name) for name in "ab")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_a_run_without_losses_says_so(tmp_path: Path) -> None:
    publish({"header": {}, "results": RESULTS[:3]}, tmp_path)
    assert "Nowhere in this run" in (tmp_path / "RESULTS.md").read_text(encoding="utf-8")


def test_a_case_that_is_run_again_replaces_its_own_results_and_says_at_which_commit() -> None:
    about = {"cores": 2, "commit": "old"}
    document: dict[str, Any] = {"header": about, "results": []}
    for name, cases in (("open_cost", ("open_cost",)), ("hot_gather", ("hot_gather",)), ("delivery", ("delivery", "cold"))):
        found = {"header": about, "results": [row(case, subject, 1.0) for case in cases for subject in ("a", "b")]}
        document = with_run(document, name, found, arguments=f"--of {name}", date="2026-01-01")
    assert document["header"]["runs"] == {name: {"date": "2026-01-01"} for name in ("open_cost", "hot_gather", "delivery")}
    new = {"header": {"cores": 2, "commit": "new", "peers": {}}, "results": [row("hot_gather", "c", 2.0)]}
    again = with_run(document, "hot_gather", new, arguments="--full", date="2026-02-02")
    assert [(one["case"], one["subject"]) for one in again["results"]] == [
        *(("open_cost", "a"), ("open_cost", "b"), ("hot_gather", "c")),
        *(("delivery", "a"), ("delivery", "b"), ("cold", "a"), ("cold", "b")),
    ]
    assert (again["header"]["commit"], again["header"]["peers"]) == ("old", {})
    assert again["header"]["runs"]["hot_gather"] == {"date": "2026-02-02", "commit": "new"}
    assert again["header"]["configuration"]["hot_gather"] == "--full"
    assert again["header"]["configuration"]["delivery"] == "--of delivery"
    page = markdown(again, [])
    assert "- date 2026-01-01: open_cost, delivery\n" in page
    assert "- date 2026-02-02, commit new: hot_gather\n" in page


def test_another_part_of_a_case_adds_to_what_is_known_of_the_peers() -> None:
    document: dict[str, Any] = {"header": {}, "results": []}
    for name, own in (("peers", {"gate": {"a": 1}, "capabilities": [1]}), ("peers --remote", {"gate": {"b": 2}})):
        document = with_run(document, name, {"header": {"peers": own}, "results": []}, arguments="", date="2026-01-01")
    assert document["header"]["peers"] == {"gate": {"a": 1, "b": 2}, "capabilities": [1]}
    again = {"header": {"peers": {"gate": {}}}, "results": []}
    assert with_run(document, "peers", again, arguments="", date="2026-01-01")["header"]["peers"] == {"gate": {}}


def test_what_is_no_document_of_results_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    for text in ("no json", json.dumps([1]), json.dumps({"results": 1})):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(BucketlineError, match=r"expected what `python -m bucketline\.bench --json` prints"):
            read_document(file)
