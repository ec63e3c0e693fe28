"""The words of other programs: `coming_from.toml` has Bucketline's for each, read when an option is unknown."""

from __future__ import annotations

import functools
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

FILE = Path(__file__).with_suffix(".toml")
OWNERS = {"train": "bucketline train", "loader": "loader plan", "ingest": "ingest pack"}
"""The command that has the options of a table."""


@functools.cache
def words() -> dict[str, dict[str, dict[str, list[str]]]]:
    """Return the file: by program and kind, what Bucketline has, and what it is called elsewhere."""
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def answer(program: str, word: str, options: Collection[str] = ()) -> str | None:
    """Return what a program has for an option of another one, as the end of a sentence; None if the file does not know it.

    `options`: those of the command, among which the answer may not be.

    >>> answer("train", "--lr", ["--learning-rate"]), answer("train", "rank"), answer("train", "--cake")
    ('here it is --learning-rate', '`bucketline train` has --lora-rank', None)
    """
    name = word.removeprefix("--").replace("_", "-")
    for kind, table in words().get(program, {}).items():
        for ours, others in table.items():
            if name in others:
                return _sentence(program, kind, ours, is_here=ours.split(" ")[0].strip(",").partition("[")[0] in options)
    return None


def _sentence(program: str, kind: str, ours: str, *, is_here: bool) -> str:
    match kind:
        case "options":
            return f"here it is {ours}" if is_here else f"`{OWNERS[program]}` has {ours}"
        case "run_file":
            return f"here it is {ours}, in a run file"
        case "data_set_file":
            return f"it is {ours}, in a data set file"
    return ours
