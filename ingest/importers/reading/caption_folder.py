"""Captions of a cache that does not have them: caption files in a folder of the user's, by the sample's name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bucketline.errors import SourceError
from bucketline.ingest.importers.cache import files_below
from bucketline.ingest.sources.captions.caption_files import CaptionFiles
from bucketline.ingest.sources.captions.caption_text import EXTENSIONS
from bucketline.ingest.sources.options import SourceOptions

if TYPE_CHECKING:
    from pathlib import Path

    from bucketline.ingest.importers.cache import ListRequest


class CaptionFolder:
    """The caption files below a folder."""

    def __init__(self, request: ListRequest) -> None:
        """List the folder that the user names, else the source.

        Raises:
            SourceError: if it is not a folder or cannot be read.
        """
        folder = request.captions or request.source
        self.told = "files of the source" if request.captions is None else "--captions"
        if not folder.is_dir():
            raise SourceError(f"{folder} is not a folder; expected one with caption files, NAME.txt for NAME.png")
        self._files = CaptionFiles(folder=folder, options=SourceOptions())
        for inside, names in files_below(folder):
            for name in names:
                extension = name[name.rfind(".") :].lower() if "." in name else ""
                if extension in EXTENSIONS:
                    self._files.add(inside + name, extension)

    def of(self, sample_id: str, *, stem: str | None = None) -> tuple[tuple[str, ...], str | None]:
        """Return a sample's captions, and why they cannot be used if they cannot; `stem`: the id without extension."""
        (captions, problem), _ = self._files.find(_name(sample_id, stem))
        return captions, problem

    def is_newer(self, sample_id: str, path: Path, *, stem: str | None = None) -> bool:
        """Return True if one of a sample's caption files is newer than this file."""
        try:
            made_ns = path.stat().st_mtime_ns
            own = self._files.candidates(_name(sample_id, stem))
            return any((self._files.folder / name).stat().st_mtime_ns > made_ns for name in own)
        except OSError:  # reading it says why
            return False


def _name(sample_id: str, stem: str | None) -> str:
    """Return the name of an image by which its caption files are found."""
    return f"{stem}." if stem is not None else sample_id if "." in sample_id.rpartition("/")[2] else f"{sample_id}."
