"""Modules that tests name in strings exist: to be imported in a forked process, or to have something replaced.

Such a string outlives the module. If only a slow test uses it, nothing quick says so.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.commands import ROOT

NAMED = re.compile(r"bucketline(\.\w+)+")
UNREAD = Path("tests/unit/test_named_modules.py")
NOT_THERE_ON_PURPOSE = {"bucketline.no_such", "bucketline.numbers"}


def is_there(name: str) -> bool:
    """Return whether a name leads to a folder or module of ours, and to a word of that module's text if more parts follow."""
    parts = name.split(".")[1:]
    for root in (ROOT, ROOT / "bucketline"):
        for count in range(len(parts), 0, -1):
            path = root.joinpath(*parts[:count])
            if path.with_suffix(".py").is_file():
                text = path.with_suffix(".py").read_text(encoding="utf-8")
                return all(re.search(rf"\b{part}\b", text) for part in parts[count : count + 1])
            if path.is_dir() and count == len(parts):
                return True
    return False


def test_modules_named_in_strings_exist() -> None:
    missing = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.value}"
        for folder in ("tests", "bench", "examples", "demo")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path.relative_to(ROOT) != UNREAD
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if NAMED.fullmatch(node.value) and node.value not in NOT_THERE_ON_PURPOSE
        if not is_there(node.value)
    ]
    assert not missing, missing


def test_a_module_that_is_gone_is_seen() -> None:
    assert is_there("bucketline.store.write.seal._write_anew")
    assert is_there("bucketline.ingest.parallel")
    assert not is_there("bucketline.ingest.parallel.connections")
    assert not is_there("bucketline.store.write.seal.no_such_name")
