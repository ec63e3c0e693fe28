"""Masks and control images that other trainers keep next to their images: left out of every kind of source, and counted."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from bucketline.errors import SourceError
from bucketline.ingest.sources.open_source import open_source
from bucketline.store.remote.objects import ObjectFolder
from tests.commands import call
from tests.models import SMALL, png
from tests.unit.ingest.sources.tar.test_tar_source import write_members

FILES = {
    **{f"a/{n}.jpg": png(20, 20, n) for n in range(3)},
    **{f"a/{n}.txt": b"a cat" for n in range(3)},
    **{f"a/{n}-masklabel.png": png(20, 20) for n in range(3)},
    "a/0-masklabel.txt": b"of the mask",
    "a/1-condlabel.png": png(20, 20),
    "a/_controls/0.depth.jpg": png(20, 20),
    "_controls/0.line.jpg": png(20, 20),
    "b/alone-masklabel.png": png(20, 20),  # next to no image
    "b/my_controls/c.png": png(20, 20),
}
SAMPLES = ["a/0.jpg", "a/1.jpg", "a/2.jpg", "b/alone-masklabel.png", "b/my_controls/c.png"]
COUNTED = "NAME-masklabel (3 images), _controls/ (2 images), NAME-condlabel (1 image)"


def write_source(kind: str, folder: Path) -> str:
    if kind == "objects":
        objects = ObjectFolder.open(f"memory://{uuid.uuid4().hex}/photos")
        for name, data in FILES.items():
            objects.write(name, data)
        return objects.url
    for name, data in FILES.items():
        (folder / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "photos" / name).write_bytes(data)
    return str(folder / "photos" if kind == "folder" else write_members(folder / "s.tar", FILES.items()))


@pytest.mark.parametrize("kind", ["folder", "tar", "objects"])
def test_side_files_are_left_out_and_counted_by_what_they_are_called(kind: str, tmp_path: Path) -> None:
    listing = open_source(write_source(kind, tmp_path)).listing()
    assert sorted(item.id.removeprefix("s/") for item in listing.items) == SAMPLES
    assert [note.partition(";")[0] for note in listing.notes] == [
        f"left out as masks and control images of other trainers: {COUNTED}"
    ]
    assert listing.captions_from.total() == 3


def test_scan_counts_them_and_a_table_that_names_one_packs_it(tmp_path: Path) -> None:
    source = write_source("folder", tmp_path)
    scanned = call("ingest", "scan", source, *SMALL).done().out
    assert f"  note: left out as masks and control images of other trainers: {COUNTED};" in scanned
    table = '{"file_name": "a/0-masklabel.png", "text": "a mask"}\n'
    (tmp_path / "photos" / "metadata.jsonl").write_text(table, encoding="utf-8")
    for place in (source, f"{source}/metadata.jsonl"):
        items = {item.id: item.captions for item in open_source(place).listing().items}
        assert items["a/0-masklabel.png"] == ("a mask",)


def test_a_folder_of_nothing_but_side_files_is_refused_and_its_own_name_does_not_count(tmp_path: Path) -> None:
    for name in ("0.depth.jpg", "1.depth.jpg"):
        (tmp_path / "_controls").mkdir(exist_ok=True)
        (tmp_path / "_controls" / name).write_bytes(png(20, 20))
    with pytest.raises(SourceError, match=r"has no images to pack: left out as masks and .* _controls/ \(2 images\)"):
        open_source(str(tmp_path)).listing()
    assert len(open_source(str(tmp_path / "_controls")).listing().items) == 2
