"""Captions of a cache's samples: its own, or caption files in a folder of the user's, by the sample's name."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from bucketline.errors import SourceError
from bucketline.ingest.importers.cache import files_below
from bucketline.ingest.sources.captions.caption_files import CaptionFiles
from bucketline.ingest.sources.options import SourceOptions

if TYPE_CHECKING:
    from pathlib import Path

    from bucketline.ingest.importers.cache import ListRequest


class CaptionFolder:
    """The caption files below a folder, or the captions that a cache has itself."""

    def __init__(self, request: ListRequest, in_cache: str | None = None) -> None:
        """List the folder that the user names; without one, use those `in_cache`, or list the source if there are none.

        Raises:
            SourceError: if it is not a folder or cannot be read.
        """
        self._files: CaptionFiles | None = None
        if request.captions is None and in_cache is not None:
            self.told = in_cache
            return
        folder = request.captions or request.source
        self.told = "files of the source" if request.captions is None else "--captions"
        if not folder.is_dir():
            raise SourceError(f"{folder} is not a folder; expected one with caption files, NAME.txt for NAME.png")
        self._files = CaptionFiles(folder=folder, options=SourceOptions())
        for inside, names in files_below(folder):
            for name in names:
                self._files.add(inside + name, os.path.splitext(name)[1].lower())  # noqa: PTH122 - as in a listing

    def of(
        self, sample_id: str, *, stem: str | None = None, in_cache: tuple[str, ...] | None = None
    ) -> tuple[tuple[str, ...] | None, str | None]:
        """Return a sample's captions, and why they cannot be used if they cannot; `stem`: the id without extension.

        `in_cache`: those that the cache lists, if it lists them and is used.
        """
        if self._files is None:
            return in_cache, None
        (captions, problem), _ = self._files.find(_name(sample_id, stem))
        return captions, problem

    def is_newer(self, sample_id: str, path: Path, *, stem: str | None = None) -> bool:
        """Return True if one of a sample's caption files is newer than this file."""
        if self._files is None:
            return False
        try:
            made_ns = path.stat().st_mtime_ns
            own = self._files.candidates(_name(sample_id, stem))
            return any((self._files.folder / name).stat().st_mtime_ns > made_ns for name in own)
        except OSError:  # reading it says why
            return False


def _name(sample_id: str, stem: str | None) -> str:
    """Return the name of an image by which its caption files are found."""
    return f"{stem}." if stem is not None else sample_id if "." in sample_id.rpartition("/")[2] else f"{sample_id}."
