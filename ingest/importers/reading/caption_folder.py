"""Captions of a cache's samples: its own, or those of caption files, as the trainer made them of these files.

A trainer may take a file as one caption or a line of it, and put a trigger word in. Where its text embeddings are called by a
digest of their caption, `EmbeddedCaptions` finds out which of these it was; elsewhere `FileForm` says what the trainer does.
"""

from __future__ import annotations

import os
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

from bucketline.command_line import counted
from bucketline.errors import SourceError, UsageError
from bucketline.ingest.importers.cache import files_below
from bucketline.ingest.sources.captions.caption_files import CaptionFiles
from bucketline.ingest.sources.captions.caption_text import JSON, lines_of
from bucketline.ingest.sources.options import SourceOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    from bucketline.ingest.importers.cache import CacheListing, ListRequest

Spelled: TypeAlias = "tuple[str, str]"  # a caption as it is stored, and as the trainer embeds it; often with other white space


class FileForm(StrEnum):
    """The part of a caption file that a trainer takes as a caption."""

    WHOLE = "one caption"
    LINES = "a caption per line"
    FIRST_LINE = "the first line"


def prefixed(text: str, trigger: str | None) -> list[Spelled]:
    """Return a text as the caption that it becomes, with the trigger word before it if there is one."""
    caption = text.strip() if trigger is None else f"{trigger} {text.strip()}".strip()
    return [(caption, caption)]


class CaptionFolder:
    """The caption files below a folder, or the captions that a cache has itself."""

    def __init__(
        self,
        request: ListRequest,
        in_cache: str | None = None,
        *,
        form: FileForm = FileForm.LINES,
        spelled: Callable[[str, str | None], Iterable[Spelled]] = prefixed,
    ) -> None:
        """List the folder that the user names; without one, use those `in_cache`, or list the source if there are none.

        `spelled` returns what may become of a text and the trigger word, what the trainer usually makes of them first.

        Raises:
            SourceError: if it is not a folder or cannot be read.
            UsageError: if a trigger word is given for captions that are not those of files.
        """
        self._form, self._spelled, self._trigger = form, spelled, request.trigger
        self._files: CaptionFiles | None = None
        self.shortened = 0  # captions of several lines, of which one is used
        if request.captions is None and in_cache is not None:
            if request.trigger is not None:
                raise UsageError(
                    f"--trigger {request.trigger} is for captions of files, and those of this cache are from {in_cache}; "
                    "name the files' folder by --captions, or leave --trigger out"
                )
            self.told = in_cache
            return
        folder = request.captions or request.source
        self.told = "files of the source" if request.captions is None else "--captions"
        if not folder.is_dir():
            raise SourceError(f"{folder} is not a folder; expected one with caption files, NAME.txt for NAME.png")
        self._files = CaptionFiles(folder=folder, options=SourceOptions())
        self._files.names = replace(self._files.names, is_whole=True)
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
        forms, problem = self.forms(sample_id, stem=stem)
        return ((), problem) if problem is not None else (self.usual(forms), None)

    def forms(self, sample_id: str, *, stem: str | None = None) -> tuple[list[tuple[str, ...]], str | None]:
        """Return the texts of a sample's caption file, as one and then by lines if it has several; why they are unusable."""
        assert self._files is not None
        (texts, problem), extension = self._files.find(_name(sample_id, stem))
        lines = lines_of(texts[0]) if texts and extension != JSON else ()
        return [texts, lines] if len(lines) > 1 else [texts], problem

    def usual(self, forms: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
        """Return the captions that the trainer usually makes of a file; of none, the trigger word if there is one."""
        texts = forms[0] if self._form is FileForm.WHOLE else forms[-1]
        if self._form is FileForm.FIRST_LINE and len(forms) > 1:
            self.shortened += 1
            texts = texts[:1]
        captions = [self.spelled(text)[0][0] for text in texts or ("",)]
        return tuple(caption for caption in captions if caption)

    def spelled(self, text: str) -> list[Spelled]:
        """Return the captions that a text of a file may have become, the usual one first."""
        return list(dict.fromkeys(self._spelled(text, self._trigger)))

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


class EmbeddedCaptions:
    """A cache's text embeddings in files that are called by a digest of their caption, which tells what was embedded."""

    def __init__(self, captions: CaptionFolder, files: Collection[str]) -> None:
        self._captions, self._files, self._used = captions, files, set[str]()
        self._found = self._missing = 0  # samples with a caption that has an embedding, and with only others
        self._whole = 0  # files of several lines that were embedded as one caption

    def of(
        self, sample_id: str, names: Callable[[str], Mapping[str, bool]], unless_in_file: Sequence[str] = ()
    ) -> tuple[tuple[str, ...], str | None, str | None]:
        """Return a sample's captions, why they cannot be used if they cannot, and the file with the first one's embedding.

        `names` returns the files that a caption's embedding may be in, and whether they are of the model that is imported;
        `unless_in_file` are texts that the trainer takes of images without a caption file.
        """
        forms, problem = self._captions.forms(sample_id)
        for embedded in {"", *(embedded for _, embedded in self._captions.spelled(""))}:  # of captions that were dropped
            self._used |= names(embedded).keys() & self._files
        if problem is not None:
            return (), problem, None
        for texts in forms if forms[0] else [(text,) for text in (*unless_in_file, "")]:
            found = [self._embedded(text, names) for text in texts]
            if hits := [one for one in found if one[1]]:
                self._found += 1
                self._whole += len(forms) > 1 and texts is forms[0]
                captions = (*(stored for stored, _ in hits), *(stored for stored, there in found if not there))
                return captions, None, next((name for name, is_own in hits[0][1].items() if is_own), None)
        captions = self._captions.usual(forms)
        self._missing += bool(captions)
        return captions, None, None

    def _embedded(self, text: str, names: Callable[[str], Mapping[str, bool]]) -> tuple[str, Mapping[str, bool]]:
        """Return the caption that a text became, and those of `names` that are there; the usual caption if none is."""
        spelled = self._captions.spelled(text)
        for stored, embedded in spelled:
            there = {name: is_own for name, is_own in names(embedded).items() if name in self._files}
            if there and stored:
                self._used |= there.keys()
                return stored, there
        return spelled[0][0], {}

    def tell(self, listing: CacheListing, causes: str) -> None:
        """Note in a listing how many captions and embeddings have no counterpart, and whether none has."""
        if self._whole:
            files = f"{counted(self._whole, 'caption file')} with several lines {'is' if self._whole == 1 else 'are'}"
            listing.notes.append(f"{files} one caption each, as the trainer embedded it")
        unknown = len(self._files) - len(self._used)
        embeddings = counted(unknown, "text embedding")
        if unknown and not self._found:
            listing.text_unknown = f"none of the cache's {embeddings} is of a caption that is here"
            listing.notes.append(listing.text_unknown)
        elif self._missing:
            captions = f"{counted(self._missing, 'caption')} {'has' if self._missing == 1 else 'have'}"
            listing.notes.append(f"{captions} no embedding in the cache, which has {unknown} of captions that are not here")
        elif unknown:
            listing.notes.append(f"the cache has {embeddings} of captions that are not here")
        if self._missing or listing.text_unknown is not None:
            listing.notes.append(f"likely causes: {causes}; --text encode takes the captions as they are here")


def _name(sample_id: str, stem: str | None) -> str:
    """Return the name of an image by which its caption files are found."""
    return f"{stem}." if stem is not None else sample_id if "." in sample_id.rpartition("/")[2] else f"{sample_id}."
