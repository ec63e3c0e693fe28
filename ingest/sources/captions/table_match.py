r"""Match the rows of a folder's tables with its images by path.

A path that does not match exactly may differ in the case of its extension, in its Unicode normal form, or by `\\` for `/`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from bucketline.command_line import counted
from bucketline.errors import SourceError
from bucketline.ingest.sources.captions.caption_files import name_key
from bucketline.ingest.sources.source import note_place

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from bucketline.ingest.sources.captions.metadata_table import TableRow


@dataclass(slots=True, kw_only=True)
class TableRows:
    """The rows of all tables in a folder, by the image's path relative to the folder."""

    folders: Sequence[str]  # paths or URLs of the folder, with which a row may begin
    notes: list[str] = field(default_factory=list)
    _rows: dict[str, TableRow] = field(default_factory=dict)
    _loose: dict[str, list[str]] = field(default_factory=dict)  # names without an exact match, by key
    _used: set[str] = field(default_factory=set)
    _places: dict[str, str] = field(default_factory=dict)
    _tables: dict[str, list[str]] = field(default_factory=dict)  # names in the rows of each table

    def add(self, table: str, rows: Iterable[TableRow]) -> None:
        """Add a table's rows; file names are relative to the table's own folder, or absolute."""
        parent = PurePosixPath(table).parent
        for row in rows:
            image = os.path.normpath(inside_folder(row.file_name, self.folders) or parent / row.file_name)
            note_place(self._places, image, row.place)
            self._rows[image] = row
            self._tables.setdefault(table, []).append(image)

    def match(self, images: list[str]) -> None:
        """Set the images of the folder: a row with the exact path of an image matches only that image."""
        there = set(images)
        for name in self._rows:
            if name not in there:
                self._loose.setdefault(_key(name), []).append(name)

    def of(self, image: str) -> TableRow | str | None:
        """Return an image's row, or why it is ambiguous; None if it has none."""
        if not self._rows:
            return None
        names = [image] if image in self._rows else self._loose.get(_key(image), ())
        self._used.update(names)
        if len(names) > 1:
            return f"{' and '.join(self._places[name] for name in names)} both name this image; keep one row"
        return self._rows[names[0]] if names else None

    def refuse_unmatched(self, images: Sequence[str]) -> None:
        """Check that each table has a row that matched an image, after `of` has been called for all `images`."""
        for table, names in self._tables.items():
            if self._used.isdisjoint(names):
                beside = table.rpartition("/")[0]
                image = next((image for image in images if image.startswith(beside)), images[0])
                raise SourceError(
                    f"{table}: none of its {counted(len(names), 'row')} names an image: its first file_name is "
                    f"{self._rows[names[0]].file_name!r}, an image is {image!r}; write file_name as the path from the table's "
                    "folder to the image, or move the table out of the source"
                )

    def stray(self) -> list[str]:
        """Return the names of the rows without an image."""
        return [f"{name} (in {row.table})" for name, row in self._rows.items() if name not in self._used]


def folder_paths(folder: Path) -> tuple[str, ...]:
    """Return the absolute paths of a folder, without and with links resolved."""
    return tuple({os.path.abspath(folder): None, os.path.realpath(folder): None})  # noqa: PTH100 - without resolving


def inside_folder(name: str, folders: Sequence[str]) -> str | None:
    """Return the rest of a path or URL that begins with one of `folders`; None if it begins with none."""
    name = name.replace("\\", "/")
    begin = next((folder for folder in folders if name.startswith(f"{folder.rstrip('/')}/")), None)
    return None if begin is None else name[len(begin.rstrip("/")) :].lstrip("/")


def _key(name: str) -> str:
    if "\\" in name:
        name = os.path.normpath(name.replace("\\", "/"))
    stem, dot, extension = name_key(name).rpartition(".")
    return f"{stem}{dot}{extension.lower()}"
