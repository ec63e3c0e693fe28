"""Defects that the families of people and of hostile input found."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bucketline.errors import SourceError
from bucketline.ingest.sources.folder import list_folder
from bucketline.ingest.sources.options import SourceOptions
from tests.models import png


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
