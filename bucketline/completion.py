"""Completion of command lines in bash, zsh and fish: commands, options, sections of the help, and the values of choices.

A shell's script asks `bucketline --complete WORD…` at each TAB, so what other packages add is completed as well.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import tyro  # noqa: TC002 - it reads the annotations

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bucketline.help_screen import Option

_GROUPS = ("ingest", "store", "loader")
_ALONE = ("train", "export-model", "completion", "--help", "--version")  # words after `bucketline` besides the groups

_SCRIPTS = {
    "bash": r"""
_bucketline() {
    local line
    COMPREPLY=()
    while IFS= read -r line; do
        COMPREPLY+=("${line%%$'\t'*}")
    done < <(bucketline --complete "${COMP_WORDS[@]:0:COMP_CWORD+1}" 2>/dev/null)
}
complete -o default -F _bucketline bucketline ingest store loader
""",
    "zsh": r"""
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
_bucketline() {
    local -a found
    found=("${(@f)$(bucketline --complete "${(@)words[1,CURRENT]}" 2>/dev/null)}")
    found=("${(@)found%%$'\t'*}")
    if [[ -n "${found[1]}" ]]; then compadd -a found; else _files; fi
}
compdef _bucketline bucketline ingest store loader
""",
    "fish": r"""
function __bucketline
    set -l found (bucketline --complete (commandline -opc) (commandline -ct) 2>/dev/null)
    if test (count $found) -gt 0
        printf '%s\n' $found
    else
        __fish_complete_path (commandline -ct)
    end
end
for program in bucketline ingest store loader
    complete -c $program -f -a "(__bucketline)"
end
""",
}


@dataclass(frozen=True, kw_only=True)
class Completion:
    """Print what makes a shell complete commands, options and values: a line for its startup file.

    bash: `eval "$(bucketline completion bash)"` in ~/.bashrc. zsh: `eval "$(bucketline completion zsh)"` in ~/.zshrc.
    fish: `bucketline completion fish | source` in ~/.config/fish/config.fish.

    Example: bucketline completion bash
    """

    shell: tyro.conf.Positional[Literal["bash", "zsh", "fish"]]
    """Shell: bash, zsh or fish."""

    def run(self) -> int:
        print(_SCRIPTS[self.shell].strip())
        return 0


def candidates(words: Sequence[str]) -> list[tuple[str, str]]:
    """Return what may stand for the last of a command line's words, with what is said of it; nothing where a file's name may.

    >>> candidates(["store", "verif"])
    [('verify', 'command')]
    >>> [word for word, _ in candidates(["bucketline", "train", "--precision", "b"])]
    ['bf16']
    """
    *before, word = _rejoined(words)
    return [(one, about) for one, about in _all(before, word) if one.startswith(word)]


def _rejoined(words: Sequence[str]) -> list[str]:
    """Return the words with `--option=value` as bash gives it, in three words, as two."""
    joined = [one for n, one in enumerate(words) if one != "=" or n < 2 or not words[n - 1].startswith("-")]
    return [*joined, ""] if words[-1] == "=" and joined[-1:] != [""] else joined


def _all(before: Sequence[str], word: str) -> Iterator[tuple[str, str]]:
    program, *rest = (before[0].rpartition("/")[2], *before[1:]) if before else ("bucketline",)
    if program == "bucketline":
        if not rest:
            yield from ((one, "command") for one in (*_GROUPS, *_ALONE))
            return
        program, *rest = rest
    if program in _GROUPS:
        commands = importlib.import_module(f"bucketline.{program}.cli").COMMANDS
        if not rest:
            yield from ((one, "command") for one in (*commands, "version", "--help"))
            return
        name, *rest = rest
        command = commands.get(name)
    elif program == "train":
        commands = importlib.import_module("bucketline.train.commands").COMMANDS
        if not rest:
            yield from ((one, "command") for one in commands)
        if rest and rest[0] in commands:
            command, rest = commands[rest[0]], rest[1:]
        else:
            command = importlib.import_module("bucketline.train.config").TrainConfig
    else:
        command = importlib.import_module("bucketline.cli").COMMANDS.get(program)
    if command is not None:
        yield from _of_command(command, rest, word)


def _of_command(command: type, rest: Sequence[str], word: str) -> Iterator[tuple[str, str]]:
    """Yield what may follow the words after a command's name."""
    from bucketline.help_screen import ALL, HELP, options_of, sections_of

    options = [one for one in options_of(command) if not one.is_in_file]
    by_word = {word: one for one in options for word in one.words}
    last = rest[-1] if rest else ""
    name, is_given, _ = word.partition("=")
    if last in HELP:
        yield from [*((one, about) for one, about in sections_of(command).items() if one), (ALL, "everything, in full")]
    elif (valued := by_word.get(last)) is not None and valued.value:
        yield from _values(valued)
    elif is_given and (valued := by_word.get(name)) is not None:
        yield from ((f"{name}={value}", about) for value, about in _values(valued))
    elif word.startswith("-"):
        yield from ((name, one.explained(in_full=False)) for one in options for name in one.words)
        yield HELP[-1], "options and their meaning"
    else:
        yield from (found for one in options if not one.words for found in _values(one))


def _values(option: Option) -> Iterator[tuple[str, str]]:
    return ((value, option.field.replace("_", " ")) for value in option.choices)
