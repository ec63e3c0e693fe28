"""A little of each family of changes at URLs, and of writers that threads share."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from tests.commands import spawn

if TYPE_CHECKING:
    from pathlib import Path

# in a process of its own: it forks others, which cannot use a client of object storage that another test has used before
_FAMILY = """
import sys
from pathlib import Path
from tests.fault import changed_at_urls
from tests.fault.record import Asked
records = list(getattr(changed_at_urls, sys.argv[1])(Asked(seed=1, is_quick=True, folder=Path(sys.argv[2]))))
for record in records:
    print(record.trials, record.said)
"""


@pytest.mark.parametrize("family", ["names_used_again", "killed_pushes", "wrong_clocks", "threads"])
def test_nothing_that_is_listed_is_missing_or_other_than_it_was(family: str, tmp_path: Path) -> None:
    ran = spawn([sys.executable, "-c", _FAMILY, family, tmp_path])
    assert ran.code == 0, ran.err
    said = [line.partition(" ") for line in ran.out.splitlines()]
    assert said
    for trials, _, wrong in said:
        assert int(trials) > 0
        assert wrong == "[]"
