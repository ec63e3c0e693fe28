"""Strict JSON to frozen dataclasses: every field present, every value of its declared type, no unknown fields.

Used for all JSON read back from disk, which is not trusted (manifest, loader state, checkpoint state).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import marshal
import types
from enum import StrEnum
from functools import partial
from itertools import repeat
from operator import call
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

T = TypeVar("T")

MAX_INT = 1 << 63  # counts, sizes and seeds, never negative
SHARED = "IS_SHARED"  # class attribute of dataclasses without fields that change: equal values are decoded once
_MAX_DEPTH = 40  # for free-form values

_Reader: TypeAlias = "Callable[[Any], Any]"  # from parsed JSON to a value of one type
Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"


class TypedJsonError(ValueError):
    """A JSON value does not have the declared type; the message has the field's path."""


def decode(cls: type[T], value: object, at: str = "") -> T:
    """Return a `cls` (a dataclass) built from parsed JSON."""
    result: T = _read(cls, value, at or cls.__name__)
    return result


def decode_field(cls: type[Any], name: str, value: object, at: str) -> Any:  # noqa: ANN401 - of the field's type
    """Return the value of one field of a dataclass, from parsed JSON or TOML."""
    return _read(get_type_hints(cls)[name], value, at)


def encode(value: object) -> Json:
    """Return dataclasses, tuples and dictionaries as JSON values; the inverse of `decode`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [*value] if {*map(type, value)} == {str} else [encode(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def as_toml(value: object) -> str:
    """Return a value as TOML has it; None, for which it has nothing, as a text.

    >>> as_toml(("a.store", Path("b"))), as_toml(None), as_toml(1e-05), as_toml(True)
    ('["a.store", "b"]', '"None"', '1e-05', 'true')
    """
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(as_toml, value))}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


class _MisfitError(Exception):
    """A value does not have the declared type; the message begins behind the value's path."""


def _read(hint: Any, value: object, at: str) -> Any:  # noqa: ANN401 - of the type
    try:
        return _reader(hint)(value)
    except _MisfitError as error:
        raise TypedJsonError(f"{at}{error}") from error.__cause__


@functools.cache
def _reader(hint: Any) -> _Reader:  # noqa: ANN401, PLR0911 - one return per kind of type
    """Return the function that reads values of a type: a manifest may have 60,000 values, of a few types."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        options = [option for option in inner if option is not type(None)]
        read = _reader(options[0]) if options == [str, Path] or len(options) == 1 else _shallow  # Json: any parsed value
        if options == [int, float]:
            read = lambda value: value if type(value) is float else _read_int(value)  # noqa: E731
        return read if len(options) == len(inner) else lambda value: None if value is None else read(value)
    if origin in (tuple, list):
        return partial(_read_items, origin, inner[0], _reader(inner[0]))
    if origin is dict:
        return partial(_read_entries, _reader(inner[1]))
    if origin is Literal:
        return partial(_read_choice, inner)
    if not isinstance(hint, type):
        raise TypeError(f"{hint} has no JSON form")
    if dataclasses.is_dataclass(hint):
        hints = get_type_hints(hint)
        read = partial(_read_dataclass, hint, {field.name: _reader(hints[field.name]) for field in dataclasses.fields(hint)})
        return partial(_read_shared, read, {}) if hasattr(hint, SHARED) else read
    if hasattr(hint, "_fields"):  # a NamedTuple: a list of its fields
        return partial(_read_tuple, hint, [*map(_reader, get_type_hints(hint).values())])
    if issubclass(hint, StrEnum):
        return lambda value: hint(_read_choice(tuple(hint), _expect(str, value)))
    if hint is Path:
        return lambda value: Path(_expect(str, value))
    if hint is float:
        return lambda value: float(value) if type(value) is int else _expect(float, value)
    return _read_int if hint is int else partial(_expect, hint)


def _read_each(form: str, keys: Collection[object], readers: Iterable[_Reader], values: Iterable[object]) -> list[Any]:
    """Return the values of a list or an object; an error names the key, in its form."""
    found: list[object] = []
    try:
        found.extend(map(call, readers, values))  # one reader may be repeated
    except _MisfitError as error:
        error.args = (f"{form.format([*keys][len(found)])}{error}",)
        raise
    return found


def _read_items(kind: type[Any], of: Any, read: _Reader, value: object) -> object:  # noqa: ANN401 - a type
    items = _expect(list, value)
    if of is str and {*map(type, items)} == {str}:  # a million ids, say
        return kind(items)
    return kind(_read_each("[{}]", range(len(items)), repeat(read), items))


def _read_entries(read: _Reader, value: object) -> object:
    entries = _expect(dict, value)
    return dict(zip(entries, _read_each(".{}", entries, repeat(read), entries.values()), strict=True))


def _read_tuple(cls: type[Any], readers: list[_Reader], value: object) -> object:
    items, names = _expect(list, value), cls._fields
    if len(items) != len(names):
        raise _MisfitError(f" is {_short(value)}, expected {len(names)} values: {', '.join(names)}")
    return cls._make(_read_each(".{}", names, readers, items))


def _read_dataclass(cls: type[Any], readers: dict[str, _Reader], value: object) -> object:
    if type(value) is cls:  # decoded before
        return value
    entries = _expect(dict, value)
    if entries.keys() != readers.keys():
        missing = [name for name in readers if name not in entries]
        unknown = [name for name in entries if name not in readers]
        raise _MisfitError(f" lacks the field {missing[0]!r}" if missing else f" has an unknown field {unknown[0]!r}")
    found = _read_each(".{}", readers, readers.values(), map(entries.__getitem__, readers))
    try:
        return cls(**dict(zip(readers, found, strict=True)))
    except ValueError as error:
        raise _MisfitError(f": {error}") from error


def _read_shared(read: _Reader, known: dict[bytes, object], value: Any) -> object:  # noqa: ANN401 - parsed JSON
    if (key := marshal.dumps(value, 0)) not in known:  # a third of the time that `repr` takes
        known[key] = read(value)
    return known[key]


def _read_choice(choices: tuple[Any, ...], value: object) -> Any:  # noqa: ANN401 - one of the choices
    if value not in choices:
        raise _MisfitError(f" is {_short(value)}, expected one of {', '.join(map(str, choices))}")
    return value


def _read_int(value: object) -> int:
    if type(value) is not int or not 0 <= value < MAX_INT:
        raise _MisfitError(f" is {_short(value)}, expected {'int' if type(value) is not int else f'0 to {MAX_INT}'}")
    return value


def _shallow(value: object, depth: int = _MAX_DEPTH) -> object:
    """Return a parsed value unchanged."""
    if depth == 0:
        raise _MisfitError(f" is nested more than {_MAX_DEPTH} deep")
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _shallow(inner, depth - 1)
    return value


def _expect(kind: type[T], value: object) -> T:
    if type(value) is not kind:
        raise _MisfitError(f" is {_short(value)}, expected {kind.__name__}")
    return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def is_given(value: Json, field: str) -> bool:
    """Return True if a JSON object has the field, even if it is null. Fields are named as in `first_difference`.

    >>> is_given({"rules": {"crop": None}}, "rules.crop"), is_given({"rules": {}}, "rules.crop")
    (True, False)
    """
    for key in field.split("."):
        if not isinstance(value, dict) or key not in value:
            return False
        value = value[key]
    return True


def differences(stored: Json, present: Json, at: str) -> Iterator[tuple[str, Json, Json]]:
    """Yield each field in which two JSON values differ, with both values; `at` is the field that they are of.

    >>> list(differences({"a": 1, "b": {"c": True}}, {"a": 2, "b": {"c": True, "d": None}}, ""))
    [('a', 1, 2)]
    """
    if isinstance(stored, dict) and isinstance(present, dict):
        for key in sorted({*stored, *present}):
            yield from differences(stored.get(key), present.get(key), f"{at}.{key}" if at else key)
    elif stored != present or type(stored) is not type(present):
        yield at, stored, present


def first_difference(stored: Json, present: Json, at: str) -> tuple[str, Json, Json] | None:
    """Return the first field in which two JSON values differ, with both values; None if they are equal."""
    return next(differences(stored, present, at), None)
