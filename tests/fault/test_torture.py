"""The command that runs every fault: its records, its table, its page, and that a crash or a hang is an outcome."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest

from bucketline.errors import UsageError
from tests.commands import ROOT, call, spawn
from tests.fault import report, torture
from tests.fault.apart import How, apart
from tests.fault.found import FOUND
from tests.fault.ground import judged
from tests.fault.record import Kind, Outcome, Record, table
from tests.fault.torture import FAMILIES, Family, run_family, shortfalls


def test_work_apart_is_done_refused_defect_dead_or_hung() -> None:
    def refuse() -> None:
        raise UsageError("no")

    assert apart(lambda: [1, "a"]).gave == [1, "a"]
    assert apart(refuse).how is How.REFUSED
    assert "ZeroDivisionError" in apart(lambda: 1 // 0).said
    died = apart(lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert (died.how, died.signal) == (How.DIED, signal.SIGTERM)
    assert apart(lambda: time.sleep(60), limit_s=0.1).how is How.HUNG
    assert judged(apart(lambda: 1 // 0))[0] is Outcome.DEFECT


def test_a_record_travels_as_json_and_counts_what_is_bad() -> None:
    record = Record(fault="f", kind=Kind.KILL, counts=Counter({Outcome.RECOVERED: 2}))
    record.add(Outcome.LOST, "one")
    again = Record.from_json(record.as_json())
    assert again == record
    again.merge(record)
    assert (again.trials, again.bad, again.said) == (6, 2, ["lost sample: one", "lost sample: one"])
    assert shortfalls([record])[0] == "3 trials of the kind 'kill', expected 500 or more"


def test_a_family_that_dies_or_hangs_is_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(torture.FAMILIES, "nothing", Family(module="no_such_module", function="f", limit_s=400))
    record, outside = run_family("nothing", 0, is_quick=True)
    assert outside.counts == {Outcome.COMPLETED: 1}
    assert record.counts == {Outcome.CRASH: 1}
    monkeypatch.setitem(torture.FAMILIES, "packs", Family(module="known", function="killed_packs", limit_s=0.4))
    record, _ = run_family("packs", 0, is_quick=True)
    assert record.counts == {Outcome.HANG: 1}


def test_what_a_family_leaves_in_the_home_or_the_working_folder_is_a_file_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    def littering(here: Path, environment: dict[str, str], *_: object) -> list[Record]:
        (here / "stray").touch()
        Path(environment["HOME"], "other").touch()
        return []

    monkeypatch.setattr(torture, "_run_in", littering)
    (record,) = run_family("packs", 0, is_quick=True)
    assert record.counts == {Outcome.OUTSIDE: 1}
    assert record.said == ["file outside: packs left home/other, here/stray"]


def test_every_family_names_a_function() -> None:
    for family in FAMILIES.values():
        assert callable(getattr(import_module(f"tests.fault.{family.module}"), family.function))


def test_the_page_has_the_table_what_could_not_be_tried_and_what_was_found(tmp_path: Path) -> None:
    records = [
        Record(fault="one", kind=Kind.DISK, counts=Counter({Outcome.CLEAN_ERROR: 3})),
        Record(fault="two", kind=Kind.DISK, not_run="no compiler"),
    ]
    report.write_report(tmp_path / "faults.md", records, seed=5, minutes=0, took_s=60)
    text = (tmp_path / "faults.md").read_text(encoding="utf-8")
    assert "| one | disk fault | 3 | 3 | 0 |" in text
    assert "| two | disk fault | not tried: no compiler |" in text
    assert "`make torture SEED=5`" in text
    assert [len(line) for line in table(records)] == [3 + len(Outcome)] * 4


@pytest.mark.parametrize(("what", "test"), FOUND)
def test_what_was_found_is_held_by_a_test_that_exists(what: str, test: str) -> None:
    path, _, name = test.partition("::")
    assert what
    assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8")


def test_one_family_alone_prints_its_table_and_writes_no_page() -> None:
    before = (ROOT / "docs" / "faults.md").read_bytes() if (ROOT / "docs" / "faults.md").exists() else b""
    ran = spawn([sys.executable, "-m", "tests.fault.torture", "--quick", "--only", "trainer", "--seed", 4])
    assert ran.code == 0, ran.out + ran.err
    assert "trainer ended by SIGKILL" in ran.out
    after = (ROOT / "docs" / "faults.md").read_bytes() if (ROOT / "docs" / "faults.md").exists() else b""
    assert before == after


def test_an_empty_source_is_refused_and_is_not_the_folder_one_stands_in(tmp_path: Path, model: Path) -> None:
    ran = call("ingest", "pack", "", tmp_path / "s", "--model", model)
    assert (ran.code, "the source is empty" in ran.err) == (2, True)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("command", [("ingest", "scan"), ("store", "compact"), ("store", "info")])
def test_a_name_that_is_too_long_is_said_in_words(command: tuple[str, str], tmp_path: Path) -> None:
    more = ("--grid", "16x16") if command[0] == "ingest" else ()
    ran = call(*command, tmp_path / ("x" * 300), *more)
    assert ran.code == 1
    assert ran.err.startswith("error: ")
    assert "File name too long" in ran.err
