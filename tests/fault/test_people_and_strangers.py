"""Things that people do to a store, and input made to do harm: a little of each, and what it found."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from bucketline.errors import SourceError
from bucketline.ingest.sources.folder import list_folder
from bucketline.ingest.sources.options import SourceOptions
from tests.fault.record import Outcome, Record
from tests.fault.torture import run_family
from tests.models import png

if TYPE_CHECKING:
    from pathlib import Path


def expect_good(records: list[Record]) -> None:
    assert all(record.bad == 0 for record in records), [said for record in records for said in record.said]
    assert all(record.trials for record in records)


def test_what_people_do_to_a_store_ends_in_words_or_rightly() -> None:
    records = run_family("people", 3, is_quick=True)
    assert len(records) == 8  # and what was left outside
    expect_good(records)
    names = next(record for record in records if record.fault == "odd file names")
    assert names.counts[Outcome.COMPLETED] == names.trials > 40


def test_input_made_to_do_harm_does_none() -> None:
    records = run_family("hostile", 3, is_quick=True)
    assert len(records) == 8  # and what was left outside
    expect_good(records)


def test_links_planted_names_and_modules_reach_nothing_outside() -> None:
    records = run_family("links", 3, is_quick=True)
    assert len(records) == 5  # at file://, too, and what was left outside
    expect_good(records)


@pytest.mark.parametrize("kind", ["device", "pipe"])
def test_captions_that_are_a_device_or_a_pipe_are_rejects_and_nobody_waits(kind: str, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(20, 30))
    if kind == "pipe":
        os.mkfifo(tmp_path / "a.txt")
    else:
        (tmp_path / "a.txt").symlink_to("/dev/zero")
    (item,) = list_folder(tmp_path, SourceOptions(follow_links=True)).items
    assert item.caption_error == "a.txt: not a file (a pipe, a device or a folder)"


def test_a_table_that_is_a_pipe_is_refused_and_nobody_waits(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(20, 30))
    os.mkfifo(tmp_path / "metadata.jsonl")
    with pytest.raises(SourceError, match=r"metadata\.jsonl does not exist, or is not a file"):
        list_folder(tmp_path)
