"""Command lines: what is right is parsed, what is wrong is refused in a line that names what was typed and what is expected."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pytest

from bucketline.coming_from import OWNERS, words
from bucketline.command_line import parse_command
from bucketline.errors import UsageError
from bucketline.ingest.cli import COMMANDS as INGEST
from bucketline.loader.cli import COMMANDS as LOADER
from bucketline.option_value import OptionValue, check_fields, parse_values
from bucketline.options import ALONE, ONLY_IN_FILE, Arg, Positional, Repeated, command_help, options_of, parse_options
from bucketline.train.config import TrainConfig
from tests.coming_from_page import FOLDER, PROGRAMS, page

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
        ("", ["HOUSE", "--coats INT", "paint --help"]),
        ("villa", ["--coats INT", "paint --help"]),
        ("villa --coats", ["--coats", "INT"]),
        ("villa --coats --dry", ["--coats", "INT"]),
        ("villa --coats 2 -n --dry", ["-n", "TEXT"]),
        ("villa --coats two", ["--coats", "'two'", "whole number"]),
        ("villa --coats=2.5", ["--coats", "'2.5'", "whole number"]),
        ("villa --coats 2 --litres many", ["--litres", "'many'", "a number"]),
        ("villa --coats 2 --limit few", ["--limit", "'few'", r"INT\|auto"]),
        ("villa --coats 2 --limit 4.5", ["--limit", "'4.5'", r"INT\|auto"]),
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


@dataclass(frozen=True, kw_only=True)
class Ladder:
    steps: int | Literal["auto"] = 3
    rungs: int | Literal["auto"] | None = None

    def __post_init__(self) -> None:
        check_fields(self, Ladder, str)


@pytest.mark.parametrize("name", ["steps", "rungs"])
def test_a_number_or_a_word_of_a_program_is_checked(name: str) -> None:
    def made(value: Any) -> object:
        return getattr(Ladder(**{name: value}), name)

    assert [made(4), made("auto")] == [4, "auto"]
    for value in ("few", 4.5, True):
        with pytest.raises(UsageError, match=f"{name} is {value!r} .*expected an int or 'auto'"):
            made(value)


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


# Values of options that are typed as one word: each is parsed from what it is spelt as, and a wrong one is named.


Kind = StrEnum("Kind", {"PLAIN": "plain", "TWO_WORDS": "two-words", "FALLING": "falling"})


@dataclass(frozen=True, kw_only=True)
class PaintValue(OptionValue):
    FORMS = ("plain[@END]", "two-words:MEAN,STD", "falling[:FLOOR][:COLOUR][@END]")
    EXAMPLE = "falling:0.1:red@20"
    LIMITS: ClassVar = {"floor": ("0 to 1", lambda value: 0 <= value <= 1)}

    name: Kind = Kind.PLAIN
    mean: float = 0.0
    std: float = 1.0
    floor: float = 0.0
    colour: Colour | None = None
    end: int | None = None


HALF = PaintValue(name=Kind.FALLING, floor=0.5)


@dataclass(frozen=True, kw_only=True)
class Paints:
    """Paint a wall."""

    first: PaintValue = HALF
    """How to paint."""
    second: PaintValue | None = None
    """How to paint it again."""

    def __post_init__(self) -> None:
        parse_values(self, lambda field: f"--{field}")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("plain", PaintValue()),
        ("plain@7", PaintValue(end=7)),
        ("two-words:-0.5,1.5", PaintValue(name=Kind.TWO_WORDS, mean=-0.5, std=1.5)),
        ("falling", PaintValue(name=Kind.FALLING)),
        ("falling:dark_blue", PaintValue(name=Kind.FALLING, colour=Colour.DARK_BLUE)),
        ("falling:1e-08:red@20", PaintValue(name=Kind.FALLING, floor=1e-8, colour=Colour.RED, end=20)),
        ("falling@3", PaintValue(name=Kind.FALLING, end=3)),
    ],
)
def test_a_value_is_what_its_spelling_says(text: str, value: PaintValue) -> None:
    assert PaintValue.parse(text, "--paint") == value
    assert str(value) == text


def test_another_spelling_of_the_same_value_is_read() -> None:
    assert str(PaintValue.parse("falling:0.10:red", "--paint")) == "falling:0.1:red"
    assert str(PaintValue.parse("two-words:1,2.0", "--paint")) == "two-words:1,2"


@pytest.mark.parametrize(
    "text", ["", "falling:", "falling:green", "two-words", "plain:1", "plain@x", "plain@1.5", "falling:nan", "falling:1:2"]
)
def test_what_spells_no_value_is_refused_with_all_spellings(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        PaintValue.parse(text, "--paint")
    expected = "plain[@END] or two-words:MEAN,STD or falling[:FLOOR][:red|dark_blue][@END]"
    assert str(refused.value) == f"--paint is {text!r}, expected {expected}, such as falling:0.1:red@20"


@pytest.mark.parametrize(("text", "floor"), [("falling:2", "2.0"), ("falling:-1@3", "-1.0")])
def test_a_number_outside_its_limits_is_refused(text: str, floor: str) -> None:
    with pytest.raises(UsageError, match=f"^--paint is {text}: floor is {floor}, expected 0 to 1$"):
        PaintValue.parse(text, "--paint")


def test_a_command_takes_the_words() -> None:
    assert parse_options(Paints, [], "paint") == Paints()
    found = parse_options(Paints, ["--first", "plain@3", "--second=falling:0.1"], "paint")
    assert found == Paints(first=PaintValue(end=3), second=PaintValue(name=Kind.FALLING, floor=0.1))
    with pytest.raises(UsageError, match="--second is 'fast', expected plain"):
        parse_options(Paints, ["--second", "fast"], "paint")
    assert "plain[@END]|two-words:MEAN,STD|falling[:FLOOR][:red|dark_blue][@END]" in "".join(
        command_help("paint", Paints).split()
    )
    assert "[falling:0.5]" in command_help("paint", Paints)


def test_a_program_gives_a_value_or_its_spelling() -> None:
    assert Paints(first="plain@3").first == PaintValue(end=3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"--first is \['plain'\], expected plain.*, such as falling:0.1:red@20"):
        Paints(first=["plain"])  # type: ignore[arg-type]


# The answers to options that other programs have: ours, or a plain sentence, and for what is lacking no guess.


OWNER: dict[str, Any] = {"train": TrainConfig, "loader": LOADER["plan"], "ingest": INGEST["pack"]}


def refusal(command: type, option: str) -> str:
    with pytest.raises(UsageError) as refused:
        parse_options(command, ["photos", option, "1"], "it")
    return str(refused.value)


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_pages_have_what_the_file_has(program: str) -> None:
    assert (FOLDER / f"{program}.md").read_text(encoding="utf-8") == page(program), (
        "run `python -m tests.coming_from_page --write`"
    )


@pytest.mark.parametrize("program", OWNERS)
def test_each_word_is_answered_once_with_what_its_command_has(program: str) -> None:
    command, kinds = OWNER[program], words()[program]
    own = {word for one in options_of(command) for word in one.names}
    others = [f"--{other}" for table in kinds.values() for several in table.values() for other in several]
    assert len(others) == len({*others})
    assert not own & {*others}
    assert {re.split(r"[ ,\[]", ours)[0] for ours in kinds["options"]} <= own
    in_file = {*kinds.get("run_file", ()), *kinds.get("data_set_file", ())}
    assert {ours.split(" ")[0] for ours in in_file} <= {one.name for one in fields(command)}
    with pytest.raises(UsageError) as refused:
        parse_options(command, ["photos", *others], "it")
    assert [line.partition("; ")[0] for line in refused.value.args if "; " in line] == [
        f"there is no option {one}" for one in others
    ]


def test_the_options_that_sentences_name_exist() -> None:
    known = {word for command in (*OWNER.values(), INGEST["prompts"]) for one in options_of(command) for word in one.names}
    elsewhere = {"--help", "--format", "--nproc_per_node"}
    named = {name for kinds in words().values() for ours in kinds["answers"] for name in re.findall(r"--[a-z0-9_-]+", ours)}
    assert named <= known | elsewhere


@pytest.mark.parametrize(
    ("command", "option", "answer"),
    [
        (TrainConfig, "--lr=1e-4", "here it is --learning-rate"),
        (TrainConfig, "--mixed_precision", "here it is --precision"),
        (TrainConfig, "--resolution", "packed by `ingest pack --grid`"),
        (TrainConfig, "--num_workers", "here it is threads, in a run file"),
        (INGEST["pack"], "--image_size", "here it is --grid"),
        (INGEST["pack"], "--num_workers", "it is decode_threads, in a data set file"),
        (INGEST["pack"], "--output_dir", "STORE is given without an option"),
        (INGEST["prompts"], "--random_flip", "`ingest pack` has --flip"),
        (LOADER["plan"], "--batch", "here it is --batch-size"),
        (INGEST["pack"], "--clip_skip", "by no other one (docs/limits.md)"),
        (TrainConfig, "--placeholder_token", "textual inversion is not done here"),
    ],
)
def test_an_option_of_another_program_is_answered_with_ours(command: type, option: str, answer: str) -> None:
    name = option.partition("=")[0].replace("_", "-")
    assert re.search(rf"{name}; .*{re.escape(answer)}", refusal(command, option))


@pytest.mark.parametrize("option", ["--max_train_samples", "--learning_rate", "--verbose", "--xformers"])
def test_what_packing_lacks_gets_no_guess(option: str) -> None:
    assert refusal(INGEST["pack"], option) == f"there is no option {option.replace('_', '-')} (`--help all` lists them)"
