"""Report pages: texts are escaped; and the record that a browser has tried their style and script as they are."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from jinja2 import UndefinedError

from bucketline.errors import UsageError
from bucketline.pages.page import Finding, Section, document, parts, refuse_page
from tests.page_checks import RECORD, check_record
from tests.pages import parsed


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
