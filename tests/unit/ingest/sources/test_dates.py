"""Images dated before 1970, after 2262, or at no time at all: packed as any other, and unchanged the next time."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest

from bucketline.ingest.sources.dataset_file import open_source
from bucketline.ingest.sources.hf_dataset import DatasetSource
from bucketline.ingest.sources.source import SourceItem, Stamp
from bucketline.store.format.sample_record import MAX_MTIME_NS
from tests.commands import call
from tests.models import pack, write_images

YEAR_2300_NS = 10_413_792_000 * 10**9
DATES_NS = [-(2**70), -1, 0, 1, MAX_MTIME_NS, MAX_MTIME_NS + 1, 2**64 - 1, 2**64, 2**90]


@pytest.mark.parametrize("mtime_ns", DATES_NS)
def test_a_stamp_holds_what_the_stores_field_holds(mtime_ns: int) -> None:
    assert Stamp(num_bytes=1, mtime_ns=mtime_ns).mtime_ns == min(max(0, mtime_ns), MAX_MTIME_NS)


@pytest.mark.parametrize("place", ["photos", "photos/t.csv", "a.tar"])
@pytest.mark.parametrize("mtime_ns", [YEAR_2300_NS, -(10**18)])
def test_a_source_that_is_dated_after_2262_or_before_1970_is_listed_and_read(place: str, mtime_ns: int, tmp_path: Path) -> None:
    """A file system that cannot hold such a date holds the nearest one it can, which is as good here."""
    write_images(tmp_path / "photos", 2)
    (tmp_path / "photos" / "t.csv").write_text("file_name,text\na/000.png,a cat\n", encoding="ascii")
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.add(tmp_path / "photos" / "a" / "000.png", "0.png")
    for path in tmp_path.rglob("*"):
        os.utime(path, ns=(0, mtime_ns))
    own = tmp_path / (place if place == "a.tar" else "photos/a/000.png")
    expected = min(max(0, own.stat().st_mtime_ns), MAX_MTIME_NS)
    source = open_source(str(tmp_path / place))
    for item in source.in_turn(source.listing().items):
        assert source.stamp(item).mtime_ns == source.read(item).stamp.mtime_ns == expected


def test_a_saved_datasets_date_is_kept_within_the_stores_field(tmp_path: Path) -> None:
    item = SourceItem(id="a", captions=(), at=(0, 0, 10, YEAR_2300_NS))
    assert DatasetSource(path=tmp_path).stamp(item).mtime_ns == MAX_MTIME_NS


def test_images_of_any_date_are_packed_and_are_unchanged_the_next_time(source: Path, tmp_path: Path, model: Path) -> None:
    for n, path in enumerate(sorted(source.rglob("*.png"))):
        os.utime(path, ns=(0, (YEAR_2300_NS, -(10**18), 10**18)[n % 3]))
    assert pack(source, tmp_path / "s", model).json["packed"] == 14
    assert pack(source, tmp_path / "s", model).json["unchanged"] == 14
    assert call("store", "verify", tmp_path / "s").code == 0
