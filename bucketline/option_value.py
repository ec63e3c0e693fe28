"""Options whose value has several parts and is typed as one word: `cosine:0.1`, `0.9999:cpu`, `logit-normal:0,1`."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable  # noqa: TC003 - a command's types are read at run time
from dataclasses import dataclass, fields
from enum import StrEnum
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar, get_args, get_type_hints

from bucketline.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Hashable
    from typing import Self

_PARTS = re.compile(r"[A-Z][A-Z0-9_]*|\[|\]|[^A-Z\[\]]+")
_KINDS = {int: r"[+-]?\d+", float: r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"}


@dataclass(frozen=True)
class OptionValue:
    """The value of an option, as a frozen dataclass: `parse` reads the word that `str` writes.

    Each of `FORMS` is a way to spell it: words in capitals are fields, brackets enclose what may be left out and then has its
    default, and everything else is literal: "wsd[:STEPS[:FLOOR]]". What precedes the first field is the field `name`, if the
    class has one. Fields are numbers or enums. `LIMITS` has for a field what its number has to be;
    `METAVAR` stands for the forms in a help that would be too wide.
    """

    FORMS: ClassVar[tuple[str, ...]]
    EXAMPLE: ClassVar[str]
    METAVAR: ClassVar[str] = ""
    LIMITS: ClassVar[dict[str, tuple[str, Callable[[float], bool]]]] = {}

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            UsageError: if a number is outside its limits, or fields are set that do not belong to each other.
        """
        for field, (expected, is_met) in self.LIMITS.items():
            if (value := getattr(self, field)) is not None and not (math.isfinite(value) and is_met(value)):
                raise UsageError(f"{field.replace('_', ' ')} is {value}, expected {expected}")
        if fault := self.fault():
            raise UsageError(fault)
        if self._spelling() is None:
            raise UsageError(f"{self!r} cannot be spelt, expected {' or '.join(self.forms())}")

    def fault(self) -> str | None:
        """Return what is wrong with numbers that are each within their limits; None if nothing is."""
        return None

    @classmethod
    def parse(cls, text: str, option: str) -> Self:
        """Return the value that a text spells.

        Raises:
            UsageError: if it spells none; the message names the option.
        """
        for form in cls.FORMS:
            if found := re.fullmatch(_pattern(cls, form), text):
                try:
                    given = {name: _kind(cls, name)(part) for name, part in found.groupdict().items() if part is not None}
                    return cls(**_named(cls, form), **given)
                except UsageError as error:
                    raise UsageError(f"{option} is {text}: {error}") from None
        raise UsageError(f"{option} is {text!r:.80}, expected {' or '.join(cls.forms())}, such as {cls.EXAMPLE}")

    def __str__(self) -> str:
        """Return how it is typed; fields that have their default are left out where they may be."""
        return str(self._spelling())

    def _spelling(self) -> str | None:
        """Return how it is typed; None if no form has the fields that are set."""
        changed = {field.name for field in fields(self) if getattr(self, field.name) != field.default}
        for form in self.FORMS:
            named = _named(type(self), form)
            is_same = all(getattr(self, name) == value for name, value in named.items())
            if is_same and changed - {"name"} <= _fields_of(form) and (text := _spelt(self, form, changed)) is not None:
                return text
        return None

    @classmethod
    def forms(cls) -> list[str]:
        """Return the ways to spell a value, with the words of enums."""
        return [
            "".join(
                "|".join(kind) if part[0].isupper() and issubclass(kind := _kind(cls, part.lower()), StrEnum) else part
                for part in _PARTS.findall(form)
            )
            for form in cls.FORMS
        ]

    @classmethod
    def metavar(cls) -> str:
        """Return what stands for the value in a help."""
        return cls.METAVAR or "|".join(cls.forms())


def parse_values(options: Any, named: Callable[[str], str]) -> None:  # noqa: ANN401 - a dataclass
    """Parse the words in those fields of a dataclass that are declared as an `OptionValue`; `named`: a field as it is typed.

    Raises:
        UsageError: if a word is not one of its field's.
    """
    command: type = type(options)
    for name, kind in value_fields(command).items():
        if isinstance(value := getattr(options, name), str | int | float):
            object.__setattr__(options, name, kind.parse(str(value), named(name)))
        elif value is not None and not isinstance(value, kind):
            raise UsageError(f"{named(name)} is {value!r:.80}, expected a {kind.__name__} or its spelling, {kind.EXAMPLE}")


@functools.cache
def value_fields(command: Hashable) -> dict[str, type[OptionValue]]:
    """Return the fields of a dataclass that are declared as an `OptionValue`, or as one or None."""
    hints = get_type_hints(command)
    found = {name: [one for one in (hint, *get_args(hint)) if is_option_value(one)] for name, hint in hints.items()}
    return {name: kinds[0] for name, kinds in found.items() if kinds}


def is_option_value(hint: object) -> bool:
    """Return whether a type is an `OptionValue`'s."""
    return isinstance(hint, type) and issubclass(hint, OptionValue)


def _pattern(cls: type[OptionValue], form: str) -> str:
    written = {"[": "(?:", "]": ")?"}
    return "".join(
        f"(?P<{part.lower()}>{_regex(cls, part.lower())})" if part[0].isupper() else written.get(part) or re.escape(part)
        for part in _PARTS.findall(form)
    )


def _regex(cls: type[OptionValue], name: str) -> str:
    kind = _kind(cls, name)
    return "|".join(kind) if issubclass(kind, StrEnum) else _KINDS[kind]


def _kind(cls: type[OptionValue], name: str) -> Any:  # noqa: ANN401 - a type, without None
    hint = get_type_hints(cls)[name]
    return next(one for one in (*get_args(hint), hint) if one is not NoneType)


def _fields_of(form: str) -> set[str]:
    return {part.lower() for part in _PARTS.findall(form) if part[0].isupper()}


def _named(cls: type[OptionValue], form: str) -> dict[str, Any]:
    """Return the field `name` of a form, if the class has one."""
    return {"name": _kind(cls, "name")(re.match(r"[^A-Z\[]*", form)[0].rstrip(":"))} if "name" in get_type_hints(cls) else {}  # type: ignore[index]


def _spelt(value: OptionValue, form: str, changed: set[str]) -> str | None:
    """Return a value in a form, without the brackets that hold no field that is `changed`; None if a field is missing."""
    stack: list[tuple[list[str], bool]] = [([], True)]
    for part in _PARTS.findall(form):
        if part == "[":
            stack.append(([], False))
        elif part == "]":
            inner, is_needed = stack.pop()
            stack[-1] = ([*stack[-1][0], *(inner * is_needed)], stack[-1][1] or is_needed)
        elif part[0].isupper():
            stack[-1] = ([*stack[-1][0], _number(getattr(value, part.lower()))], stack[-1][1] or part.lower() in changed)
        else:
            stack[-1][0].append(part)
    text = "".join(stack[0][0])
    return None if str(None) in text else text


def _number(value: object) -> str:
    """Return a number as short as it can be read back.

    >>> _number(5.0), _number(0.9999), _number(1e-08), _number(20000)
    ('5', '0.9999', '1e-08', '20000')
    """
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)
