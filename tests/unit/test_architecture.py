"""The walks in docs/ARCHITECTURE.md name files, classes and functions that are there."""

from __future__ import annotations

import ast
import re
from functools import cache
from typing import TYPE_CHECKING

from tests.commands import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = ROOT / "docs" / "ARCHITECTURE.md"
NAME = re.compile(r"[A-Za-z_]\w*(\.\w+)?")
STORED = re.compile(r".*\.(json|lmdb)")  # files of a store


@cache
def defined_in(file: str) -> frozenset[str]:
    """Return the names that a file of ours defines: `function`, `Class`, `Class.method`, `CONSTANT`."""
    return frozenset(_defined(ast.parse((ROOT / file).read_text(encoding="utf-8")), ""))


def _defined(tree: ast.Module | ast.ClassDef, prefix: str) -> Iterator[str]:
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield prefix + name
                if isinstance(node, ast.ClassDef):
                    yield from _defined(node, f"{name}.")
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                yield prefix + name


def missing(page: str) -> list[str]:
    """Return what a page names in backticks that is not there: files, folders, names that no file of their section defines."""
    lost = []
    for section in re.split(r"^(?=## )", page, flags=re.MULTILINE):
        named = [" ".join(one.split()) for one in re.findall(r"`([^`]+)`", section)]
        files = [one for one in named if one.endswith(".py")]
        lost += [file for file in files if not (ROOT / file).is_file()]
        there = [file for file in files if (ROOT / file).is_file()]
        for one in named:
            if one.startswith("bucketline."):  # a group of entry points
                if not any(one in (ROOT / file).read_text(encoding="utf-8") for file in there):
                    lost.append(one)
            elif one not in files and NAME.fullmatch(one) and not STORED.fullmatch(one):
                is_known = any(one in defined_in(file) for file in there) or (ROOT / one).is_dir()
                lost += [] if is_known else [one]
    return lost


def test_every_file_and_name_of_the_walks_is_there() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page.count(".py`") > 50
    assert missing(page) == []


def test_what_is_not_there_is_found() -> None:
    page = "`store/folder.py` `Folder.create` and `store` make `manifest.json`.\n\n`Folder.gone`, `commit`\n"
    assert missing(page) == ["Folder.gone", "commit"]
    assert missing(f"{page}## Next\n`Folder`, `store/no_such.py`") == ["Folder.gone", "commit", "store/no_such.py", "Folder"]
    assert missing("`store/folder.py` has no `bucketline.importers`.")[0].endswith(".importers")
