"""`docs/api.md` lists every public name, and every error with its base."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest

from bucketline import errors
from tests.commands import ROOT

PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
LISTED = re.findall(r"^::: (\S+)$", PAGE, re.MULTILINE)


def found_at(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("module", ["bucketline.loader", "bucketline.store", "bucketline.ray"])
def test_every_public_name_is_listed(module: str) -> None:
    public = importlib.import_module(module)
    listed = [found_at(path) for path in LISTED]
    assert [name for name in public.__all__ if not any(getattr(public, name) is one for one in listed)] == []


def test_nothing_else_is_listed() -> None:
    modules = [importlib.import_module(f"bucketline.{name}") for name in ("loader", "store", "ray")]
    public = [getattr(module, name) for module in modules for name in module.__all__]
    assert [path for path in LISTED if not any(found_at(path) is one for one in public)] == []
    assert len(set(LISTED)) == len(LISTED)


def test_every_error_is_listed_with_what_it_derives_from() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| .+ \|$", PAGE.partition("## Errors")[2], re.MULTILINE)
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.BucketlineError)]
    assert rows == [(kind.__name__, ", ".join(f"`{base.__name__}`" for base in kind.__bases__)) for kind in kinds]
