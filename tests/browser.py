"""A headless Chromium, driven by its DevTools protocol over two pipes: pages opened, measured, clicked and photographed."""

from __future__ import annotations

import base64
import contextlib
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
