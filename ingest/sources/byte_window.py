"""A range of bytes, in a local file or elsewhere, as a file object."""

from __future__ import annotations

import io
import os
from abc import abstractmethod
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer


class ByteWindow(io.RawIOBase):
    """Keeps the position within `num_bytes` bytes; subclasses read at a position. Use it from one thread."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes, self._at = num_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, to: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._num_bytes}[whence]
        if base + to < 0:
            raise ValueError(f"{base + to} is not a position in a file")
        self._at = base + to
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Buffer) -> int:
        view = memoryview(buffer).cast("B")
        num_requested = max(0, min(len(view), self._num_bytes - self._at))
        num_read = self._read_at(self._at, view[:num_requested]) if num_requested else 0
        self._at += num_read
        return num_read

    @abstractmethod
    def _read_at(self, at: int, view: memoryview) -> int:
        """Fill `view`, which is not empty, from position `at`; return how many bytes were read, at least one before the end."""


class FileWindow(ByteWindow):
    """Reads `num_bytes` bytes of a file, starting at `offset`; closing the window closes the file."""

    def __init__(self, file: IO[bytes], offset: int, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self._file, self._offset = file, offset

    def close(self) -> None:
        self._file.close()
        super().close()

    def _read_at(self, at: int, view: memoryview) -> int:
        return os.preadv(self._file.fileno(), [view], self._offset + at)
