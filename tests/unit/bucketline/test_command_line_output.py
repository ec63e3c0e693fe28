"""How the commands print numbers, and what becomes of them if nobody reads what they print."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bucketline.command_line import guarded, human_number, print_error, progress_bar, say, stderr_console
from bucketline.errors import UsageError
from bucketline.store import Store
from tests.commands import BIN, ROOT

BUCKET = "train/64x64"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.0, "0"),
        (0.00123, "0.00123"),
        (0.9999, "1"),
        (1.0234, "1.02"),
        (12.34, "12.3"),
        (99.97, "100"),
        (123.4, "123"),
        (999.6, "1,000"),
        (141180.3, "141,180"),
    ],
)
def test_a_number_for_people_has_three_digits_and_no_false_precision(value: float, text: str) -> None:
    assert human_number(value) == text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_long_line_breaks_between_words_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool) -> None:
    out = Terminal() if is_terminal else io.StringIO()
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys, "stderr", out)
    print_error(UsageError("photos/a-long-name.store is not a store; name another"))
    say(f"  note: {'words ' * 9}", out)
    found = [line.rstrip() for line in out.getvalue().splitlines()]
    assert len(found) == (4 if is_terminal else 2)
    assert (max(map(len, found)) <= 40) is is_terminal
    assert [line.startswith(" " * 4) for line in found] == ([False, False, False, True] if is_terminal else [False] * 2)
    monkeypatch.setattr(sys, "stdout", None)
    say("to a stream that the shell has closed")


def run_unread(arguments: list[object], *, stderr_too: bool = False) -> subprocess.CompletedProcess[bytes]:
    read, write = os.pipe()
    os.close(read)
    try:
        return subprocess.run(
            [str(argument) for argument in arguments],
            stdin=subprocess.DEVNULL,
            stdout=write,
            stderr=write if stderr_too else subprocess.PIPE,
            check=False,
        )
    finally:
        os.close(write)


HELP: dict[str, list[object]] = {
    "store": [BIN / "store", "--help"],
    "bucketline": [BIN / "bucketline", "--help"],
    "bucketline --version": [BIN / "bucketline", "--version"],
    "train/main.py": [sys.executable, ROOT / "train" / "main.py", "--help"],
}


@pytest.mark.parametrize("name", HELP)
def test_help_that_nobody_reads_to_its_end_is_no_trace(name: str) -> None:
    assert run_unread(HELP[name]).stderr == b""


@pytest.mark.parametrize("command", ["ls", "verify"])
def test_output_that_nobody_reads_to_its_end_is_no_trace(store: Store, command: str) -> None:
    ran = run_unread([BIN / "store", command, store.path])
    assert (ran.returncode, ran.stderr) == (1, b"")


def test_output_and_log_on_a_full_disk_are_an_error_and_no_trace(store: Store, tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full, (tmp_path / "said").open("wb") as said:
        for stderr in (said, full):
            command = [str(BIN / "store"), "ls", str(store.path)]
            assert subprocess.run(command, stdin=subprocess.DEVNULL, stdout=full, stderr=stderr, check=False).returncode == 1
    words = "error: stdout cannot be written: No space left on device; fix this and rerun the command\n"
    assert (tmp_path / "said").read_text() == words


def test_a_log_on_a_full_disk_ends_nothing_and_continues_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stream(io.StringIO):
        is_full = True

        def write(self, text: str) -> int:
            if self.is_full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(text)

    monkeypatch.setattr(sys, "stderr", stream := Stream())

    def run() -> int:
        print("lost", file=sys.stderr, flush=True)
        stderr_console().print("lost too")
        stream.is_full = False
        print("kept", file=sys.stderr, flush=True)
        return 7

    assert guarded(run) == 7
    assert stream.getvalue().split() == ["kept"]


def test_an_error_that_nobody_reads_ends_the_command_as_it_would(tmp_path: Path) -> None:
    assert run_unread([BIN / "store", "info", tmp_path], stderr_too=True).returncode == 1


# One decision for bars and lines: is stderr a terminal that shows bars?


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
