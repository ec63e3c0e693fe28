"""Read npz files without pickles: a zip of npy files, each decoded when it is used.

`np.savez` stores its arrays as they are, which is read here in place; `np.load` opens each member through `zipfile` and parses
its header again, which takes twice as long and holds up other threads meanwhile. Whatever else a zip may be is left to it.
"""

from __future__ import annotations

import io
import math
import zlib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from bucketline.ingest.importers.cache import damaged, odd_files_rejected
from bucketline.ingest.importers.reading.read_files import MAX_UNPACKED_BYTES, read_whole
from bucketline.ingest.importers.reading.zip_members import stored_members

if TYPE_CHECKING:
    from pathlib import Path

_ZIP = b"PK"
_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


class Npz(Mapping[str, NDArray[Any]]):
    """The arrays of an npz file."""

    def __init__(self, data: bytes, path: str) -> None:
        """Read the list of arrays.

        Raises:
            RejectedError: if it is not an npz file, or damaged.
        """
        self._path, self._data = path, data
        if not data.startswith(_ZIP):
            raise damaged(f"{path} is not an npz file")
        self._places: Mapping[str, Any]
        with odd_files_rejected(path):
            if (places := stored_members(data)) is not None:
                self._places = {name.removesuffix(".npy"): place for name, place in places.items()}
                return
            self._places = found = np.load(io.BytesIO(data), allow_pickle=False)
            if (largest := max((info.file_size for info in found.zip.infolist()), default=0)) > MAX_UNPACKED_BYTES:
                raise ValueError(f"an array of {largest} bytes, at most {MAX_UNPACKED_BYTES} are unpacked")

    def __getitem__(self, name: str) -> NDArray[Any]:
        """Return an array of its own.

        Raises:
            RejectedError: if it is damaged or holds a pickle.
            KeyError: if there is none of this name.
        """
        if name not in self._places:
            raise KeyError(name)
        with odd_files_rejected(self._path):
            if not isinstance(place := self._places[name], tuple):
                array: NDArray[Any] = place
                return array
            begin, length, crc = place
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


def _npy(data: memoryview) -> NDArray[Any]:
    """Return a copy of the array of an npy file.

    Raises:
        KeyError, ValueError: if it is damaged, or holds a pickle.
    """
    begin = 10 if data[6] == 1 else 12
    end = begin + int.from_bytes(data[8:begin], "little")
    shape, is_fortran, dtype = _header(bytes(data[:end]))
    # copied: the values begin at any byte of the file, and tensors need their own
    array = np.frombuffer(data, dtype=dtype, count=math.prod(shape), offset=end).copy()
    return array.reshape(shape, order="F" if is_fortran else "C")


@lru_cache(4096)
def _header(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return shape, order and dtype of a plain array.

    Raises:
        KeyError, ValueError: if it is not one: objects, or several fields.
    """
    file = io.BytesIO(header)
    shape, is_fortran, dtype = _HEADERS[npy.read_magic(file)](file)
    if dtype.hasobject or dtype.names:
        raise ValueError("an array of fields, or one that holds a pickle, which is never read")
    return shape, is_fortran, dtype


def read_npz(source: Path, path: str) -> Npz:
    """Return the arrays of an npz file.

    Raises:
        RejectedError: if it cannot be read or is damaged.
    """
    return Npz(read_whole(source, path), path)
