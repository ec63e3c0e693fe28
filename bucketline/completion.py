"""Completion of command lines in bash, zsh and fish: scripts that cyclopts writes of all commands, those of packages too."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from bucketline.options import Positional, app_of

if TYPE_CHECKING:
    from cyclopts import App

_GROUPS = ("ingest", "store", "loader")


@dataclass(frozen=True, kw_only=True)
class Completion:
    """Print a script that makes a shell complete commands, options and choices. Write it again after an update.

    bash, zsh: write it to a file that ~/.bashrc or ~/.zshrc sources. fish: to ~/.config/fish/completions/bucketline.fish.

    Example: bucketline completion bash > ~/.bucketline-completion
    """

    shell: Positional[Literal["bash", "zsh", "fish"]]
    """Shell: bash, zsh or fish."""

    def run(self) -> int:
        for program in (whole := program_of_all(), *(whole[name] for name in _GROUPS)):
            print(program.generate_completion(shell=self.shell))
        return 0


def program_of_all() -> App:
    """Return cyclopts' application of `bucketline`, with every command."""
    from cyclopts import App

    whole = App(name="bucketline")
    for group in _GROUPS:
        own = App(name=group)
        _add_all(own, f"{group}.cli")
        whole.command(own)
    train = app_of(importlib.import_module("bucketline.train.config").TrainConfig, "train")
    _add_all(train, "train.commands")
    whole.command(train)
    _add_all(whole, "cli")
    return whole


def _add_all(program: App, module: str) -> None:
    for name, command in importlib.import_module(f"bucketline.{module}").COMMANDS.items():
        program.command(app_of(command, name))
