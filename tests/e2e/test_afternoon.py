"""No command of the README and the guides fails, and each is tried or has a reason why not."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from tests.commands import spawn
from tests.e2e import afternoon

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
def test_every_command_of_the_pages_does_what_they_say(tmp_path: Path) -> None:
    done = spawn([sys.executable, "-m", "tests.e2e.afternoon", tmp_path / "afternoon"]).done()
    assert "nothing wrong" in done.out


def test_commands_are_found_in_fences_in_spans_and_in_the_table_of_sources() -> None:
    said = {said.text for page in afternoon.PAGES for said in afternoon.said_in(page)}
    assert "store verify photos.store" in said
    assert "make demo" in said
    assert "ingest scan 'tars/*.tar'" in said
    assert "store ls photos.store --match 'cats/*'" in said
    assert any(
        text.startswith("bucketline train --store photos.store --model") and "--max-steps 20000" in text for text in said
    )


@pytest.mark.parametrize("text", ["hf download some/model", "store fly …", "docker run photos"])
def test_a_command_that_nobody_tries_is_a_fault(text: str, tmp_path: Path) -> None:
    fault = afternoon.Afternoon(tmp_path / "folder").fault_of(afternoon.Said(page="README.md", text=text))
    assert "a command that nobody tries" in str(fault)


@pytest.mark.parametrize(
    ("page", "option"),
    [
        ("docs/packing.md", "--no-such"),
        ("docs/packing.md", "--latents median"),
        ("docs/training.md", "--sharding cake"),
        ("docs/training.md", "--no_such_option"),
    ],
)
def test_an_option_that_no_parser_accepts_is_a_fault(page: str, option: str) -> None:
    assert option.split(maxsplit=1)[0] in str(afternoon.fault_of_option(page, option))


def test_a_failing_command_a_traceback_and_a_missing_target_are_faults(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    spent = afternoon.Afternoon(tmp_path / "folder")
    missing = spent.fault_of(afternoon.Said(page="README.md", text="make coffee"))
    assert missing == "the Makefile has no target coffee"
    failed = spent.run_command("store info nothing.store")
    assert "exit code {1}, expected 0" in str(failed) or "exit code {2}, expected 0" in str(failed)
    assert "printed a traceback" in str(spent.run("print", lambda: print("Traceback (most recent call last):")))
