"""Options as fields of a dataclass: values of several parts or with a unit, typed as one word (`0.9999:cpu`, `24GiB`)."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable  # noqa: TC003 - a command's types are read at run time
from dataclasses import dataclass, fields
from enum import StrEnum
from numbers import Integral, Real
from pathlib import PurePath
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from bucketline.errors import UsageError
from bucketline.files.paths import redacted

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Mapping
    from typing import Self


_PARTS = re.compile(r"[A-Z][A-Z0-9_]*|\[|\]|[^A-Z\[\]]+")
ABOVE_0 = "a number above 0", lambda value: value > 0
ONE_OR_MORE = "1 or more", lambda value: value >= 1
A_SHARE = "0 to 1", lambda value: 0 <= value <= 1


def _number(value: object) -> str:
    """Return a number as short as it can be read back.

    >>> _number(5.0), _number(0.9999), _number(1e-08), _number(20000)
    ('5', '0.9999', '1e-08', '20000')
    """
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


@dataclass(frozen=True, slots=True)
class FieldForm:
    """How a field of an `OptionValue` is typed: `Annotated[int, IN_BYTES]`."""

    pattern: str
    read: Callable[[str], Any]
    write: Callable[[Any], str] = _number
    shown: str = ""  # what stands for it among the ways to spell a value; empty: the field's name


def in_units(units: Mapping[str, int], kind: type = int, shown: str = "") -> FieldForm:
    """Return the form of a number with a unit, in any case; the field has it in the unit that counts 1.

    `units`: what each counts. A value is written with the one that is shortest; of several names for one, with the longest.
    """
    number = rf"[0-9]{{1,17}}(?:\.[0-9]{{1,20}})?{r'(?:e[+-]?[0-9]{1,3})?' * (kind is float)}"
    counts = {name.lower(): count for name, count in units.items()}
    names = {count: name for name, count in sorted(units.items(), key=lambda unit: len(unit[0]))}

    def read(text: str) -> float:
        match = re.fullmatch(rf"({number}) ?(.*)", text)
        assert match is not None
        count = counts[match[2].lower()]
        if kind is float:
            return float(match[1]) * count
        whole, _, part = match[1].partition(".")
        scale: int = 10 ** len(part)
        amount, rest = divmod(int(whole + part) * count, scale)
        if rest and count == 1:
            raise UsageError(f"{text} is not a whole number")
        return amount

    def write(amount: float) -> str:
        found = [(amount // count, name) for count, name in names.items() if count > 1 and amount and amount % count == 0]
        return min((f"{_number(number)}{name}" for number, name in [*found, (amount, names[1])]), key=len)

    return FieldForm(rf"{number} ?(?i:{'|'.join(counts)})", read, write, shown)


_FORMS = {
    int: FieldForm(r"[+-]?[0-9]{1,18}", int),
    float: FieldForm(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?", float),
}
_PREFIXES = [("", 0), ("K", 1), ("M", 2), ("G", 3), ("T", 4)]
IN_BYTES = in_units(
    {f"{prefix}{unit}": 1024**n for prefix, n in _PREFIXES for unit in ("", "i", "iB") if prefix or not unit}
    | {f"{prefix}B": 1000**n for prefix, n in _PREFIXES},
    shown="SIZE",
)
IN_SECONDS = in_units({"s": 1, "m": 60, "h": 3600, "d": 86400}, kind=float, shown="TIME")


@dataclass(frozen=True)
class OptionValue:
    """The value of an option, as a frozen dataclass: `parse` reads the word that `str` writes.

    Each of `FORMS` is a way to spell it: words in capitals are fields, brackets enclose what may be left out and then has its
    default, and everything else is literal: "wsd[:STEPS[:FLOOR]]". What precedes the first field is the field `name`, if the
    class has one. Fields are numbers, enums, or what their `FieldForm` says. `LIMITS` has for a field what its number has to
    be; `METAVAR` stands for the forms in a help that would be too wide, and `EXPECTED` in a refusal that would not be clear.
    """

    FORMS: ClassVar[tuple[str, ...]]
    EXAMPLE: ClassVar[str] = ""
    METAVAR: ClassVar[str] = ""
    EXPECTED: ClassVar[str] = ""
    LIMITS: ClassVar[dict[str, tuple[str, Callable[[float], bool]]]] = {}

    def __post_init__(self) -> None:
        """Check the fields."""
        for one in fields(self):
            value, (expected, is_met) = getattr(self, one.name), self.LIMITS.get(one.name, ("a number", lambda _: True))
            if isinstance(value, int | float) and not (math.isfinite(value) and is_met(value)):
                raise UsageError(f"{one.name.replace('_', ' ')} is {value}, expected {expected}")
        if fault := self.fault():
            raise UsageError(fault)
        if self._spelling() is None:
            raise UsageError(f"{self!r} cannot be spelt, expected {' or '.join(self.forms())}")

    def __bool__(self) -> Literal[True]:
        return True  # for type checkers: `value and value.field` is None only without a value

    def fault(self) -> str | None:
        """Return what is wrong with numbers that are each within their limits; None if nothing is."""
        return None

    @classmethod
    def parse(cls, text: str, option: str) -> Self:
        """Return the value that a text spells; spaces around it, and after a comma, mean nothing."""
        for form in cls.FORMS:
            if found := re.fullmatch(_pattern(cls, form), text.strip()):
                try:
                    given = {name: _form(cls, name).read(part) for name, part in found.groupdict().items() if part is not None}
                    return cls(**_named(cls, form), **given)
                except UsageError as error:
                    if not cls.EXPECTED:
                        raise UsageError(f"{option} is {text}: {error}") from None
        raise UsageError(f"{option} is {redacted(text)!r:.80}, expected {cls.expected()}")

    def __str__(self) -> str:
        """Return how it is typed; fields that have their default are left out where they may be."""
        return str(self._spelling())

    def _spelling(self) -> str | None:
        """Return how it is typed; None if no form has the fields that are set."""
        kind = type(self)
        for form in self.FORMS:
            named = _named(kind, form)
            for parts in _variants(form):
                given = {part: getattr(self, part.lower()) for part in parts if part[0].isupper()}
                rest = [one for one in fields(self) if one.name.upper() not in given]
                is_same = all(getattr(self, one.name) == named.get(one.name, one.default) for one in rest)
                if is_same and None not in given.values():
                    return "".join(_form(kind, part.lower()).write(given[part]) if part in given else part for part in parts)
        return None

    @classmethod
    def forms(cls) -> list[str]:
        """Return the ways to spell a value, with the words of enums."""
        return [
            "".join((part[0].isupper() and _form(cls, part.lower()).shown) or part for part in _PARTS.findall(form))
            for form in cls.FORMS
        ]

    @classmethod
    def expected(cls) -> str:
        """Return what a refusal says of it."""
        return cls.EXPECTED or f"{' or '.join(cls.forms())}, such as {cls.EXAMPLE}"

    @classmethod
    def metavar(cls) -> str:
        """Return what stands for the value in a help."""
        return cls.METAVAR or "|".join(cls.forms())


@dataclass(frozen=True, kw_only=True)
class ByteSize(OptionValue):
    """A number of bytes.

    >>> str(ByteSize.parse("1.5 kb", "it")), ByteSize.parse("2g", "it")
    ('1500B', ByteSize(num_bytes=2147483648))
    """

    FORMS = ("NUM_BYTES",)
    EXPECTED = "a number of bytes above 0, such as 24GiB (of 2^30 bytes, also 24G) or 24GB (of 10^9)"
    LIMITS: ClassVar = {"num_bytes": ABOVE_0}

    num_bytes: Annotated[int, IN_BYTES]


@dataclass(frozen=True, kw_only=True)
class Duration(OptionValue):
    """A time span.

    >>> Duration.parse("90m", "it").seconds, str(Duration(seconds=86400.0))
    (5400.0, '1d')
    """

    FORMS = ("SECONDS",)
    EXPECTED = "a number and s, m, h or d, such as 24h, 90m, 7d or 0s"

    seconds: Annotated[float, IN_SECONDS]


def as_option(field: str) -> str:
    """Return a field as a command line has it: with hyphens."""
    return "--" + field.replace("_", "-")


def parse_values(options: Any, named: Callable[[str], str] = as_option) -> None:  # noqa: ANN401 - a dataclass
    """Parse the words in those fields of a dataclass that are declared as an `OptionValue`; `named`: a field as it is typed."""
    command: type = type(options)
    for name, kind in value_fields(command).items():
        value = getattr(options, name)
        if isinstance(value, str | int | float | PurePath) and not isinstance(value, bool):
            object.__setattr__(options, name, kind.parse(str(value), named(name)))
        elif value is not None and not isinstance(value, kind):
            raise UsageError(f"{named(name)} is {value!r:.80}, expected {kind.expected()}")


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
        f"(?P<{part.lower()}>{_form(cls, part.lower()).pattern})"
        if part[0].isupper()
        else written.get(part) or re.escape(part).replace(",", ", *")
        for part in _PARTS.findall(form)
    )


def _form(cls: type[OptionValue], name: str) -> FieldForm:
    hint = get_type_hints(cls, include_extras=True)[name]
    if get_origin(hint) is Literal:
        return FieldForm("|".join(map(re.escape, get_args(hint))), str)
    kinds = [hint] if hasattr(hint, "__metadata__") else [one for one in (*get_args(hint), hint) if one is not NoneType]
    if own := getattr(kinds[0], "__metadata__", None):
        return own[0]  # type: ignore[no-any-return]
    if issubclass(kinds[0], StrEnum):
        return FieldForm("|".join(map(re.escape, kinds[0])), kinds[0], shown="|".join(kinds[0]))
    return _FORMS[kinds[0]]


def _named(cls: type[OptionValue], form: str) -> dict[str, Any]:
    """Return the field `name` of a form, if the class has one."""
    if "name" not in get_type_hints(cls):
        return {}
    before = re.match(r"[^A-Z\[]*", form)
    return {"name": _form(cls, "name").read(before[0].rstrip(":"))} if before else {}


@functools.cache
def _variants(form: str) -> list[list[str]]:
    """Return the parts of a form with its brackets or without, the shortest first.

    >>> ["".join(parts) for parts in _variants("a[:B[:C]][@D]")]
    ['a', 'a@D', 'a:B', 'a:B@D', 'a:B:C', 'a:B:C@D']
    """
    if not (innermost := re.search(r"\[([^\[\]]*)\]", form)):
        return [_PARTS.findall(form)]
    before, after = form[: innermost.start()], form[innermost.end() :]
    every = {"".join(parts): parts for inner in ("", innermost[1]) for parts in _variants(before + inner + after)}
    return sorted(every.values(), key=len)


# ---------------------------------------------------------------------------------------------------------------- option types
# Options as fields of a dataclass: their metadata, and checks of the types that a program passes.


class OnResume(StrEnum):
    """The answer of a resumed run to another value of an option than the checkpoint's."""

    FREE = "free"  # takes it
    WARN = "warn"  # takes it and logs both values
    FIXED = "fixed"  # refuses it, with both values


RESUME_FREE, RESUME_FIXED = {"resume": OnResume.FREE}, {"resume": OnResume.FIXED}
"""The `metadata` of an option's field; one without them is OnResume.WARN."""
DECIDES_NOTHING = {"decides": False}
"""The `metadata` of a field of LoaderConfig that by itself does not decide what is delivered: a state resumes with another."""


def options_on_resume(options: type, kind: OnResume) -> Iterator[str]:
    """Yield the names of the fields that a resumed run treats so."""
    return (one.name for one in fields(options) if one.metadata.get("resume", OnResume.WARN) is kind)


def expect(item: str, value: object, kind: Any, expected: str) -> None:  # noqa: ANN401 - as `isinstance` takes it
    """Check that a value is of a type."""
    if not isinstance(value, kind):
        raise unlike(item, value, expected)


def expect_int(item: str, value: object, expected: str = "an int") -> None:
    """Check that a value is a whole number, which True is not."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise unlike(item, value, expected)


def unlike(item: str, value: object, expected: str) -> UsageError:
    """Return the error for a value of the wrong type."""
    return UsageError(f"{item} is {value!r:.200} of type {type(value).__name__}, expected {expected}")


_EXPECTED: dict[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "True or False"),
    int: ((Integral,), "an int"),
    float: ((Real,), "a number"),
    str: ((str, PurePath), "a str"),
}


def check_fields(options: object, cls: type, named: Callable[[str], str]) -> None:
    """Check the fields that a dataclass itself declares, of an object of it or of a subclass, by their annotations.

    Lists become tuples, and numpy's numbers Python's. `named` returns how messages call a field. Fields that are enums or paths
    are left to the dataclass.
    """
    for name, hint in _own_hints(cls).items():
        value = getattr(options, name)
        if (found := _checked(named(name), value, hint)) is not value:
            object.__setattr__(options, name, found)


@functools.cache
def _own_hints(cls: Hashable) -> dict[str, Any]:
    own = vars(cls).get("__annotations__", {})
    return {name: hint for name, hint in get_type_hints(cls).items() if name in own}


def _checked(item: str, value: Any, hint: Any) -> object:  # noqa: ANN401 - any value and annotation
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    is_optional, words = NoneType in members, words_of(members)
    if (value is None and is_optional) or (isinstance(value, str) and value in words):
        return value
    kinds = [one for one in members if one is not NoneType and get_origin(one) is not Literal]
    kind = kinds[0] if kinds and (is_optional or len(kinds) == 1) else hint
    if get_origin(kind) is tuple:
        inner = get_args(kind)[0]
        if not isinstance(value, tuple | list) or not all(_is_a(one, inner) for one in value):
            raise unlike(item, value, f"a tuple of {inner.__name__}, such as {(value,)!r:.200}")
        return tuple(value)
    if kind not in _EXPECTED:
        return value
    if not _is_a(value, kind):
        raise unlike(item, value, " or ".join([_EXPECTED[kind][1], *map(repr, words), *["None"] * is_optional]))
    return kind(value) if type(value).__module__ == "numpy" else value


def words_of(members: Iterable[Any]) -> list[Any]:
    """Return the words of those types that are a `Literal`."""
    return [word for one in members if get_origin(one) is Literal for word in get_args(one)]


def _is_a(value: object, kind: type) -> bool:
    """Return True if a value is of a type; True and False, numpy's as well, are no numbers."""
    if type(value).__name__ in ("bool", "bool_"):
        return kind is bool
    return isinstance(value, _EXPECTED[kind][0] if kind in _EXPECTED else kind)
