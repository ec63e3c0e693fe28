"""Single files of this machine as images: their size and time, and their bytes."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, BinaryIO

from bucketline.ingest.rejects import Reason, RejectedError
from bucketline.ingest.sources.source import MAX_FILE_BYTES, SourceBytes, Stamp

if TYPE_CHECKING:
    from pathlib import Path


def file_stamp(path: Path) -> Stamp:
    """Give a file's size and time.

    Raises:
        RejectedError: where it is no file.
    """
    try:
        return _stamp(os.stat(path))  # noqa: PTH116 - a call an image, and this one takes surrogates as they are
    except OSError as error:
        raise RejectedError(Reason.UNREADABLE, error.strerror or str(error)) from error


def read_file(path: Path) -> SourceBytes:
    """Read a whole file, with the size and time that it has now.

    Raises:
        RejectedError: where it is no file, cannot be read, or is too large.
    """
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            stamp = _stamp(os.fstat(file.fileno()))
            refuse_too_large(stamp.num_bytes)
            return SourceBytes(data=file.read(stamp.num_bytes), stamp=stamp)
    except OSError as error:
        raise RejectedError(Reason.UNREADABLE, error.strerror or str(error)) from error


def open_file(path: Path) -> BinaryIO:
    """Open a file to read some of it.

    Raises:
        RejectedError: where it is no file, cannot be read, or is too large.
    """
    try:
        file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115 - the caller closes it
    except OSError as error:
        raise RejectedError(Reason.UNREADABLE, error.strerror or str(error)) from error
    try:
        refuse_too_large(_stamp(os.fstat(file.fileno())).num_bytes)
    except BaseException:
        file.close()
        raise
    return file


def refuse_too_large(num_bytes: int) -> None:
    """Refuse a file that nobody wants in memory.

    Raises:
        RejectedError: where it has too many bytes.
    """
    if num_bytes > MAX_FILE_BYTES:
        raise RejectedError(Reason.TOO_LARGE, f"a file of {num_bytes} bytes, at most {MAX_FILE_BYTES} are read")


def _stamp(status: os.stat_result) -> Stamp:
    if not stat.S_ISREG(status.st_mode):
        raise RejectedError(Reason.UNREADABLE, "not a file (a pipe, a device or a folder)")
    return Stamp(num_bytes=status.st_size, mtime_ns=status.st_mtime_ns)


def _without_waiting(path: str, flags: int) -> int:
    """Open a file without waiting for one that is a pipe."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
