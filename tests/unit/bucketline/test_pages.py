"""The record of `python -m tests.e2e.screenshots`: a browser has tried the style and the script of the pages as they are."""

from __future__ import annotations

import json

from tests.page_checks import RECORD, check_record


def test_a_browser_has_tried_the_pages_as_they_are_now() -> None:
    check_record()
    assert "search and buckets" in json.loads(RECORD.read_text(encoding="ascii"))["checked"]["report"]
