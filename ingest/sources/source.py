"""Protocol and options of sources: a listing of images with their captions, and the bytes of each image."""

from __future__ import annotations

import errno
import io
import os
import stat
from collections import Counter
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal, Protocol

from bucketline.errors import SourceError, UsageError
from bucketline.ingest.images.crop import Reason, RejectedError
from bucketline.ingest.rules import held_out
from bucketline.ingest.sources.partner_names import REFERENCE, PartnerRules
from bucketline.options import Hidden  # noqa: TC001 - read from its annotations
from bucketline.store.format.schema import storable_mtime_ns
from bucketline.store.remote.urls import ObjectArguments

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from bucketline.ingest.rules import HeldOut
    from bucketline.ingest.sources.partner_names import Partner


MAX_FILE_BYTES = 1 << 30  # of one image
MIN_AREA_PX, MAX_AREA_PX = 32, 4096  # of `references_area`

CaptionPer = Literal["line", "file"]
"""What a text file, or a cell of a CSV, has several of: a caption per line, or one caption, its lines joined by spaces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceItem:
    """An image of the source. Its id includes the file extension, so `a.png` and `a.jpg` differ."""

    id: str
    captions: tuple[str, ...]
    caption_error: str | None = None  # why its captions could not be read
    is_caption_out_of_reach: bool = False  # the captions could not be read at present, and are unknown
    held_out: bool = False  # in a validation split of the source itself
    at: tuple[int, ...] = ()  # position, as numbers that only its source interprets
    held: bytes | None = field(default=None, repr=False)  # its bytes, if they were read with others
    partners: tuple[Partner, ...] = ()  # its references in order, then its mask
    partner_error: str | None = None  # why its partners cannot be used


@dataclass(slots=True)
class Listing:
    """The contents of a source: its images, captions without an image, and images that are skipped on purpose.

    An empty folder may be the mount point of an unmounted disk.
    """

    items: list[SourceItem] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    passed_over: list[str] = field(default_factory=list)
    empty_folders: list[str] = field(default_factory=list)  # paths of empty folders in the source
    captions_from: Counter[str] = field(default_factory=Counter)  # number of images per origin of their captions
    notes: list[str] = field(default_factory=list)  # messages about what was left out, or may be a misunderstanding
    num_references: int = 0  # the most of one image


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """Size and mtime, to detect whether an image changed without reading it."""

    num_bytes: int
    mtime_ns: int  # clamped to 0 to MAX_MTIME_NS, since some images are dated before 1970 or after 2262

    def __post_init__(self) -> None:
        object.__setattr__(self, "mtime_ns", storable_mtime_ns(self.mtime_ns))


class Source(Protocol):
    """A source of images and captions. `source_as_json` serialises it for other ranks."""

    @property
    def local_paths(self) -> tuple[Path, ...]:
        """Local folders and files that the source reads; they must not overlap with the store."""
        return ()

    def listing(self) -> Listing:
        """List every image once."""

    def in_turn(self, items: Iterable[SourceItem]) -> Iterator[SourceItem]:
        """Return these items in the listing's order, ready for `stamp` and `read`; items may carry their bytes."""
        return iter(items)

    def stamp(self, item: SourceItem) -> Stamp:
        """Return an item's size and mtime without reading it; safe to call from several threads."""

    def read(self, item: SourceItem) -> tuple[bytes, Stamp]:
        """Read an item: return its content, and its stamp when it was read; safe to call from several threads."""

    def opened(self, item: SourceItem) -> BinaryIO:
        """Open an item to read a part of it, such as its header; safe to call from several threads."""
        return io.BytesIO(self.read(item)[0])


def caption_rest(listing: Listing, caption: str | None) -> None:
    """Caption the images that have no caption with this one, except if their own could not be read."""
    if caption is None:
        return
    for at, item in enumerate(listing.items):
        if not item.captions and item.caption_error is None:
            listing.items[at] = replace(item, captions=(caption.strip(),))
            listing.captions_from["the default caption"] += 1


def note_references(listing: Listing) -> None:
    """Count the references of a listing's samples: the most of one."""
    counts = (sum(one.kind == REFERENCE for one in item.partners) for item in listing.items if item.partners)
    listing.num_references = max(counts, default=0)


def split_of(item: SourceItem, rule: HeldOut) -> str:
    """Return `val` for an image that its source or the hash holds out, else `train`."""
    return "val" if item.held_out or held_out(item.id, rule.fraction, rule.by) else "train"


def note_place(seen: dict[str, str], sample_id: str, place: str) -> None:
    """Record in `seen` where an id was found."""
    if sample_id in seen:
        raise SourceError(
            f"two samples have the id {sample_id!r}: one at {seen[sample_id]}, one at {place}; ids must differ, so rename one "
            "(several captions of one image are a list in its one row)"
        )
    seen[sample_id] = place


# --------------------------------------------------------------------------------------------------------------------- options


@dataclass(frozen=True, kw_only=True)
class SourceOptions(ObjectArguments):
    """Options about captions, splits, links and object storage."""

    captions_from: tuple[str, ...] = ()  # a column or field, and .EXT of caption files; empty: the usual ones
    caption_per: CaptionPer = "line"
    caption: str | None = None  # of images without one; None: they get the empty caption
    dataset_splits: tuple[str, ...] = ()  # NAME, NAME=train or NAME=val; empty: all but test
    follow_links: bool = False  # follow file symlinks that lead out of the source
    references: Hidden[tuple[str, ...]] = ()  # this and the following: see `PartnerRules`
    references_optional: Hidden[bool] = False  # a sample may have fewer references than others, or none
    references_area: Hidden[int | None] = None  # side in px of a square with as many pixels as a reference gets
    mask: Hidden[str | None] = None

    def __post_init__(self) -> None:
        ObjectArguments.__post_init__(self)
        _ = self.partner_rules
        if self.references_area is not None and not MIN_AREA_PX <= self.references_area <= MAX_AREA_PX:
            raise UsageError(
                f"references_area is {self.references_area}, expected a square's side of {MIN_AREA_PX} to {MAX_AREA_PX} px"
            )
        for one, kind in ((self._columns, "column"), (self._extensions, "extension")):
            if len(one) > 1:
                raise UsageError(f"--captions-from {one[0]} and {one[1]}: expected at most one {kind}")
        extension = self.caption_extension
        if extension is not None and (not extension.strip(".") or "/" in extension):
            raise UsageError(f"--captions-from is {extension!r}, expected a column's name, or an extension such as .caption")
        caption = self.caption
        if caption is not None and (not caption.strip() or any("\ud800" <= letter <= "\udfff" for letter in caption)):
            raise UsageError(f"caption is {caption!r:.80}, expected a caption, such as 'a photo of a dog'")
        for asked in self.dataset_splits:
            name, equals, target = asked.partition("=")
            if not name or (equals and target not in ("train", "val")):
                raise UsageError(f"dataset_splits has {asked!r}, expected a split's name, NAME=train or NAME=val")

    @property
    def _columns(self) -> list[str]:
        return [one for one in self.captions_from if not one.startswith(".")]

    @property
    def _extensions(self) -> list[str]:
        return [one for one in self.captions_from if one.startswith(".")]

    @property
    def caption_column(self) -> str | None:
        """Column of tables and saved datasets, or field of JSON files, that has the captions; None: the usual names."""
        return next(iter(self._columns), None)

    @property
    def caption_extension(self) -> str | None:
        """Extension of the caption files, with its dot; None: the usual ones."""
        return next(iter(self._extensions), None)

    @property
    def partner_rules(self) -> PartnerRules:
        return PartnerRules.of(self.references, self.mask, optional=self.references_optional)

    def alone(self) -> SourceOptions:
        """Return only these options, without the other fields of a subclass."""
        return SourceOptions(**{field.name: getattr(self, field.name) for field in fields(SourceOptions)})


# ----------------------------------------------------------------------------------------------------------------- local files


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalFileSource(Source):
    """Base of sources whose images are files of a folder; a sample's id is its path relative to the folder."""

    path: Path  # the folder, or a table in it
    options: SourceOptions = field(default_factory=SourceOptions)

    @property
    def folder(self) -> Path:
        return self.path

    @property
    def local_paths(self) -> tuple[Path, ...]:
        return (self.folder, *(Path(place) for place in self.options.partner_rules.places if "://" not in place))

    @property
    def _within(self) -> Path | None:
        return None if self.options.follow_links else self.folder

    def stamp(self, item: SourceItem) -> Stamp:
        return file_stamp(f"{self.folder}/{item.id}", self._within)  # a Path takes as long as the rest of the comparison

    def read(self, item: SourceItem) -> tuple[bytes, Stamp]:
        return read_file(self.folder / item.id, self._within)

    def opened(self, item: SourceItem) -> BinaryIO:
        return open_file(self.folder / item.id, self._within)


def file_stamp(path: str | Path, within: Path | None = None) -> Stamp:
    """Return a file's size and mtime. Links that lead out of the folder `within` are not followed; None follows all links."""
    try:
        if within is None:
            return _stamp(os.stat(path))  # noqa: PTH116 - called per image, and accepts surrogates as they are
        status = os.lstat(path)
        return _stamp(os.stat(followed(path, within)) if stat.S_ISLNK(status.st_mode) else status)  # noqa: PTH116 - likewise
    except OSError as error:
        raise RejectedError(Reason.UNREADABLE, error.strerror or str(error)) from error


def read_file(path: str | Path, within: Path | None = None, at_most: int = MAX_FILE_BYTES) -> tuple[bytes, Stamp]:
    """Read a file with its current size and mtime; treats links as `file_stamp` does.

    With few system calls, since an image may have a caption file.
    """
    try:
        descriptor = _opened(path, within)
        try:
            stamp, data = _stamp(os.fstat(descriptor)), b""
            refuse_too_large(stamp.num_bytes, at_most)
            while len(data) < stamp.num_bytes and (part := os.read(descriptor, stamp.num_bytes - len(data))):
                data += part
        finally:
            os.close(descriptor)
    except OSError as error:
        raise RejectedError(Reason.UNREADABLE, error.strerror or str(error)) from error
    if len(data) < stamp.num_bytes:
        raise RejectedError(Reason.UNREADABLE, f"it has {len(data)} of {stamp.num_bytes} bytes: it changed while it was read")
    return data, stamp


def open_file(path: str | Path, within: Path | None = None, at_most: int = MAX_FILE_BYTES) -> BinaryIO:
    """Open a file to read a part of it; treats links as `file_stamp` does."""
    try:
        file = open(_opened(path, within), "rb")  # noqa: SIM115 - the caller closes it
    except OSError as error:
        raise RejectedError(Reason.UNREADABLE, error.strerror or str(error)) from error
    try:
        refuse_too_large(_stamp(os.fstat(file.fileno())).num_bytes, at_most)
    except BaseException:
        file.close()
        raise
    return file


class LinkedOutError(RejectedError):
    """A link leads out of the source; the detail advises `--follow-links`, which commands that pack and scan have."""


LEADS_OUT = "a link that leads out of the source"


def followed(path: str | Path, within: Path) -> str:
    """Return the target of a link."""
    real = os.path.realpath(path)
    if not real.startswith(os.path.realpath(within).rstrip("/") + "/"):
        raise LinkedOutError(Reason.UNREADABLE, f"{LEADS_OUT}; it is not followed without --follow-links")
    return real


class TooLargeError(RejectedError):
    """A file has more bytes than are read into memory."""

    def __init__(self, num_bytes: int, at_most: int) -> None:
        super().__init__(Reason.TOO_LARGE, f"a file of {num_bytes} bytes, at most {at_most} are read")
        self.num_bytes = num_bytes


def refuse_too_large(num_bytes: int, at_most: int = MAX_FILE_BYTES) -> None:
    """Check the size of a file before it is read into memory."""
    if num_bytes > at_most:
        raise TooLargeError(num_bytes, at_most)


def _stamp(status: os.stat_result) -> Stamp:
    if not stat.S_ISREG(status.st_mode):
        raise RejectedError(Reason.UNREADABLE, "not a file (a pipe, a device or a folder)")
    return Stamp(num_bytes=status.st_size, mtime_ns=status.st_mtime_ns)


def _opened(path: str | Path, within: Path | None) -> int:
    """Open a file without blocking if it is a pipe; return its descriptor."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    if within is None:
        return os.open(path, flags)
    try:
        return os.open(path, flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
    return os.open(followed(path, within), flags)
