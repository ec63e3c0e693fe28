"""A table as a source: a .jsonl, .csv or .parquet that names image files, in its own folder or below."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, BinaryIO

from bucketline.errors import SourceError
from bucketline.ingest.sources.captions import unusable
from bucketline.ingest.sources.files import file_stamp, open_file, read_file
from bucketline.ingest.sources.source import Listing, SourceBytes, SourceItem, Stamp, note_place
from bucketline.ingest.sources.table_rows import TableRow, read_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSource:
    """The images that a table names; a sample's id is its path from the table's folder. No other file is looked at."""

    path: Path

    @property
    def local_paths(self) -> tuple[Path, ...]:
        return (self.path.parent,)

    def listing(self) -> Listing:
        """Read the table. A file that is named and is not there becomes a reject, since it was asked for.

        Raises:
            SourceError: where a row is not what it should be, names what another row names, or leads out of the folder.
        """
        inside = _Inside(self.path.parent)
        listing, seen = Listing(), dict[str, str]()
        for row in read_rows(self.path, self.path.name):
            sample_id = inside.id_of(row)
            note_place(seen, sample_id, row.place)
            error = unusable(self.path.name, row.captions)
            listing.items.append(SourceItem(id=sample_id, captions=row.captions, caption_error=error))
        if not listing.items:
            raise SourceError(f"{self.path} names no image; expected rows with file_name and text")
        listing.items.sort(key=lambda item: item.id)
        return listing

    def in_turn(self, items: Iterable[SourceItem]) -> Iterator[SourceItem]:
        yield from items

    def stamp(self, item: SourceItem) -> Stamp:
        return file_stamp(self.path.parent / item.id)

    def read(self, item: SourceItem) -> SourceBytes:
        return read_file(self.path.parent / item.id)

    def opened(self, item: SourceItem) -> BinaryIO:
        return open_file(self.path.parent / item.id)


class _Inside:
    """Turns a table's file names into ids, and refuses those that lead out of its folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._real = os.path.realpath(folder)
        self._seen: dict[str, str] = {}  # the real paths of folders that were met

    def id_of(self, row: TableRow) -> str:
        """Give the path from the table's folder.

        Raises:
            SourceError: where it is absolute, or leads out by `..` or by a link.
        """
        sample_id = os.path.normpath(row.file_name)
        if PurePosixPath(sample_id).is_absolute() or sample_id.split("/", 1)[0] in ("..", "."):
            raise SourceError(f"{row.place}: {row.file_name!r} leads out of the table's folder; expected a path inside it")
        path = self._folder / sample_id
        parent = str(path.parent)
        if parent not in self._seen:
            self._seen[parent] = os.path.realpath(parent)
        real = os.path.realpath(path) if path.is_symlink() else f"{self._seen[parent]}/{path.name}"
        if not real.startswith(self._real.rstrip("/") + "/"):
            raise SourceError(
                f"{row.place}: {row.file_name!r} leads out of the table's folder, by a link to {real}; "
                "expected a file inside it"
            )
        return sample_id
