"""Completion in shells: bash's own function, run by bash, as at a TAB."""

from __future__ import annotations

import importlib
import shlex
import shutil
import subprocess
import sys

import pytest

from bucketline.completion import candidates
from bucketline.help_screen import options_of
from bucketline.loader.cli import COMMANDS as LOADER
from bucketline.store.cli import COMMANDS as STORE
from bucketline.train.config import TrainConfig
from tests.commands import BIN, spawn


def completed(*words: str) -> list[str]:
    """Return what bash has in COMPREPLY after the function that `bucketline completion bash` defines has run."""
    script = f"""
        eval "$(bucketline completion bash)"
        COMP_WORDS=({shlex.join(words)})
        COMP_CWORD={len(words) - 1}
        _bucketline
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    environment = {"PATH": f"{BIN}:/usr/bin:/bin"}
    ran = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert ran.stderr == ""
    return list(filter(None, ran.stdout.splitlines()))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("bucketline", "ex"), ["export-model"]),
        (("bucketline", "loader", "p"), ["plan", "peek"]),
        (("bucketline", "loader", "plan", "--ru"), ["--run"]),
        (("bucketline", "train", "re"), ["report"]),
        (("bucketline", "train", "--precision", "="), ["auto", "fp32", "bf16", "fp8"]),  # `--precision=`, as bash splits it
        (("loader", "serve", "photos"), []),  # a file's name
    ],
)
def test_bash_completes_commands_options_and_values(words: tuple[str, ...], expected: list[str]) -> None:
    assert completed(*words) == expected


def test_bash_is_told_for_each_program_with_file_names_where_there_is_nothing_else() -> None:
    ran = spawn(
        ["bash", "-c", f'export PATH="{BIN}:$PATH"; eval "$(bucketline completion bash)"; complete -p loader bucketline']
    )
    assert ran.out.splitlines() == [f"complete -o default -F _bucketline {name}" for name in ("loader", "bucketline")]


def test_every_command_and_option_is_completed() -> None:
    for program, commands in (("store", STORE), ("loader", LOADER)):
        assert [word for word, _ in candidates([program, ""])] == [*commands, "version", "--help"]
        for name in commands:
            found = {word for word, _ in candidates(["bucketline", program, name, "-"])}
            assert found == {word for one in options_of(commands[name]) for word in one.words} | {"--help"}
    found = {word for word, _ in candidates(["bucketline", "train", "--"])}
    assert found == {word for one in options_of(TrainConfig) for word in one.words} | {"--help"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["bucketline", "train", "--precision=b"], ["--precision=bf16"]),
        (["bucketline", "train", "--precision", "=", "b"], ["bf16"]),
        (["/usr/bin/store", "ver"], ["verify", "version"]),
        (["bucketline", "completion", ""], ["bash", "zsh", "fish"]),
        (["bucketline", "train", "report", "--no-such", ""], []),
        (["store", "no-such-command", "--"], []),
        (["store", "export", "a", "b", "--form"], ["--format"]),
        ([""], ["ingest", "store", "loader", "train", "export-model", "completion", "--help", "--version"]),
    ],
)
def test_a_word_is_completed_by_what_may_stand_there(words: list[str], expected: list[str]) -> None:
    assert [word for word, _ in candidates(words)] == expected


@pytest.mark.parametrize("package", ["bucketline.store", "bucketline.loader"])
def test_dir_has_every_public_name_before_it_is_used(package: str) -> None:
    code = f"import {package} as p, sys; print(*(set(p.__all__) - set(dir(p))), 'torch' in sys.modules, hasattr(p, '__file__'))"
    assert spawn([sys.executable, "-c", code]).out == "False True\n"
    assert {"__all__", "__file__"} <= {*dir(importlib.import_module(package))}


def test_the_sections_of_a_commands_help_are_completed() -> None:
    found = [word for word, _ in candidates(["ingest", "pack", "--help", ""])]
    assert {"rules", "source", "storage", "all"} <= {*found}
    assert "" not in found


def test_completing_imports_nothing_heavy() -> None:
    ran = spawn([BIN / "bucketline", "--complete", "bucketline", "train", "--pre"], PYTHONPROFILEIMPORTTIME="1")
    assert "--precision\t" in ran.out
    assert not {"torch", "numpy"} & {line.rpartition("|")[2].strip() for line in ran.err.splitlines()}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell_is_one_that_it_reads(shell: str) -> None:
    ran = spawn([BIN / "bucketline", "completion", shell]).done()
    assert "bucketline --complete" in ran.out
    if (program := shutil.which(shell)) is None:
        pytest.skip(f"{shell} is not installed here")
    checked = subprocess.run([program, "-n"], input=ran.out, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
