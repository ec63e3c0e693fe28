"""Running every fault: records, table, page and options; a crash or a hang is an outcome.

The parsers of files, on their fuzzer's seeds and on small changes of them.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bucketline.errors import UsageError
from bucketline.ingest.importers.cache import IMPORTERS
from tests.commands import ROOT, call, spawn
from tests.fault import families, fuzz
from tests.fault.apart import How, apart
from tests.fault.conftest import merged
from tests.fault.families import FAMILIES, run_family
from tests.fault.ground import fair
from tests.fault.parsers import PARSERS, inputs, mutated, read_cache
from tests.fault.record import Kind, Outcome, Record, Wrong, expect, shortfalls, write_page
from tests.process_memory import forget_highest, in_memory


def test_work_apart_is_done_refused_defect_dead_or_hung() -> None:
    def refuse() -> None:
        raise UsageError("no")

    assert apart(lambda: [1, "a"]).done() == [1, "a"]
    assert apart(refuse).fair() is Outcome.CLEAN_ERROR
    assert "ZeroDivisionError" in apart(lambda: 1 // 0).said
    died = apart(lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert (died.how, died.signal) == (How.DIED, signal.SIGTERM)
    hung = apart(lambda: time.sleep(60), limit_s=0.1)
    for ended, outcome in ((died, Outcome.CRASH), (hung, Outcome.HANG), (apart(lambda: 1 // 0), Outcome.DEFECT)):
        with pytest.raises(Wrong) as wrong:
            ended.fair()
        assert wrong.value.outcome is outcome
    with pytest.raises(Wrong):
        apart(refuse).done()


@pytest.mark.parametrize(
    ("ran", "outcome"),
    [
        ({"code": 0}, Outcome.COMPLETED),
        ({"code": 1, "err": "error: no"}, Outcome.CLEAN_ERROR),
        ({"code": 1, "out": '{"packed": 0}'}, Outcome.CLEAN_ERROR),
        ({"code": 1}, Outcome.DEFECT),
        ({"code": 2, "err": "error: no"}, Outcome.DEFECT),
        ({"code": 0, "err": "Traceback (most recent call last)"}, Outcome.DEFECT),
    ],
)
def test_a_command_is_judged_by_its_code_and_its_words(ran: dict[str, Any], outcome: Outcome) -> None:
    record = Record("f", Kind.OTHER)
    record.trial("one", lambda: fair(apart(lambda: {"out": "", "err": "", **ran})))
    assert record.counts == {outcome: 1}


def test_a_record_travels_as_json_and_counts_what_is_bad() -> None:
    record = Record("f", Kind.KILL, counts=Counter({Outcome.RECOVERED: 2}))
    record.trial(1, lambda: expect([], "one sample is missing"))  # type: ignore[arg-type,return-value]
    record.trial(2, lambda: 1 // 0)  # type: ignore[arg-type,return-value]
    assert record.counts == {Outcome.RECOVERED: 2, Outcome.LOST: 1, Outcome.DEFECT: 1}
    assert record.said[0] == "lost sample: 1: one sample is missing"
    again = Record.from_json(record.as_json())
    assert again == record
    again.merge(record)
    assert (again.trials, len(again.said)) == (8, 4)
    assert shortfalls([record])[0] == "4 trials of the kind 'kill', expected 500 or more"


def test_a_family_that_dies_or_hangs_is_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(families.FAMILIES, "nothing", ("no_such_module:f", 400, ""))
    record, outside = run_family("nothing", 0, is_quick=True)
    assert outside.counts == {Outcome.COMPLETED: 1}
    assert record.counts == {Outcome.CRASH: 1}
    monkeypatch.setitem(families.FAMILIES, "packs", (FAMILIES["packs"][0], 0.4, ""))
    record, _ = run_family("packs", 0, is_quick=True)
    assert record.counts == {Outcome.HANG: 1}


def test_what_a_family_leaves_in_the_home_or_the_working_folder_is_a_file_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    def littering(*asked: Any, cwd: Path, **_: object) -> list[Record]:
        (cwd / "stray").touch()
        Path(asked[-1]["HOME"], "other").touch()
        return []

    monkeypatch.setattr(families, "records_of", littering)
    (record,) = run_family("packs", 0, is_quick=True)
    assert record.said == ["file outside: packs left home/other, here/stray"]


def test_the_page_has_a_line_a_family_what_could_not_be_tried_and_what_went_wrong(tmp_path: Path) -> None:
    one = Record("one", Kind.DISK, counts=Counter({Outcome.CLEAN_ERROR: 3}))
    two = Record("two", Kind.DISK, not_run="no compiler")
    three = Record("three", Kind.KILL, counts=Counter({Outcome.RECOVERED: 1, Outcome.LOST: 1}), said=["lost sample: a.jpg"])
    records = merged([("runs", two), ("packs", one), ("runs", one), ("packs", three)])
    assert [(record.fault, record.family) for record in records] == [("one", "packs"), ("three", "packs"), ("two", "runs")]
    write_page(tmp_path / "faults.md", records, {"packs": "some", "runs": "more"}, seed=5, minutes=0, took_s=60)
    text = (tmp_path / "faults.md").read_text(encoding="utf-8")
    for words in (
        "| some | `packs-` | 2 | 8 | 6 | 1 | 0 | 1 |",
        "| more; not tried, two: no compiler | `runs-` | 1 | 0 |",
        "**8 trials of 3 faults. Bad: 1 lost sample, 0 wrong bytes,",
        "`make torture SEED=5`",
        "- three: lost sample: a.jpg",
    ):
        assert words in text, text


def test_the_options_choose_rounds_and_the_page_wants_all_trials(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    command = [sys.executable, "-m", "pytest", "tests/fault/test_faults.py", "-n", 1, "-p", "no:cacheprovider", "-k", "threads"]
    ran = spawn([*command, "--seed", 4, "--minutes", 5, "--page", page], PYTHONPATH=str(ROOT))
    assert ran.code == 1, ran.out + ran.err
    assert "2 passed" in ran.out
    assert "0 trials of the kind 'kill', expected 500 or more" in ran.out
    assert f"| {FAMILIES['threads'][2]} | `threads-` | 1 | 8 |" in page.read_text(encoding="utf-8")
    assert not [line for line in ran.out.splitlines() if "threads-6" in line]


def test_an_empty_source_is_refused_and_is_not_the_folder_one_stands_in(tmp_path: Path, model: Path) -> None:
    call("ingest", "pack", "", tmp_path / "s", "--model", model).fails("the source is empty", code=2)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("command", [("ingest", "scan", "--grid", "16x16"), ("store", "compact"), ("store", "info")])
def test_a_name_that_is_too_long_is_said_in_words(command: tuple[str, ...], tmp_path: Path) -> None:
    ran = call(*command[:2], tmp_path / ("x" * 300), *command[2:]).fails("File name too long")
    assert ran.err.startswith("error: ")


@pytest.mark.parametrize("parser", PARSERS)
def test_a_changed_file_is_read_or_is_an_error_of_ours(parser: str, tmp_path: Path) -> None:
    count, changed = 0, 100 if parser.startswith(fuzz.IMPORT) else 400
    forget_highest()
    peak = in_memory("VmRSS")
    for data in mutated(parser, changed, seed=5):
        PARSERS[parser](data, tmp_path)
        count += 1
    assert count == changed + len(inputs(parser))
    assert in_memory("VmHWM") - peak < 1 << 30


@pytest.mark.parametrize("kind", IMPORTERS)
def test_a_sound_cache_of_the_corpus_is_imported(kind: str, tmp_path: Path) -> None:
    (data,) = inputs(fuzz.IMPORT + kind)
    assert read_cache(kind, data, tmp_path) == 2


def test_every_parser_is_fuzzed_and_its_seeds_are_small() -> None:
    assert sorted(PARSERS) == sorted(fuzz.PARSERS)
    assert all(1 <= len(inputs(parser)) <= 40 for parser in PARSERS)
    assert sum(len(data) for parser in PARSERS for data in inputs(parser)) < 1 << 18
