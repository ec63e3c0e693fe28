"""Command lines that are refused before they are parsed, in a line that names what was typed; others are parsed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import pytest
import tyro

from bucketline.command_line import parse_line, parse_options
from bucketline.errors import UsageError
from bucketline.typed_line import read_line

Colour = StrEnum("Colour", ["RED", "DARK_BLUE"])


@dataclass(frozen=True, kw_only=True)
class Paint:
    """Paint a house."""

    house: tyro.conf.Positional[Path]
    """House."""
    how: tyro.conf.Positional[Literal["fast", "well"]] = "well"
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
    note: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(aliases=["-n"])] = ()
    """Notes."""
    dry: bool = False
    """Only say it."""


@pytest.mark.parametrize(
    ("line", "refusal"),
    [
        ("", "paint needs HOUSE and --coats INT (`paint --help` explains them)"),
        ("villa", "paint needs --coats INT (`paint --help` explains them)"),
        ("--coats 2 --dry", "paint needs HOUSE (`paint --help` explains them)"),
        ("villa --coats", "--coats has no value, expected INT"),
        ("villa --coats --dry", "--coats has no value, expected INT"),
        ("villa --coats 2 -n --dry", "-n has no value, expected TEXT"),
        ("villa --coats two", "--coats is 'two', expected a whole number"),
        ("villa --coats=2.5", "--coats is '2.5', expected a whole number"),
        ("villa --coats 2 --litres many", "--litres is 'many', expected a number"),
        ("villa --coats 2 --colour dark_blu", "--colour is dark_blu, expected red, dark_blue; did you mean 'dark_blue'?"),
        ("villa --coats 2 --brushes 1 two", "--brushes is 'two', expected a whole number"),
        ("villa badly --coats 2", "HOW is 'badly', expected fast or well"),
        ("villa fast hut --coats 2", "paint does not take 'hut', it takes HOUSE and HOW"),
        ("villa --coats 2 -x", "there is no option -x (`--help all` lists them)"),
        ("villa --coats 2 --dry=yes", "--dry is 'yes', expected no value"),
        ("villa --coats 2 --no-dry", "there is no option --no-dry; did you mean '--dry'? (`--help all` lists them)"),
        ("villa --coats 2 --no-coats", "there is no option --no-coats; did you mean '--coats'? (`--help all` lists them)"),
        ("villa --coats 2 --color red", "there is no option --color; did you mean '--colour'? (`--help all` lists them)"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(line: str, refusal: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_options(Paint, line.split(), "paint")
    assert str(refused.value) == refusal


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
        ("villa --coats 2 --note -1", Paint(house=Path("villa"), coats=2, note=("-1",))),
    ],
)
def test_what_is_right_is_parsed(line: str, expected: Paint) -> None:
    assert parse_options(Paint, line.split(), "paint") == expected


def test_what_a_file_gives_is_not_missing() -> None:
    found = parse_line(Paint, read_line(Paint, ["villa"]), "paint", from_file=["--coats=3"])
    assert found == Paint(house=Path("villa"), coats=3)
