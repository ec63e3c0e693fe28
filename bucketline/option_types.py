"""Options as fields of a dataclass: their metadata, and checks of the types that a program passes."""

from __future__ import annotations

import functools
from dataclasses import fields
from enum import StrEnum
from numbers import Integral, Real
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from bucketline.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator


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


def check_fields(options: object, cls: type, named: Callable[[str], str]) -> None:
    """Check the fields that a dataclass itself declares, of an object of it or of a subclass, by their annotations.

    Lists become tuples, and numpy's numbers Python's. `named` returns how messages call a field. Fields that are enums are left
    to the dataclass.
    """
    for name, hint in _own_hints(cls).items():
        value = getattr(options, name)
        if (found := _checked(named(name), value, hint)) is not value:
            object.__setattr__(options, name, found)


@functools.cache
def _own_hints(cls: Hashable) -> dict[str, Any]:
    own = vars(cls).get("__annotations__", {})
    return {name: hint for name, hint in get_type_hints(cls).items() if name in own}


def _checked(item: str, value: Any, hint: Any) -> object:  # noqa: ANN401, PLR0911 - any value and annotation, one case each
    is_optional = type(None) in get_args(hint)
    if value is None and is_optional:
        return None
    kind = next(one for one in get_args(hint) if one is not type(None)) if is_optional else hint
    or_none = " or None" if is_optional else ""
    if get_origin(kind) is tuple:
        return _checked_tuple(item, value, get_args(kind)[0])
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return value
    if kind is bool:
        if type(value).__name__ not in ("bool", "bool_"):
            raise unlike(item, value, f"True or False{or_none}")
        return bool(value)
    if kind is int:
        expect_int(item, value, f"an int{or_none}{_such_as(value)}")
        return value if type(value) is int else int(value)
    if kind is float:
        if isinstance(value, bool) or not isinstance(value, Real):
            raise unlike(item, value, f"a number{or_none}{_such_as(value)}")
        return float(value) if type(value).__module__ == "numpy" else value
    if kind is str and not isinstance(value, str | PurePath):
        raise unlike(item, value, f"a str{or_none}")
    return value


def _checked_tuple(item: str, value: object, kind: type) -> object:
    what = {str: "str", float: "numbers"}.get(kind, kind.__name__)
    if isinstance(value, kind):
        raise unlike(item, value, f"a tuple of {what}: write {item}={(value,)!r:.200}")
    if not isinstance(value, tuple | list):
        raise unlike(item, value, f"a tuple of {what}")
    accepted = Real if kind is float else kind
    if strange := [one for one in value if isinstance(one, bool) or not isinstance(one, accepted)]:
        raise UsageError(
            f"{item} is {value!r:.200} with an item of type {type(strange[0]).__name__}, expected a tuple of {what}"
        )
    return tuple(value)


def _such_as(value: object) -> str:
    """Return a number that may have been meant: that of a float or of text."""
    try:
        meant = float(value) if isinstance(value, float | str) else None
    except ValueError:
        return ""
    if meant is None or meant % 1:
        return "" if meant is None or isinstance(value, float) else f": write {meant:g} without quotes"
    return f": write {int(meant)}"
