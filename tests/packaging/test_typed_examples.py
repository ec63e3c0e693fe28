"""mypy sees the types of the package through an editable install and from a wheel; `make test-types` has pyright do so too."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.commands import ROOT, spawn

pytestmark = pytest.mark.slow


def test_a_batch_has_its_type_through_both_installs(tmp_path: Path) -> None:
    ran = spawn([sys.executable, ROOT / "tests/packaging/typed_examples.py", "--mypy-only", "--out", tmp_path / "types"]).done()
    assert [line.partition(";")[0] for line in ran.out.splitlines()] == ["mypy, editable install: right", "mypy, wheel: right"]
