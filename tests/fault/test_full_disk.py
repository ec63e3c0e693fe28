"""On a disk that is full the writer says so, loses nothing that it committed, and continues once there is room."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from tests.commands import spawn

if TYPE_CHECKING:
    from pathlib import Path


def test_a_disk_that_is_full_at_any_moment_is_named_and_costs_nothing_that_was_committed(tmp_path: Path) -> None:
    ran = spawn([sys.executable, "-m", "tests.fault.full_disk", tmp_path])
    assert ran.code == 0, ran.out + ran.err
    kind, *lines = ran.out.splitlines()
    tries = [line.split("\t") for line in lines]
    stages = [stage for _, stage, _, _ in tries]
    assert {"begin", "write", "done"} <= set(stages)
    assert "seal" in stages or kind == "limit"
    assert {int(committed) for _, _, committed, _ in tries} >= {0, 8, 16, 24, 32, 40}
    for _, stage, _, said in tries[:-1]:
        assert stage != "done"
        assert "rerun" in said or "is the disk full?" in said
        assert kind == "limit" or "full" in said or "No space left" in said
