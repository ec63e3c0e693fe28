"""One decision for bars and lines: is stderr a terminal that shows bars?"""

from __future__ import annotations

import io
import sys

import pytest

from bucketline.command_line import progress_bar, stderr_console


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_force_color_makes_no_terminal_of_a_log(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert not stderr_console().is_terminal
    with progress_bar("verify", 2) as update:
        update(advance=1)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("compatible", "is_terminal"), [("", True), ("0", False)])
def test_a_terminal_may_ask_for_lines(monkeypatch: pytest.MonkeyPatch, compatible: str, *, is_terminal: bool) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("TTY_COMPATIBLE", compatible)
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert stderr_console().is_terminal is is_terminal
