"""Images dated before 1970, after 2262, or at no time at all: packed as any other, and unchanged the next time."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from bucketline.ingest.sources.open_source import open_source
from bucketline.ingest.sources.source import Source, SourceItem, Stamp
from bucketline.store import Store
from bucketline.store.format.sample_record import MAX_MTIME_NS
from tests.commands import Ran, call
from tests.models import SMALL, png, write_images
from tests.streamed import streamed

YEAR_2300_NS = 10_413_792_000 * 10**9
DATES_NS = [-(2**70), -1, 0, 1, MAX_MTIME_NS, MAX_MTIME_NS + 1, 2**64 - 1, 2**64, 2**90]
TIMES = {  # as a PAX header says them, and what is kept, ns
    "nan": 0,
    "-nan": 0,
    "inf": MAX_MTIME_NS,
    "-inf": 0,
    "1e400": MAX_MTIME_NS,
    "-1e400": 0,
    "1e300": MAX_MTIME_NS,
    "9" * 300: MAX_MTIME_NS,
    "10413792000": MAX_MTIME_NS,
    "18446744073.8": MAX_MTIME_NS,
    "-5.5": 0,
    "soon": 0,
    "": 0,
    "1.5": 1_500_000_000,
}


def tar_of(path: Path, times: dict[str, str]) -> Path:
    """Write a tar of an image for each name, with the time that its PAX header is to say."""
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for seed, (name, time) in enumerate(times.items()):
            data, info = png(20, 30, seed), tarfile.TarInfo(name)
            info.size, info.pax_headers = len(data), {"mtime": time}
            archive.addfile(info, io.BytesIO(data))
    return path


def stamps(source: Source) -> dict[str, int]:
    """Return the time of every item, by its listing, and see that reading it gives the same."""
    found = {}
    for item in source.in_turn(source.listing().items):
        found[item.id] = source.stamp(item).mtime_ns
        assert source.read(item).stamp.mtime_ns == found[item.id]
    return found


def pack(source: object, store: Path, model: Path) -> Ran:
    return call("ingest", "pack", source, store, "--model", model, *SMALL, "--json")


def expect_packed_once(source: object, store: Path, model: Path, count: int) -> None:
    first = pack(source, store, model)
    assert (first.code, first.json["packed"]) == (0, count), first.err
    again = pack(source, store, model)
    assert (again.code, again.json["unchanged"]) == (0, count), again.err
    assert call("store", "verify", store).code == 0


@pytest.mark.parametrize("mtime_ns", DATES_NS)
def test_a_stamp_holds_what_the_stores_field_holds(mtime_ns: int) -> None:
    assert Stamp(num_bytes=1, mtime_ns=mtime_ns).mtime_ns == min(max(0, mtime_ns), MAX_MTIME_NS)


def test_the_times_of_a_streamed_tars_headers_are_kept_within_the_stores_field(tmp_path: Path) -> None:
    names = {f"{n}.png": time for n, time in enumerate(TIMES)}
    path = tar_of(tmp_path / "a.tar", names)
    found = stamps(open_source(streamed(path)))
    assert found == {f"a/{name}": TIMES[time] for name, time in names.items()}


@pytest.mark.parametrize("mtime", [-(2**40), 2**33, 2**34, 2**80])
def test_a_plain_headers_time_beyond_its_digits_is_kept_within_the_stores_field(mtime: int, tmp_path: Path) -> None:
    info, data = tarfile.TarInfo("a.png"), png(20, 30)
    info.size, info.mtime = len(data), mtime
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as archive:  # in base 256
        archive.addfile(info, io.BytesIO(data))
    (found,) = stamps(open_source(streamed(path))).values()
    assert found == min(max(0, mtime * 10**9), MAX_MTIME_NS)


@pytest.mark.parametrize("kind", ["folder", "table", "tar"])
@pytest.mark.parametrize("mtime_ns", [YEAR_2300_NS, -(10**18)])
def test_a_source_that_is_dated_after_2262_or_before_1970_is_listed_and_read(kind: str, mtime_ns: int, tmp_path: Path) -> None:
    """A file system that cannot hold such a date holds the nearest one it can, which is as good here."""
    write_images(tmp_path / "photos", 2)
    (tmp_path / "photos" / "t.csv").write_text("file_name,text\na/000.png,a cat\n", encoding="ascii")
    tar_of(tmp_path / "a.tar", {"0.png": "1"})
    for path in tmp_path.rglob("*"):
        os.utime(path, ns=(0, mtime_ns))
    where = {"folder": tmp_path / "photos", "table": tmp_path / "photos" / "t.csv"}.get(kind, tmp_path / f"a.{kind}")
    own = where if "tar" in kind else tmp_path / "photos" / "a" / "000.png"
    expected = min(max(0, own.stat().st_mtime_ns), MAX_MTIME_NS)
    assert set(stamps(open_source(str(where))).values()) == {expected}


def test_a_saved_datasets_date_is_kept_within_the_stores_field(tmp_path: Path) -> None:
    from bucketline.ingest.sources.hf_dataset import DatasetSource

    item = SourceItem(id="a", captions=(), at=(0, 0, 10, YEAR_2300_NS))
    assert DatasetSource(path=tmp_path).stamp(item).mtime_ns == MAX_MTIME_NS


def test_images_of_any_date_are_packed_and_are_unchanged_the_next_time(source: Path, tmp_path: Path, model: Path) -> None:
    for n, path in enumerate(sorted(source.rglob("*.png"))):
        os.utime(path, ns=(0, (YEAR_2300_NS, -(10**18), 10**18)[n % 3]))
    expect_packed_once(source, tmp_path / "s", model, 14)
    tar = tar_of(tmp_path / "a.tar", {f"{n}.png": time for n, time in enumerate(TIMES)})
    expect_packed_once(streamed(tar), tmp_path / "t", model, len(TIMES))
    store = Store.open(tmp_path / "t")
    assert store.sample("a/2.png")[1].source_mtime_ns == MAX_MTIME_NS
