"""JSON into dataclasses: every field there, of its type, and nothing unknown."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import pytest
from jinja2 import UndefinedError

from bucketline.errors import UsageError
from bucketline.pages.page import Finding, Section, document, parts, refuse_page
from bucketline.typed_json import Json, TypedJsonError, decode, encode
from tests.browser import RECORD, check_record
from tests.pages import parsed


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


# Report pages: texts are escaped; and the record that a browser has tried their style and script as they are.


def test_a_browser_has_tried_the_pages_as_they_are_now() -> None:
    check_record()
    assert "search and buckets" in json.loads(RECORD.read_text(encoding="ascii"))["checked"]["report"]


def test_html_that_no_template_made_is_text(tmp_path: Path) -> None:
    sections = [
        Section(anchor="a", title="<i>a", note="<i>b", body="<i>c"),
        Section(anchor="d", title="d", body=parts.table(("<i>e",), [("<i>f\n",)])),
    ]
    finding = Finding(level="error", title="<i>g", detail="<i>h", anchor="a")
    page = document(
        title="<i>", subtitle="<i>j", made_by="<i>k", findings=[finding], tiles=[("<i>l", "<i>m")], sections=sections
    )
    (tmp_path / "page.html").write_bytes(page)
    found = parsed(tmp_path / "page.html")
    assert "i" not in found.tags
    assert {f"<i>{letter}" for letter in "abcefghjklm"} <= set(re.findall("<i>.", found.text))
    assert r"<i>f\n" in found.text


def test_a_name_that_a_template_was_not_given_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="'losses' is undefined"):
        document("train/runs.html", title="", subtitle="", made_by="", summaries=[{}], overview=[], reasons=[])


def test_a_page_replaces_one_of_ours_and_nothing_else(tmp_path: Path) -> None:
    page, other, link = (tmp_path / name for name in ("page.html", "other.html", "link.html"))
    page.write_bytes(document(title="", subtitle="", made_by=""))
    other.write_text("<!doctype html><p>mine", encoding="ascii")
    link.symlink_to(page)
    refuse_page(page)
    for taken in (other, link):
        with pytest.raises(UsageError, match=f"{taken.name} exists; name a file that does not, or delete it"):
            refuse_page(taken)
