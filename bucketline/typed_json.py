"""Strict JSON to frozen dataclasses: every field present, every value of its declared type, no unknown fields.

Used for all JSON read back from disk, which is not trusted (manifest, loader state, checkpoint state).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

T = TypeVar("T")

MAX_INT = 1 << 63  # counts, sizes and seeds, never negative
_MAX_DEPTH = 40  # for free-form values

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"


class TypedJsonError(ValueError):
    """A JSON value does not have the declared type; the message has the field's path."""


def decode(cls: type[T], value: object, at: str = "") -> T:
    """Return a `cls` (a dataclass) built from parsed JSON."""
    result: T = _decode(cls, value, at or cls.__name__)
    return result


def decode_field(cls: type[Any], name: str, value: object, at: str) -> Any:  # noqa: ANN401 - of the field's type
    """Return the value of one field of a dataclass, from parsed JSON or TOML."""
    hints = _hints(cls)  # type: ignore[arg-type]
    return _decode(hints[name], value, at)


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


def _decode(hint: Any, value: object, at: str) -> Any:  # noqa: ANN401, PLR0911, PLR0912 - one return per kind of type
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        options = get_args(hint)
        if value is None and type(None) in options:
            return None
        inner = [option for option in options if option is not type(None)]
        if inner == [int, float]:
            inner = [type(value)] if type(value) is float else [int]
        if inner == [str, Path]:
            inner = [str]
        return _decode(inner[0], value, at) if len(inner) == 1 else _shallow(value, at, _MAX_DEPTH)  # Json: any parsed value
    if isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields"):  # a NamedTuple: a list of its fields
        items = _expect(value, list, at)
        if len(items) != len(hint._fields):
            raise TypedJsonError(f"{at} is {_short(value)}, expected {len(hint._fields)} values: {', '.join(hint._fields)}")
        hints = _hints(hint)
        return hint(*(_decode(hints[name], item, f"{at}.{name}") for name, item in zip(hint._fields, items, strict=True)))
    if origin in (tuple, list):
        items = _expect(value, list, at)
        if get_args(hint)[0] is str and {*map(type, items)} == {str}:  # a million ids, say
            return origin(items)
        return origin(_decode(get_args(hint)[0], item, f"{at}[{i}]") for i, item in enumerate(items))
    if origin is Literal:
        if value not in get_args(hint):
            raise TypedJsonError(f"{at} is {_short(value)}, expected one of {', '.join(map(str, get_args(hint)))}")
        return value
    if origin is dict:
        entries = _expect(value, dict, at)
        return {key: _decode(get_args(hint)[1], item, f"{at}.{key}") for key, item in entries.items()}
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if type(value) is hint:  # decoded before
            return value
        return _decode_dataclass(hint, _expect(value, dict, at), at)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        text = _expect(value, str, at)
        if text not in set(hint):
            raise TypedJsonError(f"{at} is {text!r}, expected one of {', '.join(hint)}")
        return hint(text)
    if hint is float and type(value) is int:
        return float(value)
    if hint is int and not 0 <= _expect(value, int, at) < MAX_INT:
        raise TypedJsonError(f"{at} is {_short(value)}, expected 0 to {MAX_INT}")
    if hint is Path:
        return Path(_expect(value, str, at))
    if hint in (int, float, str, bool):
        return _expect(value, hint, at)
    raise TypeError(f"{at} is declared as {hint}, which has no JSON form")


def _shallow(value: object, at: str, depth: int) -> object:
    """Return a parsed value unchanged."""
    if depth == 0:
        raise TypedJsonError(f"{at} is nested more than {_MAX_DEPTH} deep")
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _shallow(inner, at, depth - 1)
    return value


@functools.cache
def _hints(cls: Hashable) -> dict[str, Any]:
    return get_type_hints(cls)


def _decode_dataclass(cls: type[Any], entries: dict[str, object], at: str) -> object:
    hints = _hints(cls)  # type: ignore[arg-type]
    names = [field.name for field in dataclasses.fields(cls)]
    if missing := [name for name in names if name not in entries]:
        raise TypedJsonError(f"{at} lacks the field {missing[0]!r}")
    if unknown := [name for name in entries if name not in names]:
        raise TypedJsonError(f"{at} has an unknown field {unknown[0]!r}")
    try:
        return cls(**{name: _decode(hints[name], entries[name], f"{at}.{name}") for name in names})
    except TypedJsonError:
        raise
    except ValueError as error:
        raise TypedJsonError(f"{at}: {error}") from error


def _expect(value: object, kind: type[T], at: str) -> T:
    if type(value) is not kind:
        raise TypedJsonError(f"{at} is {_short(value)}, expected {kind.__name__}")
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
