"""Checks of a report page in a browser: no message, no request, a search that finds, a slider that moves, both themes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from tests.browser import Browser
from tests.commands import ROOT

RECORD = ROOT / "docs" / "images" / "pages.json"
_SHOWN = "[...document.querySelectorAll('[data-gallery] figure')].filter(f => f.offsetParent !== null)"
_FRAMES = "[...document.querySelectorAll('[data-frames]')].filter(f => f.offsetParent !== null).map(f => f.dataset.frames)"


def digest_of_page_code() -> str:
    """Return the digest of the style, the script and the frame of every page, and of the page with a slider."""
    names = ("pages/page.css", "pages/page.js", "pages/page.html", "pages/parts.html", "train/runs.html")
    return hashlib.sha256(b"".join((ROOT / "bucketline" / name).read_bytes() for name in names)).hexdigest()


def check_record() -> None:
    """Check that a browser has tried the style and the script of the pages as they are."""
    record = json.loads(RECORD.read_text(encoding="ascii"))
    assert record["page_code"] == digest_of_page_code(), (
        "the pages have changed: run `make demo`, then `python -m tests.e2e.screenshots build/demo`, and look at docs/images"
    )
    for checks in record["checked"].values():
        assert {"no message in the console", "no request", "light and dark", "prints"} <= set(checks)


def check_page(browser: Browser, page: Path) -> list[str]:
    """Open a page in both themes and try what it has; return what was checked."""
    colours = []
    checked = ["no message in the console", "no request", "light and dark", "prints"]
    for dark in (True, False):
        seen = browser.open(page, dark=dark)
        colours.append(browser.value("getComputedStyle(document.body).backgroundColor + getComputedStyle(document.body).color"))
        assert browser.value("document.documentElement.scrollWidth <= innerWidth"), "the page is wider than the window"
        assert browser.value("[...document.images].every(image => image.complete && image.naturalWidth > 0)")
        assert (seen.console, seen.requests) == ([], [])
    assert colours[0] != colours[1]
    if browser.value("document.querySelector('[data-gallery]') !== null"):
        check_search(browser)
        checked.append("search and buckets")
    if browser.value("document.querySelector('[data-slider]') !== null"):
        check_slider(browser)
        checked.append("slider")
    assert browser.print_to_pdf().startswith(b"%PDF")
    assert (browser.seen.console, browser.seen.requests) == ([], [])
    return checked


def check_search(browser: Browser) -> None:
    """Search the gallery for the first card's id, for nothing that is there, and choose each group in turn."""
    total = browser.value("document.querySelectorAll('[data-gallery] figure').length")
    first = browser.value("document.querySelector('[data-gallery] div[data-group]').querySelectorAll('figure').length")
    assert browser.value(f"{_SHOWN}.length") == first, "a page begins with its first group"
    word = browser.value("document.querySelector('[data-gallery] figcaption b').textContent")
    found = _type(browser, word.upper())
    assert 0 < len(found) < total
    assert all(word.lower() in text.lower() for text in found)
    assert browser.value("document.querySelector('[data-count]').textContent") == f"{len(found)} shown"
    assert _type(browser, "no such caption anywhere") == []
    assert len(_type(browser, "")) == total
    sizes = []
    for n in range(browser.value("document.querySelectorAll('button[data-group]').length")):
        browser.value(f"document.querySelectorAll('button[data-group]')[{n}].click()")
        sizes.append(browser.value(f"{_SHOWN}.length"))
    assert sizes[0] == sum(sizes[1:]) == total
    browser.value("document.querySelectorAll('button[data-group]')[1].click()")


def _type(browser: Browser, text: str) -> list[str]:
    """Type into the search field and return the texts of the cards that are visible then."""
    script = f"(() => {{ const f = document.querySelector('input[type=search]'); f.value = {json.dumps(text)};"
    browser.value(script + " f.dispatchEvent(new Event('input')) })()")
    found: list[str] = browser.value(f"{_SHOWN}.map(card => card.textContent)")
    return found


def check_slider(browser: Browser) -> None:
    """Move each slider from end to end; the frames and the label follow."""
    last = int(browser.value("document.querySelector('[data-slider]').max"))
    labels = set()
    for at in range(last + 1):
        move = f"s => {{ s.value = '{at}'; s.dispatchEvent(new Event('input')) }}"
        browser.value(f"document.querySelectorAll('[data-slider]').forEach({move})")
        shown = browser.value(_FRAMES)
        assert shown
        assert all(str(at) in places.split() for places in shown)
        labels.add(browser.value("document.querySelector('[id$=-label]').textContent"))
    assert len(labels) == last + 1
