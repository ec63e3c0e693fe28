"""Iterate over a tar, forwards only; damage raises an error instead of shortening the list.

Like the webdataset package, this uses the standard library's tarfile. On its own, tarfile takes a damaged or missing
header for the end of the archive, and silently loses the images after it. This module therefore checks the last block
that tarfile read.
"""

from __future__ import annotations

import io
import tarfile
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from bucketline.errors import BucketlineError, SourceError
from bucketline.ingest.sources.source import MAX_FILE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

END_MARK = bytes(tarfile.BLOCKSIZE)
_CHUNK_BYTES = 1 << 20
_MAGIC_BYTES = 6
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd")  # gzip, bzip2, xz, zstd
_CUT_SHORT = "the tar ends inside a member: it was cut short"
_REPAIR = "copy or create it again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A member of a tar. Its name is whatever the tar says, and is never used as a path."""

    name: str
    number: int  # among all members
    num_bytes: int
    offset: int  # of its bytes
    is_file: bool  # False for links, sparse files and others whose bytes are not stored as they are


class Forwards:
    """The file object for tarfile. It refuses to seek backwards, since a malicious header could cause an endless loop."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._num_bytes, self._at = file, file.seek(0, io.SEEK_END), 0
        self.seek(0)
        self.last, self.is_short = b"", False  # bytes of the last read; whether it met the end of the file

    def read(self, num_bytes: int = -1) -> bytes:
        if not 0 <= num_bytes <= MAX_FILE_BYTES:
            raise tarfile.ReadError(f"a header wants {num_bytes} bytes")
        parts = []
        while num_bytes and (part := self._file.read(num_bytes)):
            parts.append(part)
            num_bytes -= len(part)
        self.last, self.is_short = b"".join(parts), num_bytes > 0
        self._at += len(self.last)
        return self.last

    def seek(self, to: int, whence: int = 0) -> int:
        if to < self._at or whence:
            raise tarfile.ReadError(f"a header leads back to byte {to}")
        self._at = self._file.seek(to)
        return self._at

    def tell(self) -> int:
        return self._at

    @property
    def place(self) -> int:
        """The byte that was reached, at most the file's size; a seek can go past the end of a truncated file."""
        return min(self._at, self._num_bytes)

    def read_member(self, member: Member) -> bytes:
        """Read the current member."""
        self.seek(member.offset)
        data = self.read(member.num_bytes)
        if len(data) < member.num_bytes:
            raise tarfile.ReadError(f"{_CUT_SHORT} ({len(data)} of the {member.num_bytes} bytes of {member.name!r} are there)")
        return data


class Tar:
    """An open tar. Errors while reading it are SourceErrors that name the tar and the byte."""

    def __init__(self, file: IO[bytes], where: str) -> None:
        """Open a tar."""
        self._where = where
        try:
            head = file.read(_MAGIC_BYTES)
        except OSError as error:
            raise SourceError(f"{where} cannot be read: {error}") from error
        if head.startswith(_COMPRESSED):
            raise SourceError(f"{where} is compressed; unpack it first, by gunzip, bunzip2, unxz or unzstd")
        self._bytes = Forwards(file)

    def __iter__(self) -> Iterator[Member]:
        """Iterate over the members."""
        number = 0
        try:
            stream: Any = self._bytes
            archive: Any = tarfile.open(fileobj=stream, mode="r:", encoding="utf-8", errors="surrogateescape")  # noqa: SIM115 - the file is the caller's
            while (info := archive.next()) is not None:
                archive.members.clear()  # otherwise it keeps all of them
                if info.size < 0:
                    raise tarfile.ReadError(f"a header says {info.size} bytes")
                yield Member(
                    name=info.name,
                    number=number,
                    num_bytes=info.size,
                    offset=info.offset_data,
                    is_file=info.isreg() and not info.issparse(),
                )
                number += 1
            self._check_end()
        except BucketlineError:
            raise
        except Exception as error:
            is_cut = isinstance(error, tarfile.ReadError) and self._bytes.is_short and self._bytes.place > 0
            raise self._damaged(_CUT_SHORT if is_cut else str(error) or type(error).__name__) from error

    def read(self, member: Member) -> bytes:
        """Read the member that the iteration yielded last."""
        try:
            return self._bytes.read_member(member)
        except BucketlineError:
            raise
        except Exception as error:
            raise self._damaged(str(error) or type(error).__name__) from error

    def _check_end(self) -> None:
        last = self._bytes.last
        if last != END_MARK:
            is_cut = len(last) < len(END_MARK)
            found = "the tar ends without its end mark: it was cut short" if is_cut else "a header is damaged"
            raise self._damaged(f"{found}, and its number of images is unknown")
        while rest := self._bytes.read(_CHUNK_BYTES):
            if rest.strip(b"\0"):
                raise self._damaged("there is data after its end mark (concatenated tars?)")

    def _damaged(self, what: str) -> SourceError:
        return SourceError(f"{self._where}, near byte {self._bytes.place}: {what}; {_REPAIR}")
