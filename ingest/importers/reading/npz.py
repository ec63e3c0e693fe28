"""Read npz files without pickles: a zip of npy files, each decoded when it is used.

`np.savez` stores its arrays as they are, which is read here in place; `zipfile` and numpy's parser of headers take several
times as long as reading a latent, and hold up other threads meanwhile. Whatever else a zip may be is left to `zipfile`.
"""

from __future__ import annotations

import io
import lzma
import math
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bucketline.ingest.importers.cache import damaged
from bucketline.ingest.importers.reading.read_files import MAX_UNPACKED_BYTES, read_whole
from bucketline.ingest.importers.reading.zip_members import stored_members

if TYPE_CHECKING:
    from pathlib import Path

_NPY = ".npy"
_ZIP = b"PK"
_HEADER = re.compile(
    rb"\{'descr': '([<>|=]?[A-Za-z]\d{1,3})', 'fortran_order': (True|False), 'shape': \(([0-9L, ]{0,400})\),? *\} *\n?"
)
_MAGIC = b"\x93NUMPY"
_DAMAGE = (
    ValueError,
    KeyError,
    EOFError,
    OSError,
    RuntimeError,
    struct.error,
    lzma.LZMAError,
    zipfile.BadZipFile,
    zlib.error,
)


class Npz(Mapping[str, NDArray[Any]]):
    """The arrays of an npz file."""

    def __init__(self, data: bytes, path: str) -> None:
        """Read the list of arrays.

        Raises:
            RejectedError: if it is not an npz file, or damaged.
        """
        self._path, self._data = path, data
        self._zip: zipfile.ZipFile | None = None
        if not data.startswith(_ZIP):
            raise damaged(f"{path} is not an npz file")
        with self._explaining():
            places = stored_members(data)
            if places is None:
                self._zip = zipfile.ZipFile(io.BytesIO(data))
                places = {info.filename: (0, info.file_size, 0) for info in self._zip.infolist()}
        self._places = {name.removesuffix(_NPY): (name, *place) for name, place in places.items()}

    def __getitem__(self, name: str) -> NDArray[Any]:
        """Return an array of its own.

        Raises:
            RejectedError: if it is damaged, holds a pickle, or is too large.
            KeyError: if there is none of this name.
        """
        member, begin, length, crc = self._places[name]
        with self._explaining():
            if self._zip is not None:
                if length > MAX_UNPACKED_BYTES:
                    raise ValueError(f"{name} has more than {MAX_UNPACKED_BYTES} bytes")
                return _npy(memoryview(self._zip.read(member)))
            data = memoryview(self._data)[begin : begin + length]
            if zlib.crc32(data) != crc:
                raise ValueError(f"{name} has another checksum")
            return _npy(data)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        try:
            yield
        except _DAMAGE as error:
            raise damaged(f"{self._path} is damaged or holds a pickle, which is never read ({error!s:.100})") from error


def _npy(data: memoryview) -> NDArray[Any]:
    """Return a copy of the array of an npy file.

    Raises:
        ValueError: if it is damaged, or holds a pickle.
    """
    version = bytes(data[6:8])
    if data[:6] != _MAGIC or version not in (b"\x01\x00", b"\x02\x00", b"\x03\x00"):
        raise ValueError("not npy of version 1 to 3")
    begin = 10 if version == b"\x01\x00" else 12
    end = begin + int.from_bytes(data[8:begin], "little")
    shape, is_fortran, dtype = _header(bytes(data[begin:end]))
    number = math.prod(shape)
    if len(data) - end < number * dtype.itemsize:
        raise ValueError(f"{len(data) - end} bytes of {dtype} {list(shape)}")
    # copied: the values begin at any byte of the file, and tensors need their own
    array = np.frombuffer(data, dtype=dtype, count=number, offset=end).copy()
    return array.reshape(shape, order="F" if is_fortran else "C")


@lru_cache(4096)
def _header(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return shape, order and dtype of a plain array.

    Raises:
        ValueError: if it is not one: objects, or several fields.
    """
    match = _HEADER.fullmatch(header)
    if match is None:
        raise ValueError(f"an array of objects or fields: {header[:60]!r}")
    lengths = [part.strip(b" L") for part in match[3].split(b",")]
    dtype = np.dtype(match[1].decode("ascii"))
    if dtype.hasobject:
        raise ValueError("it holds objects")
    return tuple(int(length) for length in lengths if length), match[2] == b"True", dtype


def read_npz(source: Path, path: str) -> Npz:
    """Return the arrays of an npz file.

    Raises:
        RejectedError: if it cannot be read or is damaged.
    """
    return Npz(read_whole(source, path), path)
