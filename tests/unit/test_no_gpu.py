"""Tests and torture run on the CPU, whatever the machine has, unless a GPU is requested."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.commands import ROOT, spawn
from tests.devices import ASKED

SEEN = "import os, tests.conftest; print(os.environ['CUDA_VISIBLE_DEVICES'])"


@pytest.mark.parametrize(("asked", "seen"), [("", ""), ("0", ""), ("1", "0,3")])
def test_the_tests_see_no_gpu_unless_one_is_asked_for(asked: str, seen: str) -> None:
    done = spawn([sys.executable, "-c", SEEN], CUDA_VISIBLE_DEVICES="0,3", **{ASKED: asked})
    assert (done.code, done.out) == (0, seen + "\n"), done.err


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
