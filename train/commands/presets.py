"""`bucketline train presets`: what comes with the package, to read or to copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from bucketline.options import Arg, Positional
from bucketline.train.run_file import preset_names, read_run_file


@dataclass(frozen=True, kw_only=True)
class TrainPresets:
    """Print the presets that come with the package, or one of them: a start for your own.

    Example: bucketline train presets sdxl-lora > mine.toml
    """

    name: Annotated[Positional[str | None], Arg(metavar="[NAME]", words=(*preset_names(),))] = None
    """Preset to print; none: a line for each."""

    def run(self) -> int:
        if self.name is not None:
            print(read_run_file(self.name), end="")
            return 0
        for name in preset_names():
            print(f"{name:12} {read_run_file(name).partition(chr(10))[0].removeprefix('# ')}")
        return 0
