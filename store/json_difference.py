"""Where two JSON documents differ first."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bucketline.store.typed_json import Json


def is_given(value: Json, field: str) -> bool:
    """Say whether a JSON object has a field, named as `first_difference` does, be it null.

    >>> is_given({"rules": {"crop": None}}, "rules.crop"), is_given({"rules": {}}, "rules.crop")
    (True, False)
    """
    for key in field.split("."):
        if not isinstance(value, dict) or key not in value:
            return False
        value = value[key]
    return True


def first_difference(stored: Json, present: Json, at: str) -> tuple[str, Json, Json] | None:
    """Name the first field in which two JSON values differ, with both values; None where they are equal."""
    if isinstance(stored, dict) and isinstance(present, dict):
        for key in sorted({*stored, *present}):
            if found := first_difference(stored.get(key), present.get(key), f"{at}.{key}" if at else key):
                return found
        return None
    return None if stored == present and type(stored) is type(present) else (at, stored, present)
