"""One meaning for each name: no two modules define a class, or a public function or constant, of one name."""

from __future__ import annotations

import ast
from collections import defaultdict
from typing import TYPE_CHECKING

import pytest

from tests.commands import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDERS = ("bucketline", "store", "ingest", "loader", "train")
# Names that many modules have by the same rule.
ALLOWED = {
    "main": "a command, or a process of its own",
    "COMMANDS": "the commands of a command line",
    "log": "a module's logger",
    "T": "a type variable",
    "R": "a type variable",
    "IMPORTER": "what a module of `importers/formats` offers",
}


def names_of(source: str) -> Iterator[str]:
    """Yield the classes of a module, and its public functions, constants and type aliases."""
    for node in ast.parse(source).body:
        match node:
            case ast.ClassDef(name=name):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if not name.startswith("_"):
                yield name
            case ast.Assign(targets=targets):
                yield from (name for target in targets for name in _assigned(target))
            case ast.AnnAssign(target=target):
                yield from _assigned(target)


def _assigned(target: ast.expr) -> Iterator[str]:
    for node in ast.walk(target):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and not node.id.startswith("_"):
            yield node.id


def defined() -> dict[str, set[str]]:
    """Return the files that define each name."""
    found: dict[str, set[str]] = defaultdict(set)
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for name in names_of(path.read_text(encoding="utf-8")):
                found[name].add(str(path.relative_to(ROOT)))
    return found


def test_each_name_is_defined_by_one_module() -> None:
    several = {name: files for name, files in defined().items() if len(files) > 1 and name not in ALLOWED}
    lines = [f"{name}: {', '.join(sorted(files))}" for name, files in sorted(several.items())]
    assert not lines, "names with several meanings; rename all but one, or make them private:\n" + "\n".join(lines)


def test_every_allowed_name_is_defined_by_several_modules() -> None:
    found = defined()
    assert [name for name in ALLOWED if len(found[name]) < 2] == []


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("class A: ...\nclass _B: ...", ["A", "_B"]),
        ("def f(): ...\ndef _g(): ...\nasync def h(): ...", ["f", "h"]),
        ("A = B = 1\n_C = 2\nD: int = 3\nE, (F, _G) = 1, (2, 3)", ["A", "B", "D", "E", "F"]),
        ("A.b = 1\nc[0] = 2\nif True:\n    D = 1", []),
    ],
)
def test_definitions_are_found_at_the_top_of_a_module(source: str, names: list[str]) -> None:
    assert sorted(names_of(source)) == names
