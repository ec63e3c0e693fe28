"""A folder of images as a source, searched recursively, with captions from files next to each image or `metadata` tables."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from bucketline.command_line import counted
from bucketline.errors import SourceError
from bucketline.files.paths import IMAGE_SUFFIXES
from bucketline.files.run_marker import STATUS, is_run
from bucketline.ingest.images.rejects import RejectedError
from bucketline.ingest.sources.captions.caption_files import CaptionFiles
from bucketline.ingest.sources.captions.caption_text import refuse_unmet, unusable
from bucketline.ingest.sources.captions.metadata_table import TABLE_SUFFIXES, TableRow, read_rows
from bucketline.ingest.sources.captions.table_match import TableRows
from bucketline.ingest.sources.kohya_folders import naming_notes
from bucketline.ingest.sources.local_files import LocalFileSource, followed
from bucketline.ingest.sources.options import SourceOptions
from bucketline.ingest.sources.source import Listing, SourceItem

TABLES = frozenset(f"metadata{suffix}" for suffix in TABLE_SUFFIXES)


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderSource(LocalFileSource):
    """The images of a folder and its subfolders."""

    def listing(self) -> Listing:
        """List the folder; see `list_folder`."""
        return list_folder(self.path, self.options)


def list_folder(source: Path, options: SourceOptions | None = None) -> Listing:
    """List a folder recursively. Skips hidden files and folders (names that begin with a dot), and links to folders.

    Raises:
        SourceError: if the path is not a folder, has no images, has a training run, or a table is invalid.
    """
    if not source.is_dir():
        raise SourceError(f"{source} is not a folder; expected a folder of images")
    options = options or SourceOptions()
    files_of_captions = CaptionFiles(folder=source, options=options)
    images: list[str] = []
    tables: list[str] = []
    empty: list[str] = []
    for folder, folders, files in os.walk(source, onerror=_refuse):
        if not folders and not files:
            empty.append(Path(folder).relative_to(source).as_posix())
        if STATUS in files and is_run(Path(folder)):
            raise SourceError(
                f"{folder} has a training run ({STATUS}), whose images would be packed as samples; "
                "move it out of the source and rerun the command"
            )
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        inside = Path(folder).relative_to(source).as_posix()
        before = "" if inside == "." else f"{inside}/"
        for name in sorted(files):  # strings, because one Path per file took as long as reading all captions
            path, suffix = before + name, os.path.splitext(name)[1].lower()  # noqa: PTH122
            if name.startswith("."):
                continue
            if suffix in IMAGE_SUFFIXES:
                images.append(path)
            elif name in TABLES:
                tables.append(path)
            else:
                files_of_captions.add(path, suffix)
    if not images:
        kinds = ", ".join(sorted(IMAGE_SUFFIXES))
        raise SourceError(f"{source} has no images; searched all its folders for {kinds}")
    listing = _with_captions(sorted(images), files_of_captions, _read_tables(tables, files_of_captions))
    listing.empty_folders = sorted(empty)
    listing.notes += naming_notes(images)
    return listing


def _with_captions(images: list[str], files: CaptionFiles, rows: TableRows) -> Listing:
    listing = Listing(notes=rows.notes)
    rows.match(images)
    for image in images:
        row = rows.of(image)
        if isinstance(row, TableRow) and row.captions is not None:
            captions, error = row.captions, unusable(row.table, row.captions)
            place: str | None = f"{row.table}, {row.column}"
            files.pass_over(image)
        elif isinstance(row, str):
            captions, error, place = (), row, None
            files.pass_over(image)
        else:
            (captions, error), extension = files.find(image)
            place = f"NAME{extension}"
        if captions and place is not None:
            listing.captions_from[place] += 1
        is_out = error is not None and files.is_out_of_reach(image)
        item = SourceItem(id=image, captions=captions, caption_error=error, is_caption_out_of_reach=is_out)
        listing.items.append(item)
    listing.orphans = sorted([*files.stray(), *rows.stray()])
    listing.notes += [
        f"the {extension} files of {counted(number, 'image')} are not used, because there are other captions; "
        f"--caption-extension {extension} uses only these"
        for extension, number in files.num_unused.items()
    ]
    refuse_unmet(files.options, listing.captions_from)
    return listing


def _read_tables(tables: list[str], files: CaptionFiles) -> TableRows:
    """Read the tables of a folder.

    Raises:
        SourceError: if a row is invalid, two rows name the same image, or a table is a link out of the source.
    """
    rows = TableRows()
    for table in tables:
        path = files.folder / table
        if files.within is not None and path.is_symlink():
            try:
                followed(path, files.within)
            except RejectedError as error:
                raise SourceError(f"{table}: {error.detail}") from error
        rows.add(table, read_rows(path, table, files.names, rows.notes))
    return rows


def _refuse(error: OSError) -> None:
    raise SourceError(f"{error.filename} cannot be read: {error.strerror}; the count of images would be wrong") from error
