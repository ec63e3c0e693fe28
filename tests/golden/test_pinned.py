"""The golden results that hold on any machine, and the comparison itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import ROOT
from tests.golden.differences import differences
from tests.golden.trained import EVERY_FORM

GROUPS = [EVERY_FORM[n::2] for n in range(2)]
PARTS = [
    pytest.param(("meant", "planned", "packed"), (), id="command lines, orders and stores"),
    *(pytest.param(("trained",), forms, id=f"runs of {forms[0]} and others") for forms in GROUPS),
]


@pytest.mark.slow
@pytest.mark.parametrize(("parts", "forms"), PARTS)
def test_results_are_those_that_are_pinned(parts: tuple[str, ...], forms: tuple[str, ...], tmp_path: Path) -> None:
    """In a process of its own, from which each command is forked."""
    chosen = ("--only", *parts, *(("--forms", *forms) if forms else ()))
    command = [sys.executable, "-m", "tests.golden", str(tmp_path / "found.json"), "--pinned", *chosen]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


def test_differences_are_named_by_their_place() -> None:
    first = {"a": [1, 2.0, {"b": "x"}], "c": 1.0}
    assert not [*differences(first, {"a": [1, 2.0, {"b": "x"}], "c": 1.0})]
    second = {"a": [1, 2.00001, {"b": "y"}], "d": None}
    assert [*differences(first, second)] == [
        "a[1]: 2.0 != 2.00001",
        "a[2] / b: 'x' != 'y'",
        "c: only in the first",
        "d: only in the second",
    ]
    assert [*differences(first, second, rel=1e-4)] == ["a[2] / b: 'x' != 'y'", "c: only in the first", "d: only in the second"]
    assert [*differences([1], [1, 2])] == [": [1] != [1, 2]"]
