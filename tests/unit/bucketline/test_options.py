"""Command lines: what is right is parsed, what is wrong is refused in a line that names what was typed and what is expected."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import pytest

from bucketline.command_line import parse_command
from bucketline.errors import UsageError
from bucketline.help_screen import command_help
from bucketline.ingest.cli import COMMANDS as INGEST
from bucketline.options import ALONE, ONLY_IN_FILE, Arg, Positional, Repeated, parse_options

Colour = StrEnum("Colour", ["RED", "DARK_BLUE"])


@dataclass(frozen=True, kw_only=True)
class Paint:
    """Paint a house."""

    SECTION = "mine: all of it"

    house: Positional[Path]
    """House."""
    how: Positional[Literal["fast", "well"]] = "well"
    """How."""
    coats: int
    """Coats."""
    litres: float | None = None
    """Litres."""
    colour: Colour = Colour.RED
    """Colour."""
    limit: int | Literal["auto"] = "auto"
    """Limit."""
    brushes: tuple[int, ...] = ()
    """Brushes."""
    note: Annotated[Repeated[tuple[str, ...]], Arg(aliases=("-n",))] = ()
    """Notes."""
    prune: str | None = field(default=None, metadata={ALONE: "all"})
    """Prune."""
    dry: bool = False
    """Only say it."""
    seldom: float = field(default=0.5, metadata=ONLY_IN_FILE)
    """Few need it."""


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("", ["HOUSE", "paint --help"]),
        ("villa", ["--coats INT", "paint --help"]),
        ("villa --coats", ["--coats", "INT"]),
        ("villa --coats --dry", ["--coats", "INT"]),
        ("villa --coats 2 -n --dry", ["-n", "TEXT"]),
        ("villa --coats two", ["--coats", "'two'", "whole number"]),
        ("villa --coats=2.5", ["--coats", "'2.5'", "whole number"]),
        ("villa --coats 2 --litres many", ["--litres", "'many'", "a number"]),
        ("villa --coats 2 --limit few", ["--limit", "'few'", r"INT\|auto"]),
        ("villa --coats 2 --colour dark_blu", ["--colour", "'dark_blu'", "red, dark_blue", "did you mean 'dark_blue'"]),
        ("villa --coats 2 --brushes 1 two", ["--brushes", "'two'", "whole number"]),
        ("villa badly --coats 2", ["HOW", "'badly'", "fast, well"]),
        ("villa fast hut --coats 2", ["'hut'", "HOUSE and HOW"]),
        ("villa --coats 2 -x", ["-x", "--help all"]),
        ("villa --coats 2 --no-coats", ["--no-coats", "did you mean '--coats'"]),
        ("villa --coats 2 --color=red", ["--color;", "did you mean '--colour'"]),
        ("villa --coats 2 --seldom 1", ["--seldom", "a run file", r"\[mine\]"]),
    ],
)
def test_what_is_wrong_is_said_in_a_line(line: str, names: list[str]) -> None:
    with pytest.raises(UsageError, match="(?s)" + ".*".join(names)) as refused:
        parse_options(Paint, line.split(), "paint")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("villa --coats -1 --litres None", Paint(house=Path("villa"), coats=-1)),
        ("--coats 2 --litres .5 villa fast", Paint(house=Path("villa"), how="fast", coats=2, litres=0.5)),
        ("--coats=2 --colour=dark_blue -- -villa", Paint(house=Path("-villa"), coats=2, colour=Colour.DARK_BLUE)),
        ("villa --coats 2 --limit 3 --brushes 1 2", Paint(house=Path("villa"), coats=2, limit=3, brushes=(1, 2))),
        ("villa --coats 1 --coats 2 -n a --note b", Paint(house=Path("villa"), coats=2, note=("a", "b"))),
        ("villa --coats 2 --note=--dry -n=b", Paint(house=Path("villa"), coats=2, note=("--dry", "b"))),
        ("--coats 2 --brushes 1 -- villa fast", Paint(house=Path("villa"), how="fast", coats=2, brushes=(1,))),
        ("villa --coats 2 --prune --dry --no-dry", Paint(house=Path("villa"), coats=2, prune="all")),
        ("--prune villa --coats 2", Paint(house=Path("villa"), coats=2, prune="all")),
        ("villa --coats 2 --prune=3", Paint(house=Path("villa"), coats=2, prune="3")),
    ],
)
def test_what_is_right_is_parsed(line: str, expected: Paint) -> None:
    assert parse_options(Paint, line.split(), "paint") == expected


def test_what_only_a_file_sets_is_apart_in_the_help() -> None:
    assert "seldom" not in command_help("paint", Paint)
    for section in ("mine", "all"):
        said = "Only in a run file:\n  seldom = FLOAT        Few need it. Default: 0.5.\n"
        assert said in command_help("paint", Paint, section)


def made_without_a_file() -> type:
    """Return a command as a package has it of which only the compiled files are installed."""
    source = "@dataclass(frozen=True, kw_only=True)\nclass Mine:\n    'Do it.'\n    rows: int = 3\n"
    found = {"dataclass": dataclass, "__name__": __name__}
    exec(source, found)
    return found["Mine"]  # type: ignore[return-value]


def test_a_command_of_a_package_without_its_source_has_help_and_options() -> None:
    command = made_without_a_file()
    assert "--rows INT" in command_help("loader mine", command)
    assert parse_command(command, ["--rows", "4"], "loader mine") == command(rows=4)


@pytest.mark.parametrize("given", ["bf16", "BF16", "bfloat16", "BFloat16"])
def test_a_dtype_is_taken_in_any_spelling_and_shown_in_one(given: str) -> None:
    pack, needed = INGEST["pack"], ["photos", "a.store", "--model=m"]
    found = parse_options(pack, [*needed, "--dtype", given, f"--encode_dtype={given}"], "ingest pack")
    assert (found.dtype, found.encode_dtype) == ("BF16", "BF16")  # type: ignore[attr-defined]
    assert "--encode-dtype fp16|bf16|fp32|int8|nf4" in command_help("ingest pack", pack, "all")
    with pytest.raises(UsageError, match=r"--encode-dtype .*bf61.* fp16, bf16, fp32, int8, nf4; did you mean 'bf16'"):
        parse_options(pack, [*needed, "--encode-dtype", "bf61"], "ingest pack")
