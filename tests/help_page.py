"""The page of first screens: what `--help` of each command has, before and now.

`python -m tests.help_page --write` makes docs/first-screens.md.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from bucketline.help_screen import command_help, options_of
from bucketline.ingest.cli import COMMANDS as INGEST
from bucketline.loader.cli import COMMANDS as LOADER
from bucketline.store.cli import COMMANDS as STORE
from bucketline.train.commands.export_model import ExportModel
from bucketline.train.commands.memory import TrainMemory
from bucketline.train.commands.presets import TrainPresets
from bucketline.train.commands.report import TrainReport
from bucketline.train.config import TrainConfig
from tests.commands import ROOT

PAGE = ROOT / "docs" / "first-screens.md"
COMMANDS_OF: dict[str, type] = {
    **{f"ingest {name}": INGEST[name] for name in INGEST},
    **{f"store {name}": STORE[name] for name in STORE},
    **{f"loader {name}": LOADER[name] for name in LOADER},
    "bucketline train": TrainConfig,
    "bucketline train presets": TrainPresets,
    "bucketline train report": TrainReport,
    "bucketline train memory": TrainMemory,
    "bucketline export-model": ExportModel,
}
BEFORE = {
    "ingest pack": (206, 51),
    "ingest import": (111, 29),
    "ingest scan": (107, 32),
    "ingest prompts": (39, 9),
    "ingest peek": (93, 24),
    "ingest previews": (40, 11),
    "store info": (30, 6),
    "store report": (51, 14),
    "store ls": (37, 9),
    "store verify": (26, 5),
    "store get": (31, 6),
    "store export": (54, 13),
    "store drop": (33, 7),
    "store compact": (34, 8),
    "store merge": (31, 6),
    "store repair": (19, 3),
    "store restore": (28, 5),
    "store cache": (16, 2),
    "store push": (28, 5),
    "store pull": (37, 9),
    "loader plan": (108, 25),
    "loader peek": (98, 23),
    "loader seen": (42, 10),
    "loader serve": (57, 13),
    "loader stats": (11, 2),
    "bucketline train": (354, 86),
    "bucketline train presets": (12, 0),
    "bucketline train report": (18, 1),
    "bucketline train memory": (16, 1),
    "bucketline export-model": (25, 4),
}
"""Lines and options of `--help` in 80 columns, of the commit before help had sections."""
_ABOUT = """\
# First screens

What `--help` of each command has in 80 columns: before it had sections (commit `04a6be22`), and now, on its first screen and by
`--help all`. What is given by place, such as STORE, is not counted. Options *in files* are set only in a run file or a data set
file. `python -m tests.help_page --write` makes this page, and a test holds it.

| command | lines before | lines now | options before | first screen | in all | in files |
|---|---:|---:|---:|---:|---:|---:|
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    """The size of a command's help."""

    lines: int
    shown: int  # options on the first screen
    typed: int  # options of the command line in all
    in_file: int


def screens() -> dict[str, Screen]:
    """Return the size of each command's help, in a terminal as wide as COLUMNS says."""
    return {name: _screen(name, command) for name, command in COMMANDS_OF.items()}


def _screen(name: str, command: type) -> Screen:
    lines, options = command_help(name, command).splitlines(), options_of(command)
    typed = [one for one in options if one.words and not one.is_in_file]
    shown = [one for one in typed if any(line.startswith(f"  {one.typed}") for line in lines)]
    return Screen(lines=len(lines), shown=len(shown), typed=len(typed), in_file=sum(one.is_in_file for one in options))


def page() -> str:
    """Return the page."""
    rows = []
    for name, one in screens().items():
        lines, options = BEFORE[name]
        counts = (lines, one.lines, options, one.shown, one.typed, one.in_file or "")
        rows.append(f"| `{name}` | {' | '.join(map(str, counts))} |\n")
    return _ABOUT + "".join(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the page")
    if parser.parse_args().write:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page())
