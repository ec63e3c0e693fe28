"""Processes that the package starts import nothing from the current folder."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.commands import ROOT

PACKAGES = ("bucketline", "store", "ingest", "loader", "train", "bench")


def commands_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of each list in a file that begins with a Python interpreter."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.List) and node.elts:
            first = ast.unparse(node.elts[0])
            if "sys.executable" in first or (first.startswith("str(") and "python" in first):
                yield node.lineno, ", ".join(ast.unparse(element) for element in node.elts[:2])


def test_every_python_that_is_started_leaves_the_current_folder_out() -> None:
    found = [
        (f"{path.relative_to(ROOT)}:{line}", command)
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for line, command in commands_of(path)
    ]
    assert len(found) >= 12
    assert [place for place, command in found if "'-P'" not in command and "'-I'" not in command] == []
