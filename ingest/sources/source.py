"""What every source gives: a listing of its images with their captions, and the bytes of one of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, BinaryIO, Protocol

from bucketline.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

IMAGE_SUFFIXES = frozenset(
    [
        ".apng",
        ".avif",
        ".bmp",
        ".cur",
        ".dib",
        ".gif",
        ".heic",
        ".heif",
        ".ico",
        ".j2k",
        ".jfif",
        ".jp2",
        ".jpe",
        ".jpeg",
        ".jpg",
        ".jxl",
        ".pgm",
        ".png",
        ".pnm",
        ".ppm",
        ".qoi",
        ".tga",
        ".tif",
        ".tiff",
        ".webp",
    ]
)
MAX_FILE_BYTES = 1 << 30  # of one image


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceItem:
    """An image of the source. Its id has the image's extension: `a.png` and `a.jpg` differ."""

    id: str
    captions: tuple[str, ...]
    caption_error: str | None = None  # why its captions could not be read
    at: tuple[int, ...] = ()  # numbers by which its own source finds it
    held: bytes | None = field(default=None, repr=False)  # its bytes, where they come by a stream that runs on


@dataclass(slots=True)
class Listing:
    """What a source holds: its images, captions that belong to no image, and images that are passed over on purpose."""

    items: list[SourceItem] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    passed_over: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """What tells, without reading it, whether an image is the one that was packed."""

    num_bytes: int
    mtime_ns: int  # 0 or more

    def __post_init__(self) -> None:
        object.__setattr__(self, "mtime_ns", max(0, self.mtime_ns))  # the store's field has no sign


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceBytes:
    """An image's file, as it was when it was read."""

    data: bytes
    stamp: Stamp


class Source(Protocol):
    """Where images and captions come from. A source can be pickled, to be sent to other ranks once it has been listed."""

    @property
    def local_paths(self) -> tuple[Path, ...]:
        """Folders and files of this machine that the source reads; a store must lie apart from them."""

    def listing(self) -> Listing:
        """List every image once.

        Raises:
            SourceError: where that cannot be done; a listing that is too short is never given.
        """

    def in_turn(self, items: Iterable[SourceItem]) -> Iterator[SourceItem]:
        """Give these items of the listing, in its order, as `stamp` and `read` want them: a stream's come with their bytes."""

    def stamp(self, item: SourceItem) -> Stamp:
        """Give an item's size and time without reading it; safe to call from several threads.

        Raises:
            RejectedError: where there is no such file.
        """

    def read(self, item: SourceItem) -> SourceBytes:
        """Read an item; safe to call from several threads.

        Raises:
            RejectedError: where it cannot be read, or is too large.
            SourceError: where the source changed under the run.
        """

    def opened(self, item: SourceItem) -> BinaryIO:
        """Open an item to read some of it, such as its header; safe to call from several threads.

        Raises:
            RejectedError, SourceError: as `read`.
        """


def note_place(seen: dict[str, str], sample_id: str, place: str) -> None:
    """Note in `seen` where an id was found.

    Raises:
        SourceError: where it was found before; both places are named.
    """
    if sample_id in seen:
        raise SourceError(
            f"two samples have the id {sample_id!r}: one at {seen[sample_id]}, one at {place}; ids must differ, so rename one "
            "(several captions of one image are a list in its one row)"
        )
    seen[sample_id] = place
