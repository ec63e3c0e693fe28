"""Small inputs of public bug reports about other tools: each script makes its own, runs the commands, ends with OK or FAIL."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.commands import BIN, ROOT

pytestmark = pytest.mark.slow
CASES = sorted((Path(__file__).parent / "cases").glob("[0-9]*.sh"))


def test_the_cases_are_there() -> None:
    assert [path.name.partition("-")[0] for path in CASES] == ["01", "02", "05", "14", "15", "21", "28"]


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.stem)
def test_a_case_ends_with_ok(case: Path) -> None:
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}
    ran = subprocess.run(
        ["bash", case],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout.splitlines()[-1:]) == (0, ["OK"]), ran.stdout
