"""Options as fields of a dataclass: their metadata, and checks of the types that a program passes."""

from __future__ import annotations

import functools
from dataclasses import fields
from enum import StrEnum
from numbers import Integral, Real
from pathlib import PurePath
from types import NoneType
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
    is_optional = NoneType in get_args(hint)
    if value is None and is_optional:
        return None
    kind = next(one for one in get_args(hint) if one is not NoneType) if is_optional else hint
    if get_origin(kind) is tuple:
        inner = get_args(kind)[0]
        if not isinstance(value, tuple | list) or not all(_is_a(one, inner) for one in value):
            raise unlike(item, value, f"a tuple of {inner.__name__}, such as {(value,)!r:.200}")
        return tuple(value)
    if kind not in _EXPECTED:
        return value
    if not _is_a(value, kind):
        raise unlike(item, value, _EXPECTED[kind][1] + (" or None" if is_optional else ""))
    return kind(value) if type(value).__module__ == "numpy" else value


def _is_a(value: object, kind: type) -> bool:
    """Return True if a value is of a type; True and False, numpy's as well, are no numbers."""
    if type(value).__name__ in ("bool", "bool_"):
        return kind is bool
    return isinstance(value, _EXPECTED[kind][0] if kind in _EXPECTED else kind)
