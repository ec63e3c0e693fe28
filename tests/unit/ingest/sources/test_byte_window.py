"""A window reads like the bytes of its range, at any position."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from bucketline.ingest.sources.objects.object_file import FileWindow


def test_a_window_reads_and_seeks_like_the_bytes_of_its_range(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(range(100)))
    inner = io.BytesIO(bytes(range(10, 60)))
    with FileWindow((tmp_path / "f").open("rb"), 10, 50) as window:
        for to, whence, num_bytes in ((0, 0, 7), (5, 1, 10), (-3, 2, 9), (50, 0, 4), (80, 0, 4), (49, 0, 0), (49, 0, 1)):
            assert window.seek(to, whence) == inner.seek(to, whence)
            assert window.read(num_bytes) == inner.read(num_bytes)
            assert window.tell() == inner.tell()


def test_no_position_before_the_window(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(10))
    with (
        FileWindow((tmp_path / "f").open("rb"), 5, 5) as window,
        pytest.raises(ValueError, match=r"^-1 is not a position in a file$"),
    ):
        window.seek(-1)
