"""A folder of images as a source: recursive, captions from `<name>.txt` beside each image or from `metadata` tables."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, BinaryIO

from bucketline.errors import SourceError
from bucketline.ingest.sources.captions import MAX_CAPTIONS_BYTES, Captions, captions_of_text, too_long, unusable
from bucketline.ingest.sources.files import file_stamp, open_file, read_file
from bucketline.ingest.sources.source import IMAGE_SUFFIXES, Listing, SourceBytes, SourceItem, Stamp, note_place
from bucketline.ingest.sources.table_rows import TABLE_SUFFIXES, read_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

TABLES = frozenset(f"metadata{suffix}" for suffix in TABLE_SUFFIXES)


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderSource:
    """The images of a folder and of all folders in it; a sample's id is its path in the folder."""

    path: Path

    @property
    def local_paths(self) -> tuple[Path, ...]:
        return (self.path,)

    def listing(self) -> Listing:
        """List the folder; see `list_folder`."""
        return list_folder(self.path)

    def in_turn(self, items: Iterable[SourceItem]) -> Iterator[SourceItem]:
        yield from items

    def stamp(self, item: SourceItem) -> Stamp:
        return file_stamp(self.path / item.id)

    def read(self, item: SourceItem) -> SourceBytes:
        return read_file(self.path / item.id)

    def opened(self, item: SourceItem) -> BinaryIO:
        return open_file(self.path / item.id)


def list_folder(source: Path) -> Listing:
    """Walk the folder. Hidden files and folders (a dot before the name) and links to folders are passed over.

    Raises:
        SourceError: where the path is not a folder, holds no image, or a table is not what it should be.
    """
    if not source.is_dir():
        raise SourceError(f"{source} is not a folder; expected a folder of images")
    images: list[str] = []
    texts: set[str] = set()
    tables: list[str] = []
    for folder, folders, files in os.walk(source, onerror=_refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        inside = Path(folder).relative_to(source).as_posix()
        before = "" if inside == "." else f"{inside}/"
        for name in sorted(files):  # strings: a path object a file took as long as reading all captions
            path, suffix = before + name, os.path.splitext(name)[1].lower()  # noqa: PTH122
            if name.startswith("."):
                continue
            if suffix in IMAGE_SUFFIXES:
                images.append(path)
            elif suffix == ".txt":
                texts.add(path)
            elif name in TABLES:
                tables.append(path)
    if not images:
        kinds = ", ".join(sorted(IMAGE_SUFFIXES))
        raise SourceError(f"{source} holds no image; looked in all its folders for {kinds}")
    return _with_captions(source, sorted(images), texts, tables)


def _with_captions(source: Path, images: list[str], texts: set[str], tables: list[str]) -> Listing:
    rows = _read_tables(source, tables)
    listing = Listing()
    used: set[str] = set()
    for image in images:
        text = image[: image.rindex(".")] + ".txt"
        captions: tuple[str, ...] = ()
        error: str | None = None
        if image in rows:
            captions, table = rows.pop(image)
            error = unusable(table, captions)
        elif text in texts:
            captions, error = _read_captions(f"{source}/{text}")
        if text in texts:
            used.add(text)
        listing.items.append(SourceItem(id=image, captions=captions, caption_error=error))
    listing.orphans = sorted([*(texts - used), *(f"{name} (in {table})" for name, (_, table) in rows.items())])
    return listing


def _read_captions(path: str) -> Captions:
    name = os.path.basename(path)  # noqa: PTH119 - a call a file
    try:
        status = os.stat(path)  # noqa: PTH116
        if not stat.S_ISREG(status.st_mode):  # a pipe would be waited for, a device read without end
            return (), f"{name} is not a file"
        if status.st_size > MAX_CAPTIONS_BYTES:
            return too_long(name, status.st_size)
        with open(path, "rb") as file:  # noqa: PTH123
            return captions_of_text(name, file.read())
    except OSError as error:
        return (), f"{name}: {error.strerror}"


def _read_tables(source: Path, tables: list[str]) -> dict[str, tuple[tuple[str, ...], str]]:
    """Read the tables: image path in the source → captions, and the table's name.

    Raises:
        SourceError: where a row is not what it should be, or two rows name the same image.
    """
    rows: dict[str, tuple[tuple[str, ...], str]] = {}
    seen: dict[str, str] = {}
    for table in tables:
        inside = PurePosixPath(table)
        for row in read_rows(source / table, table):
            image = os.path.normpath(inside.parent / row.file_name)
            note_place(seen, image, row.place)
            rows[image] = row.captions, inside.name
    return rows


def _refuse(error: OSError) -> None:
    raise SourceError(f"{error.filename} cannot be read: {error.strerror}; the count of images would be wrong") from error
