"""`bucketline train presets`: what comes with the package, to read or to copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

from bucketline.command_line import parse_options
from bucketline.train.preset import preset_names, read_preset

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, kw_only=True)
class TrainPresets:
    """Print the presets that come with the package, or one of them: a start for your own.

    Example: bucketline train presets sdxl-lora > mine.toml
    """

    name: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[NAME]")] = None
    """Preset to print; none: a line for each."""


def main(args: Sequence[str], prog: str) -> int:
    """Parse the command line and print."""
    asked = parse_options(TrainPresets, args, prog)
    if asked.name is not None:
        print(read_preset(asked.name), end="")
        return 0
    for name in preset_names():
        print(f"{name:12} {read_preset(name).partition(chr(10))[0].removeprefix('# ')}")
    return 0
