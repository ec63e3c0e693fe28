"""Tests and torture run on the CPU, whatever the machine has, unless a GPU is requested."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.commands import ROOT, spawn
from tests.devices import ASKED, without_gpus
from tests.fault import families
from tests.fault.families import run_family
from tests.fault.record import Record

SEEN = "import os, tests.conftest; print(os.environ['CUDA_VISIBLE_DEVICES'])"


@pytest.mark.parametrize(("asked", "seen"), [("", ""), ("0", ""), ("1", "0,3")])
def test_the_tests_see_no_gpu_unless_one_is_asked_for(asked: str, seen: str) -> None:
    done = spawn([sys.executable, "-c", SEEN], CUDA_VISIBLE_DEVICES="0,3", **{ASKED: asked})
    assert (done.code, done.out) == (0, seen + "\n"), done.err


def test_a_family_of_faults_sees_none_either(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, str] = {}

    def noting(*asked: Any, **_: object) -> list[Record]:
        found.update(asked[-1])
        return []

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.delenv(ASKED, raising=False)
    monkeypatch.setattr(families, "records_of", noting)
    run_family("packs", 0, is_quick=True)
    assert found["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize(("asked", "seen"), [("", ""), ("1", "0,3")])
def test_the_demo_sees_none_unless_one_is_asked_for(tmp_path: Path, asked: str, seen: str) -> None:
    python = tmp_path / "bin" / "python"  # the first program that the demo starts
    python.parent.mkdir()
    python.write_text('#!/bin/sh\necho "devices=$CUDA_VISIBLE_DEVICES"\nexit 3\n', encoding="utf-8")
    python.chmod(0o755)
    done = spawn(
        ["bash", "demo/run", tmp_path / "out"],
        BIN=os.path.relpath(python.parent, ROOT),
        CUDA_VISIBLE_DEVICES="0,3",
        **{ASKED: asked},
    )
    assert (done.code, done.out.splitlines()[-1]) == (3, f"devices={seen}")


def test_what_a_test_starts_sees_none() -> None:
    program = "import json, os; print(json.dumps(os.environ.get('CUDA_VISIBLE_DEVICES')))"
    seen = json.loads(spawn([sys.executable, "-c", program]).out)
    assert seen == without_gpus(os.environ).get("CUDA_VISIBLE_DEVICES", seen)
