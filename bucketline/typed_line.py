"""A command line, read once: each option with the words of its value, and the words that are given by place.

What is wrong with it before a value is parsed is refused here, by the name that was typed; tyro parses the rest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline import coming_from
from bucketline.dtype_names import choice_of, dtype_name
from bucketline.errors import UsageError
from bucketline.help_screen import options_of, suggestion

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from bucketline.help_screen import Option

_NUMBER = re.compile(r"-?[.0-9]")  # not the name of an option, though it may begin with a hyphen
_END = "--"  # of the options: what follows is given by place


@dataclass(frozen=True, slots=True, kw_only=True)
class TypedOption:
    """An option as it was typed; or, without one, a word given by place, or what only tyro knows (`--inner.size 2`)."""

    name: str = ""  # with hyphens; "" of a word given by place, "--" of all after it
    values: tuple[str, ...] = ()
    option: Option | None = None

    @property
    def is_by_place(self) -> bool:
        """True if it is words that are given by place."""
        return self.name in ("", _END)


@dataclass(frozen=True, slots=True)
class TypedLine:
    """The arguments of a command, in the order in which they were typed."""

    command: type
    arguments: tuple[TypedOption, ...]

    @property
    def given(self) -> frozenset[str]:
        """The fields of the options that are given."""
        return frozenset(one.option.field for one in self.arguments if one.option)

    @property
    def by_place(self) -> list[str]:
        """The words that are given by place."""
        return [word for one in self.arguments if one.is_by_place for word in one.values]

    @property
    def is_clear(self) -> bool:
        """False if some words may be an option's or given by place, which tyro decides."""
        return all(one.is_by_place or (one.option and not one.option.is_many) for one in self.arguments)

    def values(self, field: str) -> list[str]:
        """Return the words given as an option's value, in all its places."""
        return [word for one in self.arguments if one.option and one.option.field == field for word in one.values]

    def checked(self, prog: str, in_file: Collection[str] = ()) -> list[str]:
        """Return the words for tyro. `in_file`: the fields that a file gives.

        A choice is spelt as the command has it; an option that may be typed without a value has one; one that may be repeated
        occurs once, with all its values.

        Raises:
            UsageError: if a value is missing, not a number or not a choice; if an argument is missing, or is one too many.
        """
        words, repeated, by_place, is_clear = list[str](), dict[str, list[str]](), list[str](), self.is_clear
        for one in self.arguments:
            if one.option is not None and one.option.repeats:
                repeated.setdefault(one.option.words[-1], []).extend(_values(one, one.option))
            elif one.option is not None:
                words += _spelt(one, one.option)
            elif one.name == _END or (is_clear and one.is_by_place):
                by_place += one.values
            else:
                words += filter(None, [one.name, *one.values])
        self._expect_number(prog, in_file, is_clear=is_clear)
        words += [word for name, values in repeated.items() for word in (name, *values)]
        return [*words, _END, *by_place] if by_place else words

    def _expect_number(self, prog: str, in_file: Collection[str], *, is_clear: bool) -> None:
        """Check that what is required is given, and nothing more by place than the command takes."""
        options, by_place, given = options_of(self.command), self.by_place, {*self.given, *in_file}
        places = [one for one in options if not (one.words or one.is_in_file)]
        needed = [one for one in places if one.is_required and not one.is_many]
        lacking = [one.typed for one in needed[len(by_place) :]] if is_clear else []
        lacking += [one.typed for one in options if one.words and one.is_required and one.field not in given]
        if lacking:
            *most, last = lacking
            raise UsageError(f"{prog} needs {', '.join(most)}{' and ' * bool(most)}{last} (`{prog} --help` explains them)")
        if is_clear and not any(one.is_many for one in places):
            for option, value in zip(places, by_place, strict=False):
                if option.choices and value not in option.choices:
                    *most, last = option.choices
                    raise UsageError(f"{option.typed} is {value!r:.80}, expected {', '.join(most)} or {last}")
            if len(by_place) > len(places):
                takes = " and ".join(one.typed for one in places) or "only options"
                raise UsageError(f"{prog} does not take {by_place[len(places)]!r:.80}, it takes {takes}")


def read_line(command: type, args: Sequence[str]) -> TypedLine:
    """Return a command line's options and the words that are given by place.

    Raises:
        UsageError: if an option is unknown; the message names the nearest, or what the command has for it.
    """
    by_word = _by_word(command)
    found, words = list[TypedOption](), [*args]
    while words:
        word = words.pop(0)
        name, is_joined, value = word.partition("=")
        name = _hyphenated(name)
        option = by_word.get(name)
        if word == _END:
            found.append(TypedOption(name=_END, values=tuple(words)))
            break
        if not word.startswith("-") or _NUMBER.match(word):
            found.append(TypedOption(values=(word,)))
            continue
        if option is None and name.partition(".")[0] not in by_word:  # of an option that is a dataclass itself
            raise _unknown(command, name)
        values = [value] if option and is_joined else []
        most = len(words) + 1 if option is None or option.is_many else int(option.takes_word)
        while words and len(values) < most and not _is_name(words[0], by_word):
            values.append(words.pop(0))
        found.append(TypedOption(name=name if option else word, values=tuple(values), option=option))
    return TypedLine(command, tuple(found))


def field_of(name: str) -> str:
    """Return the field of an option.

    >>> field_of("--no-new-plan")
    'new_plan'
    """
    return _hyphenated(name).removeprefix("--no-").removeprefix("--").replace("-", "_")


def program_of(command: type) -> str:
    """Return the folder of a command's module, by which `coming_from.toml` has its words: `train`, `ingest`."""
    return command.__module__.removeprefix("bucketline.").partition(".")[0]


def _hyphenated(name: str) -> str:
    return name.replace("_", "-") if name.startswith("--") else name


def _is_name(word: str, by_word: Collection[str]) -> bool:
    return word.startswith("--") or word.partition("=")[0] in by_word


def _by_word(command: type) -> dict[str, Option]:
    """Return a command's options by the words that name them; where files give options as well, a flag by its opposite too."""
    options = options_of(command)
    found = {word: one for one in options for word in one.words}
    for word, one in [*found.items()] if getattr(command, "FROM_FILES", False) else []:
        if one.is_flag and one.alone is None:
            found |= {f"--{prefix}{field_of(word).replace('_', '-')}": one for prefix in ("", "no-")}
    return found


def _unknown(command: type, name: str) -> UsageError:
    """Return the refusal of an option that a command does not have."""
    options, field = options_of(command), field_of(name)
    if found := next((one for one in options if one.is_in_file and one.field == field), None):
        return UsageError(f"{name} is set in {found.file}, not on the command line: {field}, in its [{found.section}]")
    known = [word for one in options for word in one.words]
    if elsewhere := coming_from.answer(program_of(command), name, known):
        return UsageError(f"there is no option {name}; {elsewhere}")
    nearest = suggestion(name, known)
    return UsageError(f"there is no option {name}{nearest} (`--help all` lists them)")


def _spelt(one: TypedOption, option: Option) -> list[str]:
    """Return an option for tyro."""
    if option.value:
        first, *rest = _values(one, option)
        return [f"{option.words[-1]}={first}", *rest]
    if option.alone is not None:
        return [f"{one.name}={next(iter(one.values), option.alone)}"]
    if one.values and not (option.takes_word and one.name in option.words):
        raise UsageError(f"{one.name} is {one.values[0]!r:.80}, expected no value")
    return [one.name]


def _values(one: TypedOption, option: Option) -> list[str]:
    """Return the values of an option, as the command spells them.

    Raises:
        UsageError: if there is none, or one is not a number or not a choice.
    """
    if not one.values:
        raise UsageError(f"{one.name} has no value, expected {option.value}")
    return [value if value == str(None) else _valid(one.name, value, option) for value in one.values]


def _valid(name: str, value: str, option: Option) -> str:
    if option.choices:
        if (found := choice_of(value, option.choices)) is not None:
            return found
        shown = [*map(dtype_name, option.choices)]
        raise UsageError(f"{name} is {value:.80}, expected {', '.join(shown)}{suggestion(value, shown)}")
    if option.number is not None:
        try:
            option.number(value)
        except ValueError as error:
            kind = "a whole number" if option.number is int else "a number"
            raise UsageError(f"{name} is {value!r:.80}, expected {kind}") from error
    return value
