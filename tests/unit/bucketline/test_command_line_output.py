"""How the commands print numbers, and what becomes of them if nobody reads what they print."""

from __future__ import annotations

import errno
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bucketline.command_line import guarded, human_number, print_error, say, stderr_console
from bucketline.errors import UsageError
from bucketline.store import Store
from bucketline.store.change.commit import drop
from tests.commands import BIN, ROOT, call
from tests.kit import make_sample, make_store, samples_of

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


def test_info_says_how_many_times_the_payload_a_store_takes_only_where_that_says_something(tmp_path: Path) -> None:
    samples = samples_of({"train/512x512": 40})
    make_store(tmp_path, samples)
    assert re.search(r"on disk, [\d.]+ times the payload of [\d.]+ KiB\n", call("store", "info", tmp_path).out)
    drop(tmp_path, [sample.id for sample in samples])
    assert re.fullmatch(r"0 samples, generation 2, 1 shard, [\d.]+ [KM]iB on disk, payload [\d.]+ K?i?B", first_line(tmp_path))


def first_line(store: Path) -> str:
    return call("store", "info", store).out.splitlines()[0]


def test_one_of_a_thing_is_said_in_the_singular(tmp_path: Path) -> None:
    make_store(tmp_path / "s", [make_sample("a.png", BUCKET, ("snow",))])
    assert call("store", "get", tmp_path / "s", "a.png", "-o", tmp_path / "a").out.endswith(", 1 caption\n")
    assert "1 step, 1 row delivered" in call("loader", "plan", tmp_path / "s", "--batch-size", 1).out
    assert " has 1 sample in 1 shard, " in call("store", "merge", tmp_path / "u", tmp_path / "s").out


def test_a_scan_of_one_image_says_so(tmp_path: Path) -> None:
    from tests.models import png

    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.png").write_bytes(png(20, 30, 1))
    out = call("ingest", "scan", tmp_path / "photos", "--grid", "16x24", "--min-size-px", 8).out
    assert out.startswith("1 image, ")
    assert "  1 image without a caption: a.png; --json names all\n" in out


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
    "ingest pack": [BIN / "ingest", "pack", "--help"],
    "loader serve": [BIN / "loader", "serve", "--help"],
    "bucketline": [BIN / "bucketline", "--help"],
    "bucketline --version": [BIN / "bucketline", "--version"],
    "bucketline store": [BIN / "bucketline", "store", "--help"],
    "version": [BIN / "store", "version"],
    "train/main.py": [sys.executable, ROOT / "train" / "main.py", "--help"],
}


@pytest.mark.parametrize("name", HELP)
def test_help_that_nobody_reads_to_its_end_is_no_trace(name: str) -> None:
    assert run_unread(HELP[name]).stderr == b""


@pytest.mark.parametrize("command", ["ls", "info", "verify"])
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
