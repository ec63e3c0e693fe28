"""Hostile or damaged files give an error of ours: never a crash, a hang, a read outside of a map or a huge allocation."""

from __future__ import annotations

import sys

import pytest

from tests.commands import spawn


@pytest.mark.parametrize(("form", "share"), [("images", 0.25), ("columns", 0.2)])
def test_files_that_lie_and_files_edited_at_random_are_refused_or_read_rightly_and_nothing_else(
    form: str, share: float
) -> None:
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.fault.hostile_files", "--form", form]
    ran = spawn([*command, "--share", share, "--edits", 100])
    assert ran.code == 0, ran.out + ran.err
    counts = {tuple(line.split()[:3]): int(line.split()[3]) for line in ran.out.splitlines()}
    assert counts["random", "verify", "refused"] == 100
    assert sum(counts.values()) > 2 * 400
    for kind in ("manifest", "extents", "index", "dropped", "blocks", "adopted"):
        assert counts[kind, "verify", "refused"] > 10
