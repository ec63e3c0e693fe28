"""The words of a command line against a command's options, before they are parsed: each refusal names what was typed."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bucketline.errors import UsageError
from bucketline.help_screen import hyphenated, options_of, refuse_unknown, suggestion

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bucketline.help_screen import Option

_NUMBER = re.compile(r"-?[.0-9]")  # not the name of an option, though it may begin with a hyphen


@dataclass(slots=True)
class _Found:
    """The contents of a command line, as far as they are known without parsing it."""

    by_place: list[str] = field(default_factory=list)
    names: set[str] = field(default_factory=set)  # fields of the options
    is_clear: bool = True  # False: some words may belong to an option or stand by themselves


def refuse_wrong(
    command: type, args: Sequence[str], prog: str, *, from_file: Sequence[str] = (), appends: bool = False
) -> None:
    """Check names, values and number of the arguments in a command line. `appends`: each tuple is given value by value.

    `from_file`: what a file gives, spelt as on a command line; it is valid.

    Raises:
        UsageError: if an option is unknown, lacks its value, or has one that is not a number or not a choice; if an argument is
            missing, or there is one too many.
    """
    refuse_unknown(command, args)
    options = [one for one in options_of(command) if not one.is_in_file]
    by_word = {word: one for one in options for word in one.words}
    found = _Found()
    words = [*args]
    while words:
        word = words.pop(0)
        name, is_given, value = word.partition("=")
        option = by_word.get(hyphenated(name))
        if word == "--":
            found.by_place += words
            break
        if option is None:
            if not word.startswith("-") or _NUMBER.match(word):
                found.by_place.append(word)
            elif word.startswith("--"):
                found.is_clear = False  # the opposite of a flag, or an option of an option: `--inner.size`
            else:
                raise UsageError(f"there is no option {word}{suggestion(word, [*by_word])} (`--help all` lists them)")
            continue
        found.names.add(option.field)
        if not option.value:
            continue
        if not is_given:
            if not words or hyphenated(words[0].partition("=")[0]) in by_word or words[0] == "--":
                raise UsageError(f"{name} has no value, expected {option.value}")
            value = words.pop(0)
        _refuse_value(option, name, value)
        if option.is_many and not appends:
            found.is_clear = False
            while words and hyphenated(words[0].partition("=")[0]) not in by_word and not words[0].startswith("--"):
                _refuse_value(option, name, words.pop(0))
    in_file = {hyphenated(word.partition("=")[0]) for word in from_file}
    given = {one.field for one in options if in_file & {*one.words}}
    _refuse_number(options, found, found.names | given, prog)


def _refuse_value(option: Option, name: str, value: str) -> None:
    """Check that the value of an option, called by `name`, is a number if it takes only these."""
    if option.number is None or value == "None":
        return
    try:
        option.number(value)
    except ValueError as error:
        kind = "a whole number" if option.number is int else "a number"
        raise UsageError(f"{name} is {value!r:.80}, expected {kind}") from error


def _refuse_number(options: Sequence[Option], found: _Found, given: set[str], prog: str) -> None:
    """Check that what is required is given, and nothing more by place than the command takes."""
    places = [one for one in options if not one.words]
    needed = [one for one in places if one.is_required and not one.is_many]
    lacking = [one.typed for one in needed[len(found.by_place) :]] if found.is_clear else []
    lacking += [one.typed for one in options if one.words and one.is_required and one.field not in given]
    if lacking:
        *most, last = lacking
        raise UsageError(f"{prog} needs {', '.join(most)}{' and ' * bool(most)}{last} (`{prog} --help` explains them)")
    if found.is_clear and not any(one.is_many for one in places):
        for option, value in zip(places, found.by_place, strict=False):
            if option.choices and value not in option.choices:
                *most, last = option.choices
                raise UsageError(f"{option.typed} is {value!r:.80}, expected {', '.join(most)} or {last}")
        if len(found.by_place) > len(places):
            takes = " and ".join(one.typed for one in places) or "only options"
            raise UsageError(f"{prog} does not take {found.by_place[len(places)]!r:.80}, it takes {takes}")
