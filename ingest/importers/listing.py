"""List a cache: the samples that a format finds, with their ids, and with their captions as the trainer made them of files.

A trainer may take a file as one caption or a line of it, and put a trigger word in. If its text embeddings are called by a
digest of their caption, `_EmbeddedCaptions` finds out which of these it was; elsewhere `FileForm` says what the trainer does.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from bucketline.command_line import counted
from bucketline.errors import BucketlineError, SourceError, UsageError
from bucketline.ingest.importers.cache import CacheEntry, FileForm, Variant, files_below
from bucketline.ingest.sources.captions.caption_files import CaptionFiles
from bucketline.ingest.sources.captions.caption_text import JSON, lines_of
from bucketline.ingest.sources.options import SourceOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from bucketline.ingest.importers.cache import Importer, ListRequest, Spelled


@dataclass(slots=True, kw_only=True)
class CacheListing:
    """A cache's entries and what holds for all of them."""

    entries: list[CacheEntry]
    variant: str
    form: Variant
    family: str | None  # the text family whose layout the cache's embeddings have; None: it has none that can be kept
    captions_from: str
    root: str  # folder from which the ids of images are their paths, with a slash at its end
    text_unknown: str | None = None  # what is wrong if it has text embeddings, and none is of a caption that was found
    notes: list[str] = field(default_factory=list)


def listed(importer: Importer, request: ListRequest) -> CacheListing:
    """Return a cache's entries."""
    try:
        return _listed(importer, request)
    except BucketlineError:
        raise
    except Exception as error:
        raise SourceError(
            f"{request.source}: the files that list this cache of {importer.kind} are not as the trainer writes them "
            f"({type(error).__name__}: {error!s:.150}); cache it again, or restore them"
        ) from error


def _listed(importer: Importer, request: ListRequest) -> CacheListing:
    captions, found = _CaptionFolder(request, importer), importer.found(request)
    counts = Counter(dict.fromkeys(found.variants, 0))
    counts.update(entry.variant for entry in found.entries if entry.variant is not None)
    variant, form = _chosen(counts, request, importer)
    kept = [entry for entry in found.entries if entry.variant in (variant, None)]
    images = [entry.image.replace("\\", "/") for entry in kept if entry.image is not None]
    shared = shared_folder(images)
    root = shared if request.root is None or not any(image.startswith(request.root) for image in images) else request.root
    known = None if importer.embedded is None else _EmbeddedCaptions(captions, found.texts)
    times, entries = Counter[str](), list[CacheEntry]()
    for entry in kept:
        base, named, text_path = entry.id, entry.captioned or entry.id, entry.text_path
        if entry.image is not None:
            base, named = (entry.image.replace("\\", "/").removeprefix(start).lstrip("/") for start in (root, shared))
        if known is None or importer.embedded is None:
            own, problem = captions.of(named, in_cache=entry.captions)
        else:
            own, problem, text_path = known.of(named, partial(importer.embedded, entry, variant), entry.uncaptioned)
        sample_id = base + entry.suffix
        times[sample_id] += 1
        sample_id = sample_id if times[sample_id] == 1 else sample_id + entry.again
        entries.append(replace(entry, id=sample_id, text_path=text_path, captions=own, caption_problem=problem))
    listing = CacheListing(
        entries=entries,
        variant=variant,
        form=form,
        family=form.family if any(entry.text_path for entry in entries) else None,
        captions_from=captions.told,
        root=root,
        notes=[*found.notes],
    )
    if captions.shortened:
        files = counted(captions.shortened, "caption file")
        listing.notes.append(f"{files} with several lines: the first is taken, as sd-scripts does")
    if known is not None:
        known.tell(listing, importer.causes)
    return listing


def _chosen(found: Counter[str], request: ListRequest, importer: Importer) -> tuple[str, Variant]:
    """Return the variant to import: the only one of the source, or the one that the user names."""
    if not found:
        raise SourceError(f"{request.source} has no latents in the format of {importer.kind}; name the folder of its cache")
    there = ", ".join(f"{name or 'unnamed'} ({count})" for name, count in found.most_common())
    if request.variant is not None and request.variant not in found:
        raise SourceError(f"{request.source} has no latents of {request.variant!r:.80}, it has {there}; correct --variant")
    if request.variant is None and len(found) > 1:
        raise SourceError(f"{request.source} has latents of several models or sizes: {there}; choose one by --variant NAME")
    variant = next(iter(found)) if request.variant is None else request.variant
    form = importer.variants.get(variant, importer.other)
    if form is None or any(word in variant.lower() for word in importer.unknown):
        known = f"; known are {', '.join(importer.variants)}" if form is None else ""
        form = Variant(why_not=f"how they are scaled is unknown{known}")
    if form.why_not is not None:
        raise SourceError(f"latents of {variant!r:.80} in the format of {importer.kind} cannot be imported: {form.why_not}")
    return variant, form


def shared_folder(paths: Sequence[str]) -> str:
    """Return the folder that all paths are in, with a slash at its end; an empty text if there is none.

    >>> shared_folder(["/data/photos/cats/a.png", "/data/photos/b.png"])
    '/data/photos/'
    """
    try:
        shared = os.path.commonpath({os.path.dirname(path) for path in paths})  # noqa: PTH120 - a path of any machine
    except ValueError:  # no paths, or some absolute, some not
        return ""
    return f"{shared.rstrip('/')}/" if shared else ""


class _CaptionFolder:
    """The caption files below a folder, or the captions that a cache has itself."""

    def __init__(self, request: ListRequest, importer: Importer) -> None:
        """List the folder that the user names; without one, the source, unless the cache has the captions."""
        self._importer, self._trigger = importer, request.trigger
        self._files: CaptionFiles | None = None
        self.shortened = 0  # captions of several lines, of which one is used
        if request.captions is None and importer.captions_in is not None:
            if request.trigger is not None:
                raise UsageError(
                    f"--trigger {request.trigger} is for captions of files, and those of this cache are from "
                    f"{importer.captions_in}; name the files' folder by --captions, or leave --trigger out"
                )
            self.told = importer.captions_in
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

    def of(self, name: str, in_cache: tuple[str, ...] | None) -> tuple[tuple[str, ...] | None, str | None]:
        """Return an image's captions, and why they cannot be used if they cannot; `in_cache`: of the cache."""
        if self._files is None:
            return in_cache, None
        forms, problem = self.forms(name)
        return ((), problem) if problem is not None else (self.usual(forms), None)

    def forms(self, name: str) -> tuple[list[tuple[str, ...]], str | None]:
        """Return the texts of a caption file, as one and then by lines if it has several; why they are unusable."""
        assert self._files is not None
        (texts, problem), extension = self._files.find(_with_dot(name))
        lines = lines_of(texts[0]) if texts and extension != JSON else ()
        return [texts, lines] if len(lines) > 1 else [texts], problem

    def usual(self, forms: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
        """Return the captions that the trainer usually makes of a file; of none, the trigger word if there is one."""
        texts = forms[0] if self._importer.form is FileForm.WHOLE else forms[-1]
        if self._importer.form is FileForm.FIRST_LINE and len(forms) > 1:
            self.shortened += 1
            texts = texts[:1]
        captions = [self.spelled(text)[0][0] for text in texts or ("",)]
        return tuple(caption for caption in captions if caption)

    def spelled(self, text: str) -> list[Spelled]:
        """Return the captions that a text of a file may have become, the usual one first."""
        return list(dict.fromkeys(self._importer.spelled(text, self._trigger)))


class _EmbeddedCaptions:
    """A cache's text embeddings in files that are called by a digest of their caption, which tells what was embedded."""

    def __init__(self, captions: _CaptionFolder, paths: Mapping[str, str]) -> None:
        self._captions, self._paths, self._used = captions, paths, set[str]()
        self._found = self._missing = 0  # samples with a caption that has an embedding, and with only others
        self._whole = 0  # files of several lines that were embedded as one caption

    def of(
        self, name: str, names: Callable[[str], Mapping[str, bool]], unless_in_file: Sequence[str]
    ) -> tuple[tuple[str, ...], str | None, str | None]:
        """Return an image's captions, why they cannot be used if they cannot, and the file with the first one's embedding.

        `names` returns what a caption's embedding may be called, and whether it is then of the model that is imported;
        `unless_in_file` are texts that the trainer takes of images without a caption file.
        """
        forms, problem = self._captions.forms(name)
        for embedded in {"", *(embedded for _, embedded in self._captions.spelled(""))}:  # of captions that were dropped
            self._used |= names(embedded).keys() & self._paths.keys()
        if problem is not None:
            return (), problem, None
        for texts in forms if forms[0] else [(text,) for text in (*unless_in_file, "")]:
            found = [self._embedded(text, names) for text in texts]
            if hits := [one for one in found if one[1]]:
                self._found += 1
                self._whole += len(forms) > 1 and texts is forms[0]
                captions = (*(stored for stored, _ in hits), *(stored for stored, there in found if not there))
                return captions, None, next((self._paths[one] for one, is_own in hits[0][1].items() if is_own), None)
        captions = self._captions.usual(forms)
        self._missing += bool(captions)
        return captions, None, None

    def _embedded(self, text: str, names: Callable[[str], Mapping[str, bool]]) -> tuple[str, Mapping[str, bool]]:
        """Return the caption that a text became, and those of `names` that are there; the usual caption if none is."""
        spelled = self._captions.spelled(text)
        for stored, embedded in spelled:
            there = {name: is_own for name, is_own in names(embedded).items() if name in self._paths}
            if there and stored:
                self._used |= there.keys()
                return stored, there
        return spelled[0][0], {}

    def tell(self, listing: CacheListing, causes: str) -> None:
        """Note in a listing how many captions and embeddings have no counterpart, and whether none has."""
        if self._whole:
            files = f"{counted(self._whole, 'caption file')} with several lines {'is' if self._whole == 1 else 'are'}"
            listing.notes.append(f"{files} one caption each, as the trainer embedded it")
        unknown = len(self._paths) - len(self._used)
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


def _with_dot(name: str) -> str:
    """Return a name of an image, by which its caption files are found, with a dot before the extension that it may lack."""
    return name if "." in name.rpartition("/")[2] else f"{name}."
