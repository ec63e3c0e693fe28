"""The help of a command, from the dataclass of its options; and completion in bash, zsh and fish."""

from __future__ import annotations

import importlib
import inspect
import re
import shutil
import textwrap
from dataclasses import MISSING, dataclass
from enum import Enum
from typing import TYPE_CHECKING, Literal

from bucketline.dtype_names import dtype_name
from bucketline.errors import UsageError
from bucketline.options import Positional, app_of, options_of, sections_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from cyclopts import App

    from bucketline.options import Option


HELP = ("-h", "--help")
ALL = "all"
_FEW = 16  # a command with so many options or fewer shows all of them on its first screen
_MAX_WIDTH, _INDENT = 100, 24


def explained(option: Option, *, in_full: bool) -> str:
    """Return what is said of an option: its first sentence, or all of it with the default."""
    default = _shown(option.default)
    if in_full:
        says_default = default is None or re.search(r"\b[Dd]efault:", option.text)
        return option.text if says_default else f"{option.text} Default: {default}."
    short = re.split(r"[.:;](?= |$)", option.text, maxsplit=1)[0]
    return short if default is None else f"{short} [{default}]"


def _shown(default: object) -> str | None:
    if default is MISSING or default is None or isinstance(default, bool) or default in ((), ""):
        return None
    return dtype_name(str(default.value) if isinstance(default, Enum) else str(default))


def _leads(option: Option) -> bool:
    """Return True if help begins with an option: what is required, and what is given by place."""
    return option.is_required or option.by_place


def asked_for_help(args: Sequence[str]) -> str | None:
    """Return what follows `--help` in a command line: a section, or "" for the first screen; None without `--help`."""
    for at, word in enumerate(args):
        if word == "--":
            return None
        name, is_given, section = word.partition("=")
        if name in HELP:
            rest = [section] if is_given else args[at + 1 : at + 2]
            return rest[0] if rest and not rest[0].startswith("-") else ""
    return None


def command_help(prog: str, command: type, asked: str = "") -> str:
    """Return the help of a command: its first screen, a section of its options, or all of them."""
    options, sections = options_of(command), sections_of(command)
    leading = sorted((one for one in options if _leads(one)), key=lambda one: not one.is_required)
    about = inspect.getdoc(command) or ""
    if asked == ALL:
        parts = [*_paragraphs(about), "", *_listed("", leading, in_full=True)]
        for name in sections:
            if own := [one for one in _in(options, name) if not _leads(one)]:
                parts += ["", *_listed(name, own, in_full=True)]
        return _joined(_usage(prog, leading), parts)
    if asked:
        if asked not in sections:
            raise UsageError(f"--help {asked}: there is no such section, expected {', '.join([*filter(None, sections), ALL])}")
        return _joined(f"{prog}: {sections[asked]}", [*_listed("", _in(options, asked), in_full=True)])
    first = getattr(command, "FIRST", ())
    rest = [one for one in options if not _leads(one) and not one.is_in_file]
    rest.sort(key=lambda one: [*sections].index(one.section))
    shown = rest if len(rest) <= _FEW - len(leading) else [one for name in first for one in rest if one.field == name]
    summary, example = about.partition("\n\n")[0], re.search(r"^Example: (.*)$", about, re.MULTILINE)
    parts = [" ".join(summary.split()), *([f"Example: {example[1]}"] if example else [])]
    parts += ["", *_listed("", [*leading, *shown], in_full=False), ""]
    return _joined(_usage(prog, leading), [*parts, *_other_sections(options, sections, shown)])


def group_help(prog: str, description: str, commands: Mapping[str, type]) -> str:
    """Return the help of a program with several commands: a line for each."""
    parts = [" ".join(description.split()), "", *(_row(name, _line_about(command)) for name, command in commands.items())]
    return _joined(f"usage: {prog} COMMAND …", [*parts, "", f"`{prog} COMMAND --help` shows a command's options."])


def _line_about(command: type) -> str:
    return re.split(r"[:.;](?= |$)", " ".join((inspect.getdoc(command) or "").split()), maxsplit=1)[0]


def _in(options: Sequence[Option], section: str) -> list[Option]:
    return [one for one in options if one.section == section]


def _usage(prog: str, leading: Sequence[Option]) -> str:
    given = (one.typed if one.is_required or one.typed.startswith("[") else f"[{one.typed}]" for one in leading)
    return " ".join(["usage:", prog, *given, "[OPTIONS]"])


def _other_sections(options: Sequence[Option], sections: dict[str, str], shown: Sequence[Option]) -> Iterator[str]:
    hidden = [one for one in options if not _leads(one) and not one.is_in_file and one not in shown]
    if not hidden:
        yield f"--help {ALL}: the same in full"
        return
    yield "More options:"
    for name, about in sections.items():
        if name and (own := [one for one in _in(options, name) if not one.is_in_file]):
            yield _row(f"--help {name}", f"{len(own)}: {about}")
    yield _row(f"--help {ALL}", "everything, in full")


def _listed(title: str, options: Sequence[Option], *, in_full: bool) -> Iterator[str]:
    if title and options:
        yield f"{title}:"
    typed, in_file = ([one for one in options if one.is_in_file is is_in_file] for is_in_file in (False, True))
    yield from (_row(one.typed, explained(one, in_full=in_full)) for one in typed)
    if in_file:
        yield f"Only in {in_file[0].file}:"
    yield from (_row(one.typed, explained(one, in_full=in_full)) for one in in_file)


def _row(typed: str, text: str) -> str:
    """Return an option and its text in two columns, or the text below where the option is long."""
    lines = textwrap.wrap(text, _width() - _INDENT, break_on_hyphens=False, break_long_words=False) or [""]
    head = f"  {typed}"
    if len(head) >= _INDENT - 1:
        return "\n".join([head, *(" " * _INDENT + line for line in lines)])
    return "\n".join([f"{head:<{_INDENT}}{lines[0]}", *(" " * _INDENT + line for line in lines[1:])])


def _width() -> int:
    return min(shutil.get_terminal_size((80, 40)).columns, _MAX_WIDTH)


def _joined(head: str, parts: Sequence[str]) -> str:
    wrapped = [textwrap.fill(head, _width(), subsequent_indent="  ", break_on_hyphens=False), ""]
    for part in parts:
        is_row = part.startswith(" ")
        wrapped.append(part if is_row else "\n".join(_filled(line) for line in part.split("\n")))
    return "\n".join(wrapped) + "\n"


def _paragraphs(text: str) -> list[str]:
    """Return a docstring's paragraphs, each in one line, and an empty one between two."""
    return "\n\n".join(" ".join(one.split()) for one in text.split("\n\n")).split("\n")


def _filled(line: str) -> str:
    return textwrap.fill(line, _width(), break_long_words=False, break_on_hyphens=False) if line else ""


# ------------------------------------------------------------------------------------------------------------------ completion
# Completion of command lines in bash, zsh and fish: scripts that cyclopts writes of all commands, those of packages too.


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
