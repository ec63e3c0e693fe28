"""Completion in shells: bash's own function, run by bash, as at a TAB."""

from __future__ import annotations

import importlib
import re
import shlex
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.commands import BIN, spawn

if TYPE_CHECKING:
    from pathlib import Path

FUNCTIONS = {"bucketline": "_bucketline", "ingest": "_ingest", "store": "_store", "loader": "_loader"}


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "bash"
    path.write_text(spawn([BIN / "bucketline", "completion", "bash"]).done().out, encoding="utf-8")
    return path


def completed(script: Path, *words: str) -> list[str]:
    """Return what bash has in COMPREPLY after the script's function has run."""
    lines = f"""
        source {script}
        COMP_WORDS=({shlex.join(words)})
        COMP_CWORD={len(words) - 1}
        {FUNCTIONS[words[0]]}
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    ran = subprocess.run(["bash", "-c", lines], capture_output=True, text=True, check=True)
    assert ran.stderr == ""
    return list(filter(None, ran.stdout.splitlines()))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("bucketline", "ex"), ["export-model"]),
        (("bucketline", "loader", "p"), ["peek", "plan"]),
        (("loader", "plan", "--ru"), ["--run"]),
        (("bucketline", "train", "re"), ["report"]),
        (("bucketline", "train", "--precision", ""), ["auto", "fp32", "bf16", "fp8"]),
        (("bucketline", "completion", ""), ["bash", "zsh", "fish"]),
        (("store", "ver"), ["verify"]),
    ],
)
def test_bash_completes_commands_options_and_values(script: Path, words: tuple[str, ...], expected: list[str]) -> None:
    assert sorted(completed(script, *words)) == sorted(expected)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell_has_commands_and_options_and_is_one_that_it_reads(shell: str) -> None:
    script = spawn([BIN / "bucketline", "completion", shell]).done().out
    words = set(re.findall(r"[a-z0-9][a-z0-9-]*", script))
    assert {"export-model", "pack", "verify", "peek", "precision", "val-fraction", "fp32"} - words == set()
    if program := shutil.which(shell):
        checked = subprocess.run([program, "-n"], input=script, capture_output=True, text=True, check=False)
        assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize("package", ["bucketline.store", "bucketline.loader"])
def test_dir_has_every_public_name_before_it_is_used(package: str) -> None:
    code = f"import {package} as p, sys; print(*(set(p.__all__) - set(dir(p))), 'torch' in sys.modules, hasattr(p, '__file__'))"
    assert spawn([sys.executable, "-c", code]).out == "False True\n"
    assert {"__all__", "__file__"} <= {*dir(importlib.import_module(package))}
