"""A table as a source: a .jsonl, .csv or .parquet that names image files in its own folder or below."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from bucketline.errors import SourceError
from bucketline.ingest.sources.captions.caption_text import CaptionNames, unusable
from bucketline.ingest.sources.captions.metadata_table import folder_paths, inside_folder, read_rows
from bucketline.ingest.sources.local_files import LocalFileSource
from bucketline.ingest.sources.source import Listing, SourceItem, note_place
from bucketline.ingest.sources.splits import VAL, Splits, split_of_image

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from bucketline.ingest.sources.captions.metadata_table import TableRow


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSource(LocalFileSource):
    """The images that a table names, in its folder or below. No other files are read."""

    @property
    def folder(self) -> Path:
        return self.path.parent

    def listing(self) -> Listing:
        """Read the table. A named file that does not exist is listed, and rejected later."""
        inside = _Inside(self.folder, follow_links=self.options.follow_links)
        listing = Listing()
        rows = read_rows(self.path, self.path.name, CaptionNames.of(self.options), listing.notes)
        return listing_of_rows(rows, inside.id_of, str(self.path), Splits(self.options.dataset_splits), listing)


def listing_of_rows(
    rows: Iterable[TableRow], id_of: Callable[[TableRow], str], table: str, splits: Splits, listing: Listing
) -> Listing:
    """Add the images that the rows of a table name to `listing`, sorted by id; return it. `table`: its path or URL."""
    seen: dict[str, str] = {}
    folder, _, name = table.rpartition("/")
    for row in rows:
        sample_id = id_of(row)
        note_place(seen, sample_id, row.place)
        target = splits.take(row.split or split_of_image(name, sample_id), sample_id)
        if target is None:
            continue
        captions = row.captions or ()
        error = unusable(row.table, captions)
        if captions:
            listing.captions_from[f"{row.table}, {row.column}"] += 1
        listing.items.append(SourceItem(id=sample_id, captions=captions, caption_error=error, held_out=target == VAL))
    splits.finish(table, folder, listing.notes)
    if not listing.items:
        raise SourceError(f"{table} names no image; expected rows with file_name and text")
    listing.items.sort(key=lambda item: item.id)
    return listing


def inside_id(row: TableRow, folders: Sequence[str], is_there: Callable[[str], bool]) -> str:
    r"""Return the path of a row's image relative to the table's folder, `folders`, with `/` in the place of `\`.

    A name with `\` stays as it is if `is_there` says that there is such a file.
    """
    name = row.file_name if is_there(row.file_name) else row.file_name.replace("\\", "/")
    sample_id = os.path.normpath(inside_folder(name, folders) or name)
    if PurePosixPath(sample_id).is_absolute() or sample_id.split("/", 1)[0] in ("..", "."):
        raise SourceError(f"{row.place}: {row.file_name!r} leads out of the table's folder; expected a path inside it")
    return sample_id


class _Inside:
    """Converts a table's file names to ids, and refuses those that lead out of its folder."""

    def __init__(self, folder: Path, *, follow_links: bool) -> None:
        self._folder, self._follows = folder, follow_links
        self._folders = folder_paths(folder)
        self._real = os.path.realpath(folder)
        self._seen: dict[str, str] = {}  # real path by folder

    def id_of(self, row: TableRow) -> str:
        """Return the path relative to the table's folder."""
        sample_id = inside_id(row, self._folders, lambda name: "\\" in name and os.path.lexists(self._folder / name))
        if self._follows:
            return sample_id
        path = self._folder / sample_id
        parent = str(path.parent)
        if parent not in self._seen:
            self._seen[parent] = os.path.realpath(parent)
        real = os.path.realpath(path) if path.is_symlink() else f"{self._seen[parent]}/{path.name}"
        if not real.startswith(self._real.rstrip("/") + "/"):
            raise SourceError(
                f"{row.place}: {row.file_name!r} leads out of the table's folder, by a link to {real}; "
                "expected a file inside it, or --follow-links"
            )
        return sample_id
