"""Running every fault: records, table, page and options; a crash or a hang is an outcome."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from bucketline.errors import UsageError
from tests.commands import ROOT, call, spawn
from tests.fault import families
from tests.fault.apart import How, apart
from tests.fault.conftest import merged
from tests.fault.families import FAMILIES, Family, run_family
from tests.fault.ground import judged
from tests.fault.page import TEXT, shortfalls, write_page
from tests.fault.record import Kind, Outcome, Record, table


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
    monkeypatch.setitem(families.FAMILIES, "nothing", Family("no_such_module:f", 400))
    record, outside = run_family("nothing", 0, is_quick=True)
    assert outside.counts == {Outcome.COMPLETED: 1}
    assert record.counts == {Outcome.CRASH: 1}
    monkeypatch.setitem(families.FAMILIES, "packs", FAMILIES["packs"]._replace(limit_s=0.4))
    record, _ = run_family("packs", 0, is_quick=True)
    assert record.counts == {Outcome.HANG: 1}


def test_what_a_family_leaves_in_the_home_or_the_working_folder_is_a_file_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    def littering(*asked: Any, cwd: Path, **_: object) -> list[Record]:
        (cwd / "stray").touch()
        Path(asked[-1]["HOME"], "other").touch()
        return []

    monkeypatch.setattr(families, "records_of", littering)
    (record,) = run_family("packs", 0, is_quick=True)
    assert record.counts == {Outcome.OUTSIDE: 1}
    assert record.said == ["file outside: packs left home/other, here/stray"]


def test_every_family_names_a_function() -> None:
    for family in FAMILIES.values():
        module, _, name = family.function.partition(":")
        assert callable(getattr(import_module(f"tests.fault.{module}"), name))


def test_the_page_has_the_table_what_could_not_be_tried_and_what_was_found(tmp_path: Path) -> None:
    one = Record(fault="one", kind=Kind.DISK, counts=Counter({Outcome.CLEAN_ERROR: 3}))
    two = Record(fault="two", kind=Kind.DISK, not_run="no compiler")
    records = merged([("runs", two), ("packs", one), ("runs", one)])
    assert [record.fault for record in records] == ["one", "two"]
    write_page(tmp_path / "faults.md", records, seed=5, minutes=0, took_s=60)
    text = (tmp_path / "faults.md").read_text(encoding="utf-8")
    assert "| one | disk fault | 6 | 6 | 0 |" in text
    assert "| two | disk fault | not tried: no compiler |" in text
    assert "`make torture SEED=5`" in text
    assert [len(line) for line in table(records)] == [3 + len(Outcome)] * 4


FOUND = [(line.split(" | ")[0], line.split("`")[-2]) for line in TEXT.read_text(encoding="utf-8").splitlines() if "::" in line]


@pytest.mark.parametrize(("what", "test"), FOUND)
def test_what_was_found_is_held_by_a_test_that_exists(what: str, test: str) -> None:
    path, _, name = test.partition("::")
    assert what
    assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8")


def test_the_options_choose_rounds_and_the_page_wants_all_trials(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests/fault/test_faults.py",
        "-n",
        1,
        "-p",
        "no:cacheprovider",
        "-k",
        "threads",
    ]
    ran = spawn([*command, "--seed", 4, "--rounds", 2, "--page", page], PYTHONPATH=str(ROOT))
    assert ran.code == 1, ran.out + ran.err
    assert "2 passed" in ran.out
    assert "0 trials of the kind 'kill', expected 500 or more" in ran.out
    assert "| a writer that threads share, and forked children | other | 8 |" in page.read_text(encoding="utf-8")
    assert not [line for line in ran.out.splitlines() if "threads-6" in line]


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
