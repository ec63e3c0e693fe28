"""A headless Chromium, driven by its DevTools protocol over two pipes, and the checks of a report page in it."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tests.commands import ROOT

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
OPTIONS = (
    "--headless=new",
    "--no-sandbox",  # as root, in a container; the pages are ours
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--remote-debugging-pipe",
)
READ_FD, WRITE_FD = 3, 4  # the descriptors that Chromium reads commands from and writes answers to


def find_browser() -> str | None:
    """Return the path of an installed Chromium or Chrome; None if there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@dataclass(slots=True)
class Seen:
    """Messages and requests of a page."""

    console: list[str] = field(default_factory=list)  # messages, errors of scripts, and violations of the page's policy
    requests: list[str] = field(default_factory=list)  # URLs but for the page itself and those that are in the page


class Browser:
    """A running browser with one page."""

    def __init__(self, program: str) -> None:
        self._folder = tempfile.mkdtemp(prefix="browser-")
        child_reads, self._out = os.pipe()
        self._in, child_writes = os.pipe()
        # `sh` puts the pipes where Chromium expects them, without code of ours between fork and exec
        script = f'exec "$0" "$@" {READ_FD}<&{child_reads} {WRITE_FD}>&{child_writes}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, program, *OPTIONS, f"--user-data-dir={self._folder}", "about:blank"],
            pass_fds=(child_reads, child_writes),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(child_reads)
        os.close(child_writes)
        self._buffer = b""
        self._number = 0
        self.seen = Seen()
        self._page = ""
        target = self._send("Target.createTarget", {"url": "about:blank"})["targetId"]
        self._session = self._send("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
        shutil.rmtree(self._folder, ignore_errors=True)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._send(method, parameters, self._session)

    def open(self, page: Path, *, dark: bool, width: int = 1280, height: int = 900) -> Seen:
        self.seen, self._page = Seen(), page.resolve().as_uri()
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Page.navigate", url=self._page)
        self._wait_for("Page.loadEventFired")
        return self.seen

    def value(self, script: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def photograph(self, *, of: str | None = None, most_px: int = 4000) -> bytes:
        """Return a PNG of what is visible, or of the first element that a selector finds, whatever its place on the page."""
        if of is None:
            return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
        box = self.value(
            f"(() => {{ const b = document.querySelector({json.dumps(of)}).getBoundingClientRect();"
            " return [b.x + scrollX, b.y + scrollY, b.width, b.height] })()"
        )
        clip = {"x": box[0], "y": box[1], "width": box[2], "height": min(box[3], most_px), "scale": 1}
        shot = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        return base64.b64decode(shot["data"])

    def print_to_pdf(self) -> bytes:
        return base64.b64decode(self.call("Page.printToPDF", printBackground=False)["data"])

    def _send(self, method: str, parameters: Mapping[str, Any], session: str | None = None) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": dict(parameters)}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result

    def _wait_for(self, event: str) -> None:
        while self._receive().get("method") != event:
            pass

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            part = os.read(self._in, 1 << 16)
            assert part, "the browser has ended"
            self._buffer += part
        data, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(data)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, event: str, found: Mapping[str, Any]) -> None:
        if event == "Runtime.consoleAPICalled":
            self.seen.console.append(" ".join(str(one.get("value")) for one in found["args"]))
        elif event == "Runtime.exceptionThrown":
            self.seen.console.append(json.dumps(found["exceptionDetails"]))
        elif event == "Log.entryAdded":
            self.seen.console.append(found["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            url = found["request"]["url"]
            if url.partition("#")[0] != self._page and not url.startswith(("data:", "about:")):
                self.seen.requests.append(url)


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
