"""Values of options that are typed as one word: each is parsed from what it is spelt as, and a wrong one is named."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

import pytest

from bucketline.errors import UsageError
from bucketline.help_screen import command_help
from bucketline.option_value import OptionValue, parse_values
from bucketline.options import parse_options

Colour = StrEnum("Colour", ["RED", "DARK_BLUE"])
Kind = StrEnum("Kind", {"PLAIN": "plain", "TWO_WORDS": "two-words", "FALLING": "falling"})


@dataclass(frozen=True, kw_only=True)
class Paint(OptionValue):
    FORMS = ("plain[@END]", "two-words:MEAN,STD", "falling[:FLOOR][:COLOUR][@END]")
    EXAMPLE = "falling:0.1:red@20"
    LIMITS: ClassVar = {"floor": ("0 to 1", lambda value: 0 <= value <= 1)}

    name: Kind = Kind.PLAIN
    mean: float = 0.0
    std: float = 1.0
    floor: float = 0.0
    colour: Colour | None = None
    end: int | None = None


HALF = Paint(name=Kind.FALLING, floor=0.5)


@dataclass(frozen=True, kw_only=True)
class Paints:
    """Paint a wall."""

    first: Paint = HALF
    """How to paint."""
    second: Paint | None = None
    """How to paint it again."""

    def __post_init__(self) -> None:
        parse_values(self, lambda field: f"--{field}")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("plain", Paint()),
        ("plain@7", Paint(end=7)),
        ("two-words:-0.5,1.5", Paint(name=Kind.TWO_WORDS, mean=-0.5, std=1.5)),
        ("falling", Paint(name=Kind.FALLING)),
        ("falling:dark_blue", Paint(name=Kind.FALLING, colour=Colour.DARK_BLUE)),
        ("falling:1e-08:red@20", Paint(name=Kind.FALLING, floor=1e-8, colour=Colour.RED, end=20)),
        ("falling@3", Paint(name=Kind.FALLING, end=3)),
    ],
)
def test_a_value_is_what_its_spelling_says(text: str, value: Paint) -> None:
    assert Paint.parse(text, "--paint") == value
    assert str(value) == text


def test_another_spelling_of_the_same_value_is_read() -> None:
    assert str(Paint.parse("falling:0.10:red", "--paint")) == "falling:0.1:red"
    assert str(Paint.parse("two-words:1,2.0", "--paint")) == "two-words:1,2"


@pytest.mark.parametrize(
    "text", ["", "falling:", "falling:green", "two-words", "plain:1", "plain@x", "plain@1.5", "falling:nan", "falling:1:2"]
)
def test_what_spells_no_value_is_refused_with_all_spellings(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        Paint.parse(text, "--paint")
    expected = "plain[@END] or two-words:MEAN,STD or falling[:FLOOR][:red|dark_blue][@END]"
    assert str(refused.value) == f"--paint is {text!r}, expected {expected}, such as falling:0.1:red@20"


@pytest.mark.parametrize(("text", "floor"), [("falling:2", "2.0"), ("falling:-1@3", "-1.0")])
def test_a_number_outside_its_limits_is_refused(text: str, floor: str) -> None:
    with pytest.raises(UsageError, match=f"^--paint is {text}: floor is {floor}, expected 0 to 1$"):
        Paint.parse(text, "--paint")


def test_a_command_takes_the_words() -> None:
    assert parse_options(Paints, [], "paint") == Paints()
    found = parse_options(Paints, ["--first", "plain@3", "--second=falling:0.1"], "paint")
    assert found == Paints(first=Paint(end=3), second=Paint(name=Kind.FALLING, floor=0.1))
    with pytest.raises(UsageError, match="--second is 'fast', expected plain"):
        parse_options(Paints, ["--second", "fast"], "paint")
    assert "plain[@END]|two-words:MEAN,STD|falling[:FLOOR][:red|dark_blue][@END]" in command_help("paint", Paints)
    assert "[falling:0.5]" in command_help("paint", Paints)


def test_a_program_gives_a_value_or_its_spelling() -> None:
    assert Paints(first="plain@3").first == Paint(end=3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"--first is \['plain'\], expected plain.*, such as falling:0.1:red@20"):
        Paints(first=["plain"])  # type: ignore[arg-type]
