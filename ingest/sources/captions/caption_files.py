"""Caption files next to images, found by the image's name; ignores the case of the extension and the Unicode normal form."""

from __future__ import annotations

import os
import unicodedata
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bucketline.ingest.images.rejects import RejectedError
from bucketline.ingest.sources.captions.caption_text import (
    JSON,
    MAX_CAPTIONS_BYTES,
    NOTHING,
    CaptionNames,
    Captions,
    ambiguous,
    too_long,
)
from bucketline.ingest.sources.local_files import TooLargeError, read_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from bucketline.ingest.sources.options import SourceOptions


def name_key(path: str) -> str:
    r"""Return a path in Unicode normal form C, so that paths that look the same compare equal.

    >>> name_key("cafe\u0301") == name_key("caf\u00e9")
    True
    """
    return path if path.isascii() else unicodedata.normalize("NFC", path)


@dataclass(slots=True, kw_only=True)
class CaptionFiles:
    """The caption files of a folder, by the name of the image that they may belong to."""

    folder: Path
    options: SourceOptions
    names: CaptionNames = field(init=False)
    within: Path | None = field(init=False)  # links that lead out of it are not followed; None follows all
    num_unused: Counter[str] = field(default_factory=Counter)  # images whose files with this extension are unused
    _files: dict[str, list[tuple[str, str]]] = field(default_factory=dict)  # path, extension; by key without extension
    _used: set[str] = field(default_factory=set)  # keys of images
    _out_of_reach: set[str] = field(default_factory=set)  # keys of files that could not be read at present

    def __post_init__(self) -> None:
        self.names = CaptionNames.of(self.options)
        self.within = None if self.options.follow_links else self.folder

    def add(self, path: str, extension: str) -> bool:
        """Record a file if `extension`, in lower case, is one of caption files; else return False."""
        if extension not in self.names.extensions:
            return False
        self._files.setdefault(name_key(path[: -len(extension)]), []).append((path, extension))
        return True

    def find(self, image: str) -> tuple[Captions, str | None]:
        """Return an image's captions and the extension that they came from, None if there are none."""
        stem = image[: image.rindex(".")]
        key = name_key(stem)
        self._used.add(key)
        candidates = self._files.get(key, ())
        if len(candidates) > 1:
            # if names differ only in their normal form, prefer the one equal to the image's
            candidates = [one for one in candidates if one[0].startswith(f"{stem}.")] or candidates
            return self._choose(candidates)
        for path, extension in candidates:
            if (found := self._read(path, extension)) != NOTHING:
                return found, extension
        return NOTHING, None

    def _choose(self, candidates: Sequence[tuple[str, str]]) -> tuple[Captions, str | None]:
        """Return the captions of the first extension that has any; two files with the same extension are ambiguous."""
        found, taken = NOTHING, None
        for extension in self.names.extensions:
            paths = [path for path, own in candidates if own == extension]
            if not paths:
                continue
            if taken is None:
                found = self._read(paths[0], extension) if len(paths) == 1 else ambiguous(map(os.path.basename, paths))
                taken = extension if found != NOTHING else None
            elif extension != JSON:  # JSON files often hold other things
                self.num_unused[extension] += 1
        return found, taken

    def find_all(self, images: Iterable[str]) -> Iterator[tuple[Captions, str | None]]:
        """Yield what `find` returns for each image, in order."""
        return map(self.find, images)

    def candidates(self, image: str) -> list[str]:
        """Return the paths of the files that may hold an image's captions."""
        return [path for path, _ in self._files.get(name_key(image[: image.rindex(".")]), ())]

    def load(self, path: str) -> bytes:
        """Return a file's content."""
        return read_file(f"{self.folder}/{path}", self.within, MAX_CAPTIONS_BYTES).data

    def pass_over(self, image: str) -> None:
        """Record that an image's captions come from elsewhere, so that its caption files do not count as stray."""
        self._used.add(name_key(image[: image.rindex(".")]))

    def is_out_of_reach(self, image: str) -> bool:
        """Return True if an image's captions could not be read at present and are therefore unknown."""
        return name_key(image[: image.rindex(".")]) in self._out_of_reach

    def stray(self) -> list[str]:
        """Return the caption files without an image, except JSON files, which may hold other things."""
        return [
            path
            for key, paths in self._files.items()
            for path, extension in paths
            if key not in self._used and extension != JSON
        ]

    def _read(self, path: str, extension: str) -> Captions:
        name = path.rpartition("/")[2]
        try:
            data = self.load(path)
        except TooLargeError as error:
            return too_long(name, error.num_bytes)
        except RejectedError as error:
            # An I/O error, a dangling link, a link out of the source: none says what the captions are, so the row is kept.
            self._out_of_reach.add(name_key(path[: -len(extension)]))
            return (), f"{name}: {error.detail}"
        return self.names.read(extension, name, data)
