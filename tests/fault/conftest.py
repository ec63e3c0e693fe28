"""Options of the families of faults, and the table and the page of what came of them. `test_faults.py` tries them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.fault.families import FAMILIES, OUTSIDE
from tests.fault.record import Record, shortfalls, table, write_page

RECORD = "record of "  # and the family: a property of a test's report
ROUND_MINUTES = 5  # no machine tries everything in less
BEGUN = time.monotonic()
FOUND: list[tuple[str, Record]] = []  # by family


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("faults")
    group.addoption("--long", action="store_true", help="try every fault as often as the page needs; else a little of each")
    group.addoption("--seed", type=int, default=1, help="seed of the first round of faults")
    group.addoption("--minutes", type=float, default=0.0, help="begin new rounds, each with the next seed, for so many minutes")
    group.addoption("--page", type=Path, help="write what came of every fault there, and fail if too few were tried")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "family" in metafunc.fixturenames:
        option = metafunc.config.getoption
        first, rounds = option("--seed", 1), 1 + int(option("--minutes", 0.0) / ROUND_MINUTES)
        cases = [(name, first + number) for number in range(rounds) for name in FAMILIES]
        metafunc.parametrize(("family", "seed"), cases, ids=[f"{name}-{seed}" for name, seed in cases])


@pytest.fixture
def in_time(seed: int, pytestconfig: pytest.Config) -> None:
    """Begin no round but the first once the minutes have passed."""
    minutes = pytestconfig.getoption("--minutes", 0.0)
    if seed > pytestconfig.getoption("--seed", 1) and time.monotonic() - BEGUN > 60 * minutes:
        pytest.skip(f"{minutes:g} minutes have passed")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep a family's records; another process may have tried it."""
    if report.when == "call":
        properties: list[tuple[str, Any]] = report.user_properties
        named = [(name.removeprefix(RECORD), value) for name, value in properties if name.startswith(RECORD)]
        FOUND.extend((name, Record.from_json(value)) for name, value in named)


def merged(found: Iterable[tuple[str, Record]]) -> list[Record]:
    """Return one record of every fault, in the order of the families; that of all of them last."""
    by_fault: dict[str, Record] = {}
    names = list(FAMILIES)
    for name, record in sorted(found, key=lambda pair: names.index(pair[0])):
        own = "" if record.fault == OUTSIDE else name
        by_fault.setdefault(record.fault, Record(record.fault, record.kind, family=own)).merge(record)
    return sorted(by_fault.values(), key=lambda record: not record.family)


def pytest_sessionfinish(session: pytest.Session) -> None:
    option, records = session.config.getoption, merged(FOUND)
    if FOUND and (path := option("--page", None)) is not None and not hasattr(session.config, "workerinput"):
        of = {name: tries for name, (_, _, tries) in FAMILIES.items()}
        write_page(path, records, of, seed=option("--seed"), minutes=option("--minutes"), took_s=time.monotonic() - BEGUN)
        if shortfalls(records) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if records := merged(FOUND):
        terminalreporter.section("faults")
        for line in table(records):
            terminalreporter.line(line)
        for missing in shortfalls(records) if config.getoption("--page", None) else ():
            terminalreporter.line(missing)
