"""docs/coming-from/: a page for each program in `tests/data/coming_from.toml`, by the answers of `bucketline/coming_from.toml`.

python -m tests.coming_from_page --write
"""

from __future__ import annotations

import re
import sys
import tomllib

from bucketline.coming_from import words
from bucketline.options import options_of
from tests.commands import ROOT
from tests.every_command import COMMANDS_OF

FOLDER = ROOT / "docs" / "coming-from"
PROGRAMS = tomllib.loads((ROOT / "tests" / "data" / "coming_from.toml").read_text(encoding="utf-8"))
OWN = {word for one in options_of(COMMANDS_OF["bucketline train"]) for word in one.names}
NOT_DONE = re.compile(r"\bnot (done|trained)\b|docs/limits.md")
BY_ITSELF = re.compile(r"is this cache|token is read|attention is|TF32|own files tell|hub's cache|no seed is needed")
ONE_OPTION = re.compile(r"(?:say|it is in|they are) (--[\w-]+),? (?:as in )?(\S+?)(?:, (.*))?")
NAMED = re.compile(r"^[^`]*?(\b(?:SOURCE|STORE)\b|(?<!\S)--[a-z][a-z-]+)|`(\w+)[^`]*`")
FILES = {"run_file": "in a run file", "data_set_file": "in a data set file"}
TITLES = {"ingest": "Packing: `ingest pack`", "train": "Training: `bucketline train`"}
SAME = ("train", "", "")
HEAD = "Options are those of {version}. A command line here with one of theirs is answered with ours.\n\n"


def cells(kind: str, ours: str) -> tuple[str, str]:
    """Return what Bucketline has (an option, an argument, "by itself", "not done") and a note, of an entry of the words."""
    note = re.sub(r"(`[^`]*`)|(--[a-z][\w-]*)", lambda found: found[1] or f"`{found[2]}`", ours)
    if kind == "":
        return "the same name", ""
    if kind != "answers":
        name, _, more = ours.partition(", ")
        return f"`{name}`", more or FILES.get(kind, "")
    if one := ONE_OPTION.fullmatch(ours):
        return f"`{one[1]} {one[2]}`", one[3] or ""
    named = None if BY_ITSELF.search(ours) else NAMED.search(ours)
    here = "by itself" if named is None else f"`{named[1] or named[2]}`".replace("`bucketline`", "an argument")
    return "not done" if NOT_DONE.search(ours) else here, note.replace("(docs/limits.md)", "([limits](../limits.md))")


def page(name: str) -> str:
    """Return the page of a program: of two answers to an option, the one of the command that has it."""
    program = PROGRAMS[name]
    entries = [(table, kind, ours) for table in TITLES for kind, those in words()[table].items() for ours in those]
    theirs: dict[tuple[str, str, str], list[str]] = {SAME: []}
    for option in program["options"]:
        word = option.replace("_", "-")
        found = [one for one in entries if word in words()[one[0]][one[1]][one[2]]]
        if not found and f"--{word}" not in OWN:
            raise ValueError(f"{option} has no answer in bucketline/coming_from.toml; add one, or take it out of the page")
        trains = [one for one in found if one[0] == "train" and one[1] != "answers"]
        theirs.setdefault(SAME if f"--{word}" in OWN else (trains or found)[0], []).append(f"`{program['dashes']}{option}`")
    parts = [f"# Coming from {program['title']}\n\n{HEAD.format(version=program['version'])}{program['text']}"]
    for table, title in TITLES.items():
        parts.append(f"\n## {title}\n\n| theirs | here | |\n|---|---|---|\n")
        order = [one for one in (SAME, *entries) if one[0] == table and one in theirs]
        parts.extend("| {} | {} | {} |\n".format(", ".join(theirs[one]), *cells(*one[1:])) for one in order)
    return "".join(parts)


if __name__ == "__main__":
    for name in PROGRAMS:
        if "--write" in sys.argv:
            (FOLDER / f"{name}.md").write_text(page(name), encoding="utf-8")
        else:
            print(page(name))
