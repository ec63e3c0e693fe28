"""Match the rows of a folder's tables with its images: by exact path, else ignoring extension case and Unicode normal form."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from bucketline.ingest.sources.captions.caption_files import name_key
from bucketline.ingest.sources.source import note_place

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bucketline.ingest.sources.captions.metadata_table import TableRow


@dataclass(slots=True, kw_only=True)
class TableRows:
    """The rows of all tables in a folder, by the image's path relative to the folder."""

    notes: list[str] = field(default_factory=list)
    _rows: dict[str, TableRow] = field(default_factory=dict)
    _loose: dict[str, list[str]] = field(default_factory=dict)  # names without an exact match, by key
    _used: set[str] = field(default_factory=set)
    _places: dict[str, str] = field(default_factory=dict)

    def add(self, table: str, rows: Iterable[TableRow]) -> None:
        """Add a table's rows; file names are relative to the table's own folder.

        Raises:
            SourceError: if two rows name the same image.
        """
        parent = PurePosixPath(table).parent
        for row in rows:
            image = os.path.normpath(parent / row.file_name)
            note_place(self._places, image, row.place)
            self._rows[image] = row

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

    def stray(self) -> list[str]:
        """Return the names of the rows without an image."""
        return [f"{name} (in {row.table})" for name, row in self._rows.items() if name not in self._used]


def _key(name: str) -> str:
    stem, dot, extension = name_key(name).rpartition(".")
    return f"{stem}{dot}{extension.lower()}"
