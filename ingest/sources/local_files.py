"""Local image files: their size, mtime and bytes."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path  # noqa: TC003 - decoded by its annotation
from typing import TYPE_CHECKING, BinaryIO

from bucketline.ingest.images.rejects import Reason, RejectedError
from bucketline.ingest.sources.options import SourceOptions
from bucketline.ingest.sources.source import MAX_FILE_BYTES, Source, SourceBytes, Stamp

if TYPE_CHECKING:
    from bucketline.ingest.sources.source import SourceItem


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
        return (self.folder,)

    @property
    def _within(self) -> Path | None:
        return None if self.options.follow_links else self.folder

    def stamp(self, item: SourceItem) -> Stamp:
        return file_stamp(f"{self.folder}/{item.id}", self._within)  # a Path takes as long as the rest of the comparison

    def read(self, item: SourceItem) -> SourceBytes:
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


def read_file(path: str | Path, within: Path | None = None, at_most: int = MAX_FILE_BYTES) -> SourceBytes:
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
    return SourceBytes(data=data, stamp=stamp)


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
