"""The report of a run: the page says what is lost, the plots are of the results, the same results give the same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bucketline.bench.__main__ import CASES, RUNS
from bucketline.bench.report import losses, markdown, publish, read_document, with_run
from bucketline.errors import BucketlineError
from tests.commands import ROOT


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
HEADER = {
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
    written = publish({"header": HEADER, "results": RESULTS}, tmp_path / "out")
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
    first, second = (publish({"header": HEADER, "results": RESULTS}, tmp_path / name) for name in "ab")
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


def test_published_results_and_their_page_name_cases_that_there_are() -> None:
    folder = ROOT / "docs" / "benchmarks"
    document: dict[str, Any] = read_document(folder / "results.json")
    assert set(document["header"]["configuration"]) <= set(RUNS)
    assert {one["case"].partition(",")[0].split()[0] for one in document["results"]} <= set(CASES)
    page = (folder / "README.md").read_text(encoding="utf-8")
    assert [run for run in RUNS if f"`{run}`" not in page] == []


def test_what_is_no_document_of_results_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    for text in ("no json", json.dumps([1]), json.dumps({"results": 1})):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(BucketlineError, match=r"expected what `python -m bucketline\.bench --json` prints"):
            read_document(file)
