"""A range of bytes, in a local file or in object storage, as a file object."""

from __future__ import annotations

import io
import os
from abc import abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, TYPE_CHECKING

from bucketline.ingest.sources.objects.place import of_one_image

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from typing_extensions import Buffer

    from bucketline.store.remote.objects import ObjectFolder


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


HEADER_PART_BYTES = 64 << 10  # of an image of which only the header is read
STREAM_PART_BYTES = 4 << 20  # of what is read from one end to the other
STREAM_PARTS_AHEAD = 4


class ObjectFile(ByteWindow):
    """Reads an object of `num_bytes` bytes in parts. Use it from one thread."""

    def __init__(
        self,
        folder: ObjectFolder,
        name: str,
        num_bytes: int,
        *,
        part_bytes: int,
        parts_ahead: int = 0,
        explaining: Callable[[], AbstractContextManager[None]] = of_one_image,
    ) -> None:
        """Request nothing yet; `parts_ahead` are requested while one is read. Requests are made within `explaining`."""
        super().__init__(num_bytes)
        self._folder, self._name = folder, name
        self._part_bytes, self._parts_ahead = part_bytes, parts_ahead
        self._pool = ThreadPoolExecutor(parts_ahead + 1, thread_name_prefix="bucketline-part") if parts_ahead else None
        self._coming: dict[int, Future[bytes]] = {}
        self._number, self._part = -1, b""  # the part that was read last
        self._explaining = explaining

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        super().close()

    def _read_at(self, at: int, view: memoryview) -> int:
        number, within = divmod(at, self._part_bytes)
        data = self._read_part(number)[within : within + len(view)]
        view[: len(data)] = data
        return len(data)

    def _read_part(self, number: int) -> bytes:
        if number == self._number:
            return self._part
        if self._pool is None:
            part = self._request(number)
        else:
            last = min(number + self._parts_ahead, (self._num_bytes - 1) // self._part_bytes)
            self._coming = {at: future for at, future in self._coming.items() if number <= at}
            for at in range(number, last + 1):
                if at not in self._coming:
                    self._coming[at] = self._pool.submit(self._request, at)
            part = self._coming.pop(number).result()
        self._number, self._part = number, part
        return part

    def _request(self, number: int) -> bytes:
        begin = number * self._part_bytes
        with self._explaining():
            data = self._folder.read_range(self._name, begin, min(begin + self._part_bytes, self._num_bytes))
            return bytes(memoryview(data))
