"""The help and version of every command: its help, at once and with an example, and its version."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import bucketline
from bucketline.ingest.importers.cache import IMPORTERS
from bucketline.options import command_help, options_of
from bucketline.store.export.exporter import EXPORTERS
from bucketline.train.optim import NAMED
from tests.commands import BIN, ROOT, call, spawn
from tests.devices import ASKED
from tests.every_command import COMMANDS_OF

PROGRAMS: dict[str, list[object]] = {
    **{name: [BIN / name] for name in ("ingest", "store", "loader", "bucketline")},
    "ingest pack": [BIN / "ingest", "pack"],
    "store export": [BIN / "store", "export"],
    "loader serve": [BIN / "loader", "serve"],
    "bucketline ingest pack": [BIN / "bucketline", "ingest", "pack"],
    "bucketline train": [BIN / "bucketline", "train"],
    "bucketline train report": [BIN / "bucketline", "train", "report"],
    "bucketline export-model": [BIN / "bucketline", "export-model"],
    "python -m bucketline.train": [sys.executable, "-m", "bucketline.train"],
    "train/main.py": [sys.executable, ROOT / "train" / "main.py"],
}
GROUPS = ("ingest", "store", "loader", "bucketline")
HEAVY = ("torch", "diffusers", "transformers", "accelerate", "datasets", "pyarrow", "matplotlib")


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_imports_nothing_heavy_and_shows_an_example(name: str) -> None:
    ran = spawn([*PROGRAMS[name], "--help"], PYTHONPROFILEIMPORTTIME="1")
    imported = re.findall(r"^import time:.*\| +(\w+)$", ran.err, re.MULTILINE)  # packages, not their modules
    assert "re" in imported, "the list is of imports"
    assert not set(HEAVY) & set(imported)
    assert ran.code == 0, ran.err
    assert name in GROUPS or "Example:" in ran.out
    assert re.sub(r"^import time:.*\n", "", ran.err, flags=re.MULTILINE) == ""


@pytest.mark.parametrize("name", COMMANDS_OF)
def test_the_first_screen_is_one_and_begins_with_what_is_required(name: str) -> None:
    command = COMMANDS_OF[name]
    lines = command_help(name, command).splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    required = [one.typed.split()[0] for one in options_of(command) if one.is_required]
    below = lines[lines.index("") :]
    shown = [line.split()[0] for line in below if line.startswith("  ") and line[2] != " "]
    assert shown[: len(required)] == required or not required
    assert any(line.startswith("Example: ") for line in lines)


@pytest.mark.parametrize("name", COMMANDS_OF)
def test_every_option_is_explained_once_in_full(name: str) -> None:
    command = COMMANDS_OF[name]
    options = options_of(command)
    assert not [one.field for one in options if not one.text], "each has a docstring"
    everything = command_help(name, command, "all").replace("|\n      ", "|").splitlines()
    assert max(map(len, command_help(name, command, "all").splitlines())) <= 80
    for one in options:
        assert sum(line == f"  {one.typed}" or line.startswith(f"  {one.typed} ") for line in everything) == 1
    assert {*getattr(command, "FIRST", ())} <= {one.field for one in options}
    if "--help all: the same in full" not in (first := command_help(name, command).splitlines()):
        sections = [line.split()[1] for line in first if line.startswith("  --help ")]
        assert {one.section for one in options if not one.is_required} <= {*sections}


def test_a_section_is_asked_for_by_its_name() -> None:
    shown = call("ingest", "pack", "--help", "ray").out
    assert "--engine ray[:ADDRESS]" in shown
    assert "--grid" not in shown
    assert shown == call("ingest", "pack", "--help=ray").out
    call("ingest", "pack", "--help", "rays").fails("--help rays: there is no such section, expected ", code=2)


@pytest.mark.parametrize("command", ["ingest", "store", "loader"])
def test_every_command_says_its_version(command: str) -> None:
    assert call(command, "version").out == f"{bucketline.__version__}\n"
    assert spawn([BIN / "bucketline", command, "version"]).out == f"{bucketline.__version__}\n"


def test_the_command_of_all_commands_refuses_what_it_does_not_know() -> None:
    ran = spawn([BIN / "bucketline", "cook"]).fails("there is no command 'cook'", "usage: bucketline", code=2)
    assert ran.out == ""


# Completion in shells: bash's own function, run by bash, as at a TAB.


FUNCTIONS = {"bucketline": "_bucketline", "ingest": "_ingest", "store": "_store", "loader": "_loader"}


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "bash"
    path.write_text(spawn([BIN / "bucketline", "completion", "bash"]).done().out, encoding="utf-8")
    return path


def completed(script: Path, *words: str) -> list[str]:
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
        (("bucketline", "train", "sd"), ["sd", "sd-lora", "sd3", "sd3-lora", "sdxl", "sdxl-lora"]),
        (("bucketline", "train", "presets", "flux"), ["flux", "flux-lora"]),
        (("bucketline", "train", "--optimizer", ""), [*NAMED]),
        (("bucketline", "train", "--lr-schedule", "co"), ["constant", "cosine"]),
        (("bucketline", "train", "--loss-weight", "min"), ["min-snr"]),
        (("ingest", "import", ""), [*IMPORTERS]),
        (("ingest", "pack", "--grid", "sd"), ["sd15", "sdxl"]),
        (("ingest", "pack", "--dtype", ""), ["fp16", "bf16", "fp32"]),
        (("store", "export", "a", "b", "--format", ""), [*EXPORTERS]),
        (("store", "info", "tests/un"), []),  # then bash completes paths
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


# Tests and torture run on the CPU, whatever the machine has, unless a GPU is requested.


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


# Processes that the package starts import nothing from the current folder.


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
