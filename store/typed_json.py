"""Read JSON into frozen dataclasses, strictly: every field present, every value of its declared type, nothing unknown.

Used for whatever is read back from a disk that one does not trust (manifest, loader state, checkpoint state).
"""

from __future__ import annotations

import dataclasses
import functools
import types
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from collections.abc import Hashable

T = TypeVar("T")

MAX_INT = 1 << 63  # counts, sizes and seeds: none of ours is negative
MAX_DEPTH = 40  # of free-form values

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"


class TypedJsonError(ValueError):
    """A JSON value is not of the declared type; the message names the field by its path."""


def decode(cls: type[T], value: object, at: str = "") -> T:
    """Build a `cls` (a dataclass) out of parsed JSON.

    Raises:
        TypedJsonError: naming the field, what was found and what was expected.
    """
    result: T = _decode(cls, value, at or cls.__name__)
    return result


def encode(value: object) -> Json:
    """Turn dataclasses, tuples and dictionaries into what `json.dumps` writes; the inverse of `decode`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _decode(hint: Any, value: object, at: str) -> Any:  # noqa: ANN401, PLR0911 - one return per kind of type
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        options = get_args(hint)
        if value is None and type(None) in options:
            return None
        inner = [option for option in options if option is not type(None)]
        return _decode(inner[0], value, at) if len(inner) == 1 else _shallow(value, at, MAX_DEPTH)  # Json: any parsed value
    if origin is tuple:
        items = _expect(value, list, at)
        return tuple(_decode(get_args(hint)[0], item, f"{at}[{i}]") for i, item in enumerate(items))
    if origin is dict:
        entries = _expect(value, dict, at)
        return {key: _decode(get_args(hint)[1], item, f"{at}.{key}") for key, item in entries.items()}
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
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
    if hint in (int, float, str, bool):
        return _expect(value, hint, at)
    raise TypeError(f"{at} is declared as {hint}, which has no JSON form")


def _shallow(value: object, at: str, depth: int) -> object:
    """Give a parsed value back, unless it is nested beyond reason."""
    if depth == 0:
        raise TypedJsonError(f"{at} is nested more than {MAX_DEPTH} deep")
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
