"""The help and version of every command: its help, at once and with an example, and its version."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from typing import Annotated, Literal

import pytest
import tyro

import bucketline
from bucketline.command_line import parse_line, parse_options
from bucketline.errors import UsageError
from bucketline.help_screen import ONLY_IN_FILE, command_help, options_of
from bucketline.ingest.cli import COMMANDS as INGEST
from bucketline.train.commands.export_model import ExportModel
from bucketline.typed_line import read_line
from tests.commands import BIN, ROOT, call, spawn
from tests.every_command import COMMANDS_OF

COMMANDS: dict[str, list[object]] = {
    "ingest": [BIN / "ingest"],
    "ingest pack": [BIN / "ingest", "pack"],
    "ingest import": [BIN / "ingest", "import"],
    "ingest scan": [BIN / "ingest", "scan"],
    "ingest prompts": [BIN / "ingest", "prompts"],
    "ingest peek": [BIN / "ingest", "peek"],
    "store": [BIN / "store"],
    "store info": [BIN / "store", "info"],
    "store report": [BIN / "store", "report"],
    "store ls": [BIN / "store", "ls"],
    "store verify": [BIN / "store", "verify"],
    "store get": [BIN / "store", "get"],
    "store export": [BIN / "store", "export"],
    "store drop": [BIN / "store", "drop"],
    "store compact": [BIN / "store", "compact"],
    "store merge": [BIN / "store", "merge"],
    "store repair": [BIN / "store", "repair"],
    "store restore": [BIN / "store", "restore"],
    "store push": [BIN / "store", "push"],
    "store pull": [BIN / "store", "pull"],
    "loader": [BIN / "loader"],
    "loader plan": [BIN / "loader", "plan"],
    "loader peek": [BIN / "loader", "peek"],
    "loader serve": [BIN / "loader", "serve"],
    "loader stats": [BIN / "loader", "stats"],
    "bucketline": [BIN / "bucketline"],
    "bucketline ingest pack": [BIN / "bucketline", "ingest", "pack"],
    "bucketline train": [BIN / "bucketline", "train"],
    "bucketline train presets": [BIN / "bucketline", "train", "presets"],
    "bucketline train report": [BIN / "bucketline", "train", "report"],
    "bucketline export-model": [BIN / "bucketline", "export-model"],
    "python -m bucketline.train": [sys.executable, "-m", "bucketline.train"],
    "train/main.py": [sys.executable, ROOT / "train" / "main.py"],
}
GROUPS = ("ingest", "store", "loader", "bucketline")
HEAVY = ("torch", "diffusers", "transformers", "accelerate", "datasets", "pyarrow", "matplotlib")


# a program imports all its commands to read its arguments: one or two of each will do
ALIKE = {name for name in COMMANDS if name.startswith(("ingest ", "store ", "loader ", "bucketline train "))} - {
    "ingest pack",
    "store export",
    "loader serve",
    "bucketline train report",
}


@pytest.mark.parametrize("name", [pytest.param(one, marks=pytest.mark.slow if one in ALIKE else ()) for one in COMMANDS])
def test_help_imports_nothing_heavy_and_shows_an_example(name: str) -> None:
    ran = spawn([*COMMANDS[name], "--help"], PYTHONPROFILEIMPORTTIME="1")
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
    options = [one for one in options_of(COMMANDS_OF[name]) if one.words and not one.is_in_file]
    assert 10 <= sum(any(line.startswith(f"  {one.typed}") for line in lines) for one in options) <= 14


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


@pytest.mark.parametrize("name", COMMANDS_OF)
def test_help_calls_what_is_given_by_place_by_its_name(name: str) -> None:
    usage = command_help(name, COMMANDS_OF[name]).partition("\n\n")[0]
    assert not re.search(r"\bSTR\b", usage)


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
    refused = call("ingest", "pack", "--help", "rays")
    assert refused.code == 2
    assert "--help rays: there is no such section, expected " in refused.err


def test_an_option_that_is_not_known_is_refused_with_the_nearest() -> None:
    refused = call("ingest", "pack", "photos", "photos.store", "--modle=sd15")
    assert (refused.code, refused.out) == (2, "")
    assert "there is no option --modle; did you mean '--model'?" in refused.err


def test_a_section_may_follow_an_equals_sign() -> None:
    assert call("ingest", "pack", "--help=ray") == call("ingest", "pack", "--help", "ray")


def made_without_a_file() -> type:
    """Return a command as a package has it of which only the compiled files are installed."""
    source = "@dataclass(frozen=True, kw_only=True)\nclass Mine:\n    'Do it.'\n    rows: int = 3\n"
    found = {"dataclass": dataclass, "__name__": __name__}
    exec(source, found)
    return found["Mine"]  # type: ignore[return-value]


def test_a_command_of_a_package_without_its_source_has_help_and_options() -> None:
    command = made_without_a_file()
    assert "--rows INT" in command_help("loader mine", command)
    assert parse_options(command, ["--rows", "4"], "loader mine") == command(rows=4)
    with pytest.raises(UsageError, match="there is no option --row; did you mean '--rows'"):
        parse_options(command, ["--row", "4"], "loader mine")


@dataclass(frozen=True, kw_only=True)
class Inner:
    """A part."""

    size: int = 1
    """A size."""


@dataclass(frozen=True, kw_only=True)
class Theirs:
    """A command that uses more of tyro than ours do."""

    rows: Annotated[int, tyro.conf.arg(aliases=["-r", "--lines"], help="How many.")] = 1
    mixes: bool = True
    """Mix them."""
    how: Literal["--odd", "even"] = "even"
    """How."""
    inner: Inner = Inner()
    """Its part."""
    found: int = field(init=False, default=3)


def test_what_a_command_of_another_package_takes_is_shown_and_not_refused() -> None:
    shown = command_help("loader theirs", Theirs)
    assert "-r, --lines, --rows INT\n                        How many [1]\n" in shown
    assert "--no-mixes            Mix them\n" in shown
    assert "found" not in shown
    line = ["--lines", "4", "--no-mixes", "--how=--odd", "--inner.size", "2"]
    expected = Theirs(rows=4, mixes=False, how="--odd", inner=Inner(size=2))
    assert parse_options(Theirs, line, "loader theirs") == expected
    for unknown in ("--odd", "--found", "--iner.size"):
        with pytest.raises(UsageError, match=f"there is no option {unknown}"):
            parse_options(Theirs, [unknown, "1"], "loader theirs")


@dataclass(frozen=True, kw_only=True)
class WithMore:
    """A command with an option that only a file sets."""

    SECTION = "mine: all of it"

    rows: int = 3
    """Rows."""
    seldom: float = field(default=0.5, metadata=ONLY_IN_FILE)
    """Few need it."""


def test_what_only_a_file_sets_is_apart_in_the_help_and_refused_on_the_command_line() -> None:
    assert "seldom" not in command_help("loader more", WithMore)
    for asked in ("mine", "all"):
        shown = command_help("loader more", WithMore, asked)
        assert "  --rows INT " in shown
        assert "Only in a run file:\n  seldom = FLOAT        Few need it. Default: 0.5.\n" in shown
    line = read_line(WithMore, ["--rows", "4"])
    assert parse_line(WithMore, line, "loader more", from_file=["--seldom", "1"]) == WithMore(rows=4, seldom=1.0)
    with pytest.raises(UsageError, match=r"--seldom is set in a run file, not on the command line: seldom, in its \[mine\]"):
        parse_options(WithMore, ["--seldom=1"], "loader more")


def test_the_trainers_help_names_its_other_commands_and_how_several_processes_start() -> None:
    shown = " ".join(spawn([*COMMANDS["python -m bucketline.train"], "--help", "all"]).out.split())
    for said in ("bucketline train presets", "bucketline train report"):
        assert f"`{said}`" in shown
    assert "`torchrun --nproc_per_node N -m bucketline.train`" in shown
    assert "Example: bucketline train --store" in shown


@pytest.mark.parametrize("command", ["ingest", "store", "loader"])
def test_every_command_says_its_version(command: str) -> None:
    assert call(command, "version").out == f"{bucketline.__version__}\n"
    assert spawn([BIN / "bucketline", command, "version"]).out == f"{bucketline.__version__}\n"


def test_the_command_of_all_commands_refuses_what_it_does_not_know() -> None:
    ran = spawn([BIN / "bucketline", "cook"])
    assert (ran.code, ran.out) == (2, "")
    assert "there is no command 'cook'" in ran.err
    assert "usage: bucketline" in ran.err


@pytest.mark.parametrize("given", ["bf16", "BF16", "bfloat16", "BFloat16"])
def test_a_dtype_is_taken_in_any_spelling_and_shown_in_one(given: str) -> None:
    pack, needed = INGEST["pack"], ["photos", "a.store", "--model=m"]
    line = read_line(pack, [*needed, "--dtype", given, f"--encode_dtype={given}"])
    assert line.checked("ingest pack") == [
        *("--model=m", "--dtype=BF16", "--encode-dtype=BF16", "--", "photos", "a.store"),  # as stores and manifests have them
    ]
    assert read_line(pack, ["--", given]).by_place == [given]
    assert read_line(ExportModel, ["RUN", "OUT", "--dtype", given]).checked("it") == ["--dtype=bf16", "--", "RUN", "OUT"]
    shown = command_help("ingest pack", pack, "all")
    assert "--encode-dtype fp16|bf16|fp32|int8|nf4" in shown
    assert not re.search(r"\b(F16|BF16|F32|I8)\b", shown)
    with pytest.raises(UsageError, match="--encode-dtype is bf61, expected fp16, bf16, fp32, int8, nf4; did you mean 'bf16'"):
        read_line(pack, [*needed, "--encode-dtype", "bf61"]).checked("ingest pack")
