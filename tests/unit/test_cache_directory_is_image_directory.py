"""The failure: cached files lay among the images and were taken for images, and mixed shapes met in one batch.

Here source and store are compared after links, `..` and by inode; equal, or one in the other, is refused before
anything is read or written.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from bucketline.errors import UsageError
from bucketline.files.paths import refuse_overlap
from bucketline.ingest.sources.folder import FolderSource, list_folder
from bucketline.store import Store
from tests.commands import Ran, call
from tests.kit import tree, untouched
from tests.models import SMALL, write_images


def pack(source: Path, store: Path, model: Path) -> Ran:
    return call("ingest", "pack", source, store, "--model", model, *SMALL, "--json")


def linked(photos: Path) -> tuple[Path, Path]:
    link = photos.parent / "link"
    link.symlink_to(photos)
    return photos, link


def inside_a_linked_folder(photos: Path) -> tuple[Path, Path]:
    link = photos.parent / "link"
    link.symlink_to(photos / "a")
    return photos, link / "cache"


def source_behind_a_link(photos: Path) -> tuple[Path, Path]:
    link = photos.parent / "link"
    link.symlink_to(photos.parent)
    return link / "photos", photos / "new" / "cache"


OVERLAPS: dict[str, Callable[[Path], tuple[Path, Path]]] = {
    "the same": lambda photos: (photos, photos),
    "the same, by two dots": lambda photos: (photos, photos / "a" / ".." / ".." / photos.name),
    "the same, by a link": linked,
    "the store inside": lambda photos: (photos, photos / "cache"),
    "the store deep inside": lambda photos: (photos, photos / "a" / "new" / "cache"),
    "the source inside": lambda photos: (photos, photos.parent),
    "the source deep inside": lambda photos: (photos / "a", photos.parent),
    "the store inside, by a link": inside_a_linked_folder,
    "the store inside a source behind a link": source_behind_a_link,
    "the same, a slash more": lambda photos: (photos, Path(f"{photos}//.")),
}


@pytest.mark.parametrize("case", OVERLAPS)
def test_a_store_that_lies_where_the_images_lie_is_refused_before_anything_is_read_or_written(
    case: str, source: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = OVERLAPS[case](source)
    with untouched(source.parent):
        monkeypatch.setattr(FolderSource, "listing", lambda _: pytest.fail("the source was read"))
        pack(one, other, model).fails(str(other), "choose a store outside the folder of images", code=2)


def test_relative_paths_are_compared_from_the_present_folder(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(source)
    with pytest.raises(UsageError, match="is inside the source"):
        refuse_overlap(Path("../photos"), Path("cache"))
    with pytest.raises(UsageError, match="the same folder"):
        refuse_overlap(source, Path())


def test_a_folder_that_merely_begins_with_the_same_name_is_another(source: Path) -> None:
    refuse_overlap(source, Path(f"{source}.store"))
    refuse_overlap(source, source.parent / "photo")


def test_a_name_in_other_case_that_does_not_exist_yet_is_taken_for_the_same(tmp_path: Path) -> None:
    """On a file system that does not tell case apart, such a store would end up in the source."""
    with pytest.raises(UsageError, match="the same folder"):
        refuse_overlap(tmp_path / "Photos", tmp_path / "photos")


def test_a_folder_that_has_two_names_is_found_by_its_inode(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under a bind mount, where no link gives it away: `realpath` is made blind here."""
    (source.parent / "mount").symlink_to(source)
    monkeypatch.setattr(os.path, "realpath", os.path.abspath)
    with pytest.raises(UsageError, match="is inside"):
        refuse_overlap(source, source.parent / "mount" / "cache")


def test_nothing_that_a_store_is_made_of_is_listed_as_an_image(store: Store, tmp_path: Path) -> None:
    write_images(tmp_path, 1)
    for name in tree(store.path):
        if not name.endswith("/"):
            (tmp_path / "s" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "s" / name).write_bytes(b"")
    assert [item.id for item in list_folder(tmp_path).items] == ["a/000.png"]
