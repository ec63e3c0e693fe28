"""The help and version of every command: its help, at once and with an example, and its version."""

from __future__ import annotations

import re
import sys

import pytest

import bucketline
from bucketline.help_screen import command_help
from bucketline.options import options_of
from tests.commands import BIN, ROOT, call, spawn
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


@pytest.mark.parametrize("name", ["bucketline train", "ingest pack", "ingest import", "loader plan", "loader peek"])
def test_the_first_screen_of_a_long_command_has_the_options_that_most_runs_set(name: str) -> None:
    lines = command_help(name, COMMANDS_OF[name]).splitlines()
    options = [one for one in options_of(COMMANDS_OF[name]) if one.names and not one.is_in_file]
    assert 10 <= sum(any(line.startswith(f"  {one.typed}") for line in lines) for one in options) <= 16


@pytest.mark.parametrize("name", COMMANDS_OF)
def test_every_option_is_explained_once_in_full(name: str) -> None:
    command = COMMANDS_OF[name]
    options = options_of(command)
    assert not [one.field for one in options if not one.text], "each has a docstring"
    everything = command_help(name, command, "all").splitlines()
    for one in options:
        assert (
            sum(line.startswith((f"  {one.typed} ", f"  {one.typed}\n")) or line == f"  {one.typed}" for line in everything)
            == 1
        )
    assert {*getattr(command, "FIRST", ())} <= {one.field for one in options}
    if "--help all: the same in full" not in (first := command_help(name, command).splitlines()):
        sections = [line.split()[1] for line in first if line.startswith("  --help ")]
        assert {one.section for one in options if not one.is_required} <= {*sections}


@pytest.mark.parametrize("program", ["ingest", "store", "loader"])
def test_the_help_of_a_program_has_a_line_for_each_command(program: str) -> None:
    lines = call(program, "--help").out.splitlines()
    own = [name.split()[1] for name in COMMANDS_OF if name.startswith(f"{program} ")]
    rows = [line for line in lines if line.startswith("  ")]
    assert [row.split()[0] for row in rows] == [*own, "version"]
    assert max(map(len, lines)) <= 80


def test_the_help_of_bucketline_has_a_line_for_each_command() -> None:
    lines = spawn([BIN / "bucketline", "--help"]).out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith(" ")] == lines[0].partition("{")[2].partition("}")[0].split(
        ","
    )
    assert max(map(len, lines)) <= 80


def test_storage_is_listed_behind_what_the_command_is_for() -> None:
    for name, command in COMMANDS_OF.items():
        sections = [
            one.section
            for line in command_help(name, command).splitlines()
            for one in options_of(command)
            if line.startswith(f"  {one.typed}")
        ]
        assert "storage" not in sections[: len([one for one in sections if one != "storage"])], name


def test_a_section_is_asked_for_by_its_name() -> None:
    shown = call("ingest", "pack", "--help", "ray").out
    assert "--engine ray[:ADDRESS]" in shown
    assert "--grid" not in shown
    assert shown == call("ingest", "pack", "--help=ray").out
    refused = call("ingest", "pack", "--help", "rays")
    assert refused.code == 2
    assert "--help rays: there is no such section, expected " in refused.err


@pytest.mark.parametrize("command", ["ingest", "store", "loader"])
def test_every_command_says_its_version(command: str) -> None:
    assert call(command, "version").out == f"{bucketline.__version__}\n"
    assert spawn([BIN / "bucketline", command, "version"]).out == f"{bucketline.__version__}\n"


def test_the_command_of_all_commands_refuses_what_it_does_not_know() -> None:
    ran = spawn([BIN / "bucketline", "cook"])
    assert (ran.code, ran.out) == (2, "")
    assert "there is no command 'cook'" in ran.err
    assert "usage: bucketline" in ran.err
