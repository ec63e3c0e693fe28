"""docs/coming-from/: a page for each program in `tests/data/coming_from.toml`, by the answers of `bucketline/coming_from.toml`.

python -m tests.coming_from_page --write
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from typing import NamedTuple

from bucketline.coming_from import words
from bucketline.options import options_of
from tests.commands import ROOT
from tests.every_command import COMMANDS_OF

FOLDER = ROOT / "docs" / "coming-from"
PROGRAMS = tomllib.loads((ROOT / "tests" / "data" / "coming_from.toml").read_text(encoding="utf-8"))
OWN = {word for one in options_of(COMMANDS_OF["bucketline train"]) for word in one.names}
NOT_DONE = re.compile(r"\bnot (done|trained)\b|\bno option for\b")
ONE_OPTION = re.compile(r"(?:say|it is in|they are) (--[\w-]+),? (?:as in )?(\S+?)(?:, (.*))?")
BY_ITSELF = re.compile(r"is this cache|token is read|attention is|TF32|own files tell|hub's cache|no seed is needed")
FILES = {"run_file": "in a run file", "data_set_file": "in a data set file"}
TABLES = ("ingest", "train")
SAME = "same"
HEAD = "Options are those of {version}. A command line here with one of theirs is answered with ours.\n"


class Answer(NamedTuple):
    """Where an option's answer stands: in the words of a command, by kind, and Bucketline's word or sentence."""

    table: str
    kind: str
    ours: str

    def cells(self) -> tuple[str, str]:
        """Return what Bucketline has (an option, an argument, "by itself" or "not done") and a note."""
        if self.kind == SAME:
            return "the same name", ""
        if self.kind != "answers":
            name, _, note = self.ours.partition(", ")
            return f"`{name}`", note or FILES.get(self.kind, "")
        if NOT_DONE.search(self.ours):
            return "not done", in_code(self.ours)
        if one := ONE_OPTION.fullmatch(self.ours):
            return f"`{one[1]} {one[2]}`", in_code(one[3] or "")
        return self._named(), in_code(self.ours)

    def _named(self) -> str:
        """Return what the sentence of an answer is about."""
        named = re.search(r"\b(SOURCE|STORE)\b|(?<!\S)--[a-z][a-z-]+", self.ours.partition("`")[0])
        code = named or re.search(r"(?<=`)\w+(?=[^`]*`)", self.ours)
        if code is None or BY_ITSELF.search(self.ours):
            return "by itself"
        return "an argument" if code[0] == "bucketline" else f"`{code[0]}`"


def in_code(note: str) -> str:
    """Return a note with its options in backticks.

    >>> in_code("--crop and `train --flip 1`")
    '`--crop` and `train --flip 1`'
    """
    parts = note.split("`")
    parts[::2] = [re.sub(r"(--[a-z][\w-]*)", r"`\1`", part) for part in parts[::2]]
    return "`".join(parts)


def answer_of(option: str) -> Answer:
    """Return the answer to an option: the trainer's own option, else that of the command which does not send to the other one.

    Raises:
        ValueError: if nothing knows the option.
    """
    name = option.replace("_", "-")
    if f"--{name}" in OWN:
        return Answer("train", SAME, SAME)
    every = [Answer(table, kind, ours) for table in TABLES for kind, entries in words()[table].items() for ours in entries]
    found = [one for one in every if name in words()[one.table][one.kind][one.ours]]
    if not found:
        raise ValueError(f"{option} has no answer in bucketline/coming_from.toml; add one, or take it out of the page")
    trains = [one for one in found if one.table == "train" and one.kind != "answers"]
    return (trains or found)[0]


def lines_of(options: list[str], dashes: str) -> Iterator[str]:
    by_answer: dict[tuple[str, str, str], list[str]] = {}
    of_cells: dict[tuple[str, str, str], Answer] = {}
    for option in options:
        answer = answer_of(option)
        key = (answer.table, *answer.cells())
        by_answer.setdefault(key, []).append(f"`{dashes}{option}`")
        of_cells.setdefault(key, answer)
    for table, title in (("ingest", "Packing: `ingest pack`"), ("train", "Training: `bucketline train`")):
        order = [SAME, *(ours for entries in words()[table].values() for ours in entries)]
        yield f"\n## {title}\n\n| theirs | here | |\n|---|---|---|\n"
        for key in sorted((key for key in of_cells if key[0] == table), key=lambda key: order.index(of_cells[key].ours)):
            yield f"| {', '.join(by_answer[key])} | {key[1]} | {key[2]} |\n"


def page(name: str) -> str:
    """Return the page of a program."""
    program = PROGRAMS[name]
    head = f"# Coming from {program['title']}\n\n{HEAD.format(version=program['version'])}\n{program['text']}"
    return head + "".join(lines_of(program["options"], program["dashes"]))


if __name__ == "__main__":
    for name in PROGRAMS:
        if "--write" in sys.argv:
            (FOLDER / f"{name}.md").write_text(page(name), encoding="utf-8")
        else:
            print(page(name))
