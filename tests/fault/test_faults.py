"""Every family of faults: each trial ends with an error of ours, or goes through, or is continued by the next run.

A little of each with the other slow tests; `make torture` tries all of it and writes docs/faults.md.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.fault.conftest import RECORD
from tests.fault.families import run_family


@pytest.mark.timeout(0)  # a family has its own limit of time
@pytest.mark.usefixtures("in_time")
def test_a_family_of_faults_loses_nothing_and_hangs_nowhere(
    family: str, seed: int, pytestconfig: pytest.Config, record_property: Callable[[str, object], None]
) -> None:
    records = run_family(family, seed, is_quick=not pytestconfig.getoption("--long", default=False))
    for record in records:
        record_property(RECORD + family, record.as_json())
    assert not [f"{record.fault}: {said}" for record in records for said in record.said]
    assert any(record.trials or record.not_run for record in records[:-1])  # the last is of what was left outside
