"""JSON into dataclasses: every field there, of its type, and nothing unknown."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import pytest

from bucketline.typed_json import Json, TypedJsonError, decode, encode


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True, kw_only=True)
class Inner:
    count: int
    share: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Outer:
    name: str
    is_open: bool
    inner: Inner
    many: tuple[Inner, ...]
    table: dict[str, int]
    perhaps: Inner | None
    colour: Colour
    free: Json
    place: Path

    def __post_init__(self) -> None:
        if self.name == "forbidden":
            raise ValueError("this name is forbidden")


GOOD: dict[str, object] = {
    "name": "n",
    "is_open": True,
    "inner": {"count": 1, "share": 2},
    "many": [{"count": 3, "share": 0.5}],
    "table": {"a": 1},
    "perhaps": None,
    "colour": "red",
    "free": {"anything": [1, None, "x"]},
    "place": "folder/file",
}


def test_a_value_comes_back_from_its_own_json() -> None:
    value = decode(Outer, GOOD)
    assert value.inner == Inner(count=1, share=2.0)
    assert value.many == (Inner(count=3, share=0.5),)
    assert decode(Outer, json.loads(json.dumps(encode(value)))) == value


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("name", 5, "Outer.name is 5, expected str"),
        ("name", "forbidden", "Outer: this name is forbidden"),
        ("is_open", 1, "Outer.is_open is 1, expected bool"),
        ("inner", {"count": True, "share": 0.0}, "Outer.inner.count is True, expected int"),
        ("inner", {"count": 1.0, "share": 0.0}, "Outer.inner.count is 1.0, expected int"),
        ("inner", {"count": -1, "share": 0.0}, "Outer.inner.count is -1, expected 0 to"),
        ("inner", {"count": 1 << 63, "share": 0.0}, "Outer.inner.count is 9223372036854775808, expected 0 to"),
        ("inner", {"count": 1}, "Outer.inner lacks the field 'share'"),
        ("inner", {"count": 1, "share": 0.0, "more": 1}, "Outer.inner has an unknown field 'more'"),
        ("inner", None, "Outer.inner is None, expected dict"),
        ("many", [{"count": "x", "share": 0.0}], r"Outer.many\[0\].count is 'x', expected int"),
        ("many", {}, "Outer.many is {}, expected list"),
        ("table", {"a": "b"}, "Outer.table.a is 'b', expected int"),
        ("table", [], r"Outer.table is \[\], expected dict"),
        ("perhaps", 5, "Outer.perhaps is 5, expected dict"),
        ("colour", "blue", "Outer.colour is 'blue', expected one of red"),
        ("colour", ["red"], "Outer.colour is .*expected str"),
        ("place", 5, "Outer.place is 5, expected str"),
        ("name", ["x" * 1000], "Outer.name is .{57}.*expected str"),
    ],
)
def test_a_value_of_another_type_is_refused_with_the_field_named(field: str, value: object, message: str) -> None:
    with pytest.raises(TypedJsonError, match=message) as error:
        decode(Outer, {**GOOD, field: value})
    assert len(str(error.value)) < 200


@pytest.mark.parametrize("field", GOOD)
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(TypedJsonError, match=f"Outer lacks the field '{field}'"):
        decode(Outer, {key: value for key, value in GOOD.items() if key != field})


def test_what_has_no_json_form_is_refused() -> None:
    with pytest.raises(TypeError, match="bytes has no JSON form"):
        encode({"a": b"x"})
