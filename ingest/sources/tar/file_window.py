"""A byte range of a file as a file object."""

from __future__ import annotations

import io
import os
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer


class FileWindow(io.RawIOBase):
    """Reads `num_bytes` bytes of a file, starting at `offset`; closing the window closes the file."""

    def __init__(self, file: IO[bytes], offset: int, num_bytes: int) -> None:
        self._file, self._offset, self._num_bytes = file, offset, num_bytes
        self._at = 0

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
        wanted = max(0, min(len(view), self._num_bytes - self._at))
        got = os.preadv(self._file.fileno(), [view[:wanted]], self._offset + self._at) if wanted else 0
        self._at += got
        return got

    def close(self) -> None:
        self._file.close()
        super().close()
