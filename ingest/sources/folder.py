"""A folder of images as a source, searched recursively, with captions from files or tables; kohya's folder names."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from bucketline.command_line import counted
from bucketline.errors import SourceError
from bucketline.files.paths import IMAGE_SUFFIXES, STATUS, is_run
from bucketline.ingest.images.crop import RejectedError
from bucketline.ingest.sources.captions.files import CaptionFiles, refuse_unmet, unusable
from bucketline.ingest.sources.captions.table import TABLE_SUFFIXES, TableRow, TableRows, folder_paths, read_rows
from bucketline.ingest.sources.hf_dataset import VAL, Splits, side_files, side_notes, split_in_folders
from bucketline.ingest.sources.object_place import list_place
from bucketline.ingest.sources.partner_names import FilePartners, left_out_notes
from bucketline.ingest.sources.source import Listing, LocalFileSource, SourceItem, SourceOptions, followed
from bucketline.store.format.manifest import MANIFEST

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


# --------------------------------------------------------------------------------------------------------------- kohya folders

_REPEATED = re.compile(r"([1-9][0-9]{0,2})_(.+)")  # not 2019_summer
_REGULARIZATION = re.compile(r"([0-9]+_)?reg(ulari[sz]ation)?([ _-].*)?", re.IGNORECASE)


def repeats_and_subject(folder: str) -> tuple[int, str] | None:
    """Return the repeats and the rest of a folder's name; None if it is not named so.

    >>> repeats_and_subject("10_sks dog"), repeats_and_subject("2019_summer")
    ((10, 'sks dog'), None)
    """
    found = _REPEATED.fullmatch(folder)
    return None if found is None else (int(found[1]), found[2].strip())


def is_regularization(folder: str) -> bool:
    """Return True if a folder's name says that its images are for prior preservation.

    >>> is_regularization("1_reg"), is_regularization("reg"), is_regularization("region")
    (True, True, False)
    """
    return _REGULARIZATION.fullmatch(folder) is not None


def naming_notes(images: Iterable[str]) -> list[str]:
    """Return what packing a folder as it is does to images (paths in the folder) in subfolders that are named so."""
    folders = sorted({image.partition("/")[0] for image in images if "/" in image})
    notes = []
    if repeated := [name for name in folders if repeats_and_subject(name) and not is_regularization(name)]:
        notes.append(
            f"{_some(repeated)}: no repeats are read from folder names here; "
            "if they are meant, pack a data set file with `kohya_folders = true` instead"
        )
    if regularization := list(filter(is_regularization, folders)):
        notes.append(
            f"{_some(regularization)}: packed as ordinary training images; to weigh regularization images less, move them out "
            "of the source, pack them into a store of their own, and train with a weight (--store NAME@0.5)"
        )
    return notes


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


# ---------------------------------------------------------------------------------------------------------------------- folder

_NAMED_LINKS = 3
TABLES = frozenset(f"metadata{suffix}" for suffix in TABLE_SUFFIXES)


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderSource(LocalFileSource):
    """The images of a folder and its subfolders."""

    def listing(self) -> Listing:
        """List the folder; see `list_folder`."""
        return list_folder(self.path, self.options)


def list_folder(source: Path, options: SourceOptions | None = None) -> Listing:
    """List a folder recursively. Skips hidden files and folders (names that begin with a dot), and links to folders."""
    if not source.is_dir():
        raise SourceError(f"{source} is not a folder; expected a folder of images")
    options = options or SourceOptions()
    captions = CaptionFiles(folder=source, options=options)
    partners = FilePartners(options.partner_rules, lambda place: list_place(place, options))
    inside_places = {os.path.realpath(place) for place in options.partner_rules.places}
    if os.path.realpath(source) in inside_places:
        raise SourceError(
            f"{source} is the folder of images, and that of their references or masks; name another folder, or references "
            "next to their images by same:{stem}_{n}"
        )
    found = FoundFiles(captions, partners)
    empty: list[str] = []
    links: list[str] = []
    for folder, folders, files in os.walk(source, onerror=_refuse):
        if not folders and not files:
            empty.append(Path(folder).relative_to(source).as_posix())
        if STATUS in files and is_run(Path(folder)):
            raise SourceError(
                f"{folder} has a training run ({STATUS}), whose images would be packed as samples; "
                "move it out of the source and rerun the command"
            )
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if inside_places:
            folders[:] = [name for name in folders if os.path.realpath(f"{folder}/{name}") not in inside_places]
        links += [path for name in folders if (path := os.path.join(folder, name)) and os.path.islink(path)]  # noqa: PTH114, PTH118
        inside = Path(folder).relative_to(source).as_posix()
        before = "" if inside == "." else f"{inside}/"
        for name in sorted(files):
            found.add(before, name)
    if not found.images:
        if (source / MANIFEST).is_file():
            raise SourceError(f"{source} is a store, which has no images; name the folder of its images")
        skipped = f"; {_skipped(source, links)}" if links else ""
        raise SourceError(f"{source} has no images, nor do its subfolders; expected .jpg, .png, .webp or others{skipped}")
    listing = found.listing(_read_tables(found.tables, captions), str(source))
    listing.empty_folders = sorted(empty)
    if links:
        listing.notes.append(_skipped(source, links))
    listing.notes += naming_notes(found.images)
    return listing


@dataclass(slots=True)
class FoundFiles:
    """The files of a folder, by what they are."""

    captions: CaptionFiles
    partners: FilePartners
    at: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # of images, as of `SourceItem`; empty on a disk
    images: list[str] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)

    def add(self, before: str, name: str) -> None:
        """Take a file `name` in the folder `before`, which is empty or ends with a slash. A hidden one is left out.

        Paths are strings, because one Path per file took as long as reading all captions.
        """
        path, suffix = before + name, os.path.splitext(name)[1].lower()  # noqa: PTH122
        if name.startswith("."):
            return
        if suffix in IMAGE_SUFFIXES:
            self.images.append(path)
        elif name in TABLES:
            self.tables.append(path)
        else:
            self.captions.add(path, suffix)

    def listing(self, rows: TableRows, source: str) -> Listing:
        """Return the images with their captions: those of `rows`, the rows of the tables, before those of files.

        Other trainers' side files and the images of splits that are left out are counted in notes. `source` is its path or URL.
        """
        listing, files = Listing(notes=rows.notes), self.captions
        images, targets = self._kept(rows, source, listing)
        found = files.find_all(image for image in images if not _has_captions(rows.of(image)))
        for image, target in zip(images, targets, strict=True):
            row = rows.of(image)
            if isinstance(row, TableRow) and row.captions is not None:
                captions, error = row.captions, unusable(row.table, row.captions)
                place: str | None = f"{row.table}, {row.column}"
                files.pass_over(image)
            elif isinstance(row, str):
                captions, error, place = (), row, None
                files.pass_over(image)
            else:
                (captions, error), extension = next(found)
                place = f"NAME{extension}"
            if captions and place is not None:
                listing.captions_from[place] += 1
            is_out = error is not None and files.is_out_of_reach(image)
            own, partner_error = self.partners.of(image, rows.cells.get(image), self._at)
            item = SourceItem(
                id=image,
                captions=captions,
                caption_error=error,
                is_caption_out_of_reach=is_out,
                held_out=target == VAL,
                at=self._at(image),
                partners=own,
                partner_error=partner_error,
            )
            listing.items.append(item)
        listing.orphans = sorted([*files.stray(), *rows.stray()])
        listing.notes += [
            f"the {extension} files of {counted(number, 'image')} are not used, because there are other captions; "
            f"--captions-from {extension} uses only these"
            for extension, number in files.num_unused.items()
        ]
        files.names.note_lines(listing.notes)
        listing.notes += self.partners.notes()
        refuse_unmet(files.options, listing.captions_from)
        return listing

    def _at(self, image: str) -> tuple[int, ...]:
        return self.at.get(image, ())

    def _kept(self, rows: TableRows, source: str, listing: Listing) -> tuple[list[str], list[str]]:
        images, splits = sorted(self.images), Splits(self.captions.options.dataset_splits)
        rows.match(images)
        taken = self.partners.take(images, self._at, rows.cells)
        sides = {image: kind for image, kind in side_files(images).items() if image not in taken and rows.of(image) is None}
        kept, targets = list[str](), list[str]()
        for image in images:
            row = rows.of(image)
            split = row.split if isinstance(row, TableRow) else ""
            target = None if image in sides or image in taken else splits.take(split or split_in_folders(image), image)
            if target is None:
                self.captions.pass_over(image)
            else:
                kept.append(image)
                targets.append(target)
        rows.refuse_unmatched(images)
        listing.notes += [*left_out_notes(taken.values()), *side_notes(sides.values())]
        splits.finish(source, source, listing.notes)
        if not kept:
            raise SourceError(f"{source} has no images to pack: {'; '.join(listing.notes)}")
        return kept, targets


def _has_captions(row: TableRow | str | None) -> bool:
    """Return whether a table says what an image's captions are, or that they are ambiguous."""
    return isinstance(row, str) or (row is not None and row.captions is not None)


def _skipped(source: Path, links: list[str]) -> str:
    named = [Path(link).relative_to(source).as_posix() for link in sorted(links)]
    more = f" and {len(named) - _NAMED_LINKS} more" if len(named) > _NAMED_LINKS else ""
    verb = "is" if len(named) == 1 else "are"
    return (
        f"{counted(len(named), 'linked folder')} {verb} skipped ({', '.join(named[:_NAMED_LINKS])}{more}): links to "
        "folders are never followed; put the folders themselves there"
    )


def _read_tables(tables: list[str], files: CaptionFiles) -> TableRows:
    rows = TableRows(folders=folder_paths(files.folder))
    for table in tables:
        path = files.folder / table
        if files.within is not None and path.is_symlink():
            try:
                followed(path, files.within)
            except RejectedError as error:
                raise SourceError(f"{table}: {error.detail}") from error
        rows.add(table, read_rows(path, table, files.names, rows.notes, files.options.partner_rules))
    return rows


def _refuse(error: OSError) -> None:
    raise SourceError(f"{error.filename} cannot be read: {error.strerror}; the count of images would be wrong") from error
