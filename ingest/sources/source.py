"""Protocol of sources: a listing of images with their captions, and the bytes of each image."""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, BinaryIO, Protocol

from bucketline.errors import SourceError
from bucketline.store.format.sample_record import storable_mtime_ns

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

MAX_FILE_BYTES = 1 << 30  # of one image


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """Size and mtime, to detect whether an image changed without reading it."""

    num_bytes: int
    mtime_ns: int  # clamped to 0 to MAX_MTIME_NS, since some images are dated before 1970 or after 2262

    def __post_init__(self) -> None:
        object.__setattr__(self, "mtime_ns", storable_mtime_ns(self.mtime_ns))


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceBytes:
    """The content of an image file, and its stamp when it was read."""

    data: bytes
    stamp: Stamp


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

    def read(self, item: SourceItem) -> SourceBytes:
        """Read an item; safe to call from several threads."""

    def opened(self, item: SourceItem) -> BinaryIO:
        """Open an item to read a part of it, such as its header; safe to call from several threads."""
        return io.BytesIO(self.read(item).data)


def caption_rest(listing: Listing, caption: str | None) -> None:
    """Caption the images that have no caption with this one, except if their own could not be read."""
    if caption is None:
        return
    for at, item in enumerate(listing.items):
        if not item.captions and item.caption_error is None:
            listing.items[at] = replace(item, captions=(caption.strip(),))
            listing.captions_from["the default caption"] += 1


def note_place(seen: dict[str, str], sample_id: str, place: str) -> None:
    """Record in `seen` where an id was found."""
    if sample_id in seen:
        raise SourceError(
            f"two samples have the id {sample_id!r}: one at {seen[sample_id]}, one at {place}; ids must differ, so rename one "
            "(several captions of one image are a list in its one row)"
        )
    seen[sample_id] = place
