"""The help and version of every command: its help, at once and with an example, and its version."""

from __future__ import annotations

import re
import sys

import pytest

import bucketline
from tests.commands import BIN, ROOT, call, spawn

COMMANDS: dict[str, list[object]] = {
    "ingest": [BIN / "ingest"],
    "ingest pack": [BIN / "ingest", "pack"],
    "ingest import": [BIN / "ingest", "import"],
    "ingest scan": [BIN / "ingest", "scan"],
    "ingest prompts": [BIN / "ingest", "prompts"],
    "ingest peek": [BIN / "ingest", "peek"],
    "ingest previews": [BIN / "ingest", "previews"],
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
    "bucketline train memory": [BIN / "bucketline", "train", "memory"],
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


@pytest.mark.parametrize("name", [name for name in COMMANDS if name.startswith(("ingest ", "store "))])
def test_help_calls_what_is_given_by_place_by_its_name(name: str) -> None:
    shown = call(*name.split(), "--help").out
    usage = " ".join(shown.partition("\n\n")[0].split())
    assert "Example:" in shown
    assert "SOURCE" in usage or "STORE" in usage
    assert not re.search(r"\b(STR|PATH)\b", usage)


def test_the_trainers_help_names_its_other_commands_and_how_several_processes_start() -> None:
    shown = " ".join(spawn([*COMMANDS["python -m bucketline.train"], "--help"]).out.replace("│", " ").split())
    for said in ("bucketline train presets", "bucketline train memory", "bucketline train report"):
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
    assert "there is no command 'cook'" in ran.err
    assert "usage: bucketline" in ran.err
