"""Report pages in the browser of this machine; on one that has none, the record that a browser tried them holds instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser import Browser, find_browser
from tests.commands import call
from tests.page_checks import check_page, check_record
from tests.unit.store.report.conftest import write_store


@pytest.mark.slow
def test_a_report_works_in_a_browser(tmp_path: Path) -> None:
    program = find_browser()
    if program is None:
        check_record()
        return
    store = write_store(tmp_path / "photos.store", "constant", "duplicates", "crops", scaling_factor=0.45)
    assert call("store", "report", store.path, "-o", tmp_path / "report.html").code == 0
    with Browser(program) as browser:
        assert "search and buckets" in check_page(browser, tmp_path / "report.html")
        # a page that does what is forbidden is noticed
        text = (
            (tmp_path / "report.html")
            .read_text(encoding="utf-8")
            .replace('"use strict";', '"use strict"; console.log("mine");')
        )
        (tmp_path / "changed.html").write_text(text, encoding="utf-8")
        with pytest.raises(AssertionError):
            check_page(browser, tmp_path / "changed.html")
