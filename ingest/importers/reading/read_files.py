"""Read the files of a cache without ever running what they hold: npz without pickles, torch files by `weights_only`."""

from __future__ import annotations

import io
import json
import os
import pickle
import threading
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from bucketline.ingest.images.rejects import Reason, RejectedError
from bucketline.ingest.importers.cache import damaged
from bucketline.ingest.sources.local_files import _opened, open_file, read_file

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

MAX_UNPACKED_BYTES = 1 << 30  # of a compressed file
_NPY = ".npy"
_GZIP, _ZIP = b"\x1f\x8b", b"PK"


class Npz(Mapping[str, NDArray[Any]]):
    """The arrays of an npz file, each decoded when it is used."""

    def __init__(self, data: bytes, path: str) -> None:
        """Read the list of arrays.

        Raises:
            RejectedError: if it is not an npz file, or damaged.
        """
        self._path = path
        if not data.startswith(_ZIP):
            raise damaged(f"{path} is not an npz file")
        with self._explaining():
            self._zip = zipfile.ZipFile(io.BytesIO(data))
        self._names = frozenset(name.removesuffix(_NPY) for name in self._zip.namelist())

    def __getitem__(self, name: str) -> NDArray[Any]:
        """Return an array.

        Raises:
            RejectedError: if it is damaged, holds a pickle, or is too large.
            KeyError: if there is none of this name.
        """
        if name not in self._names:
            raise KeyError(name)
        with self._explaining():
            if self._zip.getinfo(name + _NPY).file_size > MAX_UNPACKED_BYTES:
                raise ValueError(f"{name} has more than {MAX_UNPACKED_BYTES} bytes")
            return _npy(self._zip.read(name + _NPY))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, KeyError, EOFError, OSError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
            raise damaged(f"{self._path} is damaged or holds a pickle, which is never read ({error!s:.100})") from error


def _npy(data: bytes) -> NDArray[Any]:
    """Return the array of an npy file.

    Raises:
        ValueError: if it is damaged, or holds a pickle.
    """
    version = np.lib.format.read_magic(io.BytesIO(data))
    begin, length = np.lib.format.MAGIC_LEN, 2 if version == (1, 0) else 4
    end = begin + length + int.from_bytes(data[begin : begin + length], "little")
    shape, is_fortran, dtype = _npy_header(version, data[begin:end])
    array = np.frombuffer(bytearray(memoryview(data)[end:]), dtype=dtype)
    return array.reshape(shape, order="F" if is_fortran else "C")


_PARSING = threading.Lock()  # numpy parses by `ast`, which in Python 3.11 fails in several threads at a time


@lru_cache(4096)
def _npy_header(version: tuple[int, int], header: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return shape, order and dtype. Parsing the header takes as long as reading a small latent, and few differ."""
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"npy of version {version}")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    with _PARSING:
        shape, is_fortran, dtype = read(io.BytesIO(header))
    if dtype.hasobject:
        raise ValueError("it holds objects")
    return shape, is_fortran, dtype


def read_npz(source: Path, path: str) -> Npz:
    """Return the arrays of an npz file.

    Raises:
        RejectedError: if it cannot be read or is damaged.
    """
    return Npz(read_file(f"{source}/{path}", source).data, path)


def read_torch(source: Path, path: str) -> Any:  # noqa: ANN401 - tensors in whatever containers the trainer used
    """Return the content of a file written by `torch.save`, gzipped or not, as `torch.load(weights_only=True)` reads it.

    Raises:
        RejectedError: if it cannot be read, is damaged, or needs more than tensors and plain containers.
    """
    return loaded(read_file(f"{source}/{path}", source).data, path)


def loaded(data: bytes, what: str) -> Any:  # noqa: ANN401 - as above
    """Return what `torch.save` wrote into `data`; as `read_torch`."""
    if data.startswith(_GZIP):
        unpacking = zlib.decompressobj(zlib.MAX_WBITS | 16)
        try:
            data = unpacking.decompress(data, MAX_UNPACKED_BYTES)
        except zlib.error as error:
            raise damaged(f"{what} is damaged gzip ({error!s:.100})") from error
        if not unpacking.eof:
            raise damaged(f"{what} is truncated, or has more than {MAX_UNPACKED_BYTES} bytes uncompressed")
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        first = next((line for line in str(error).splitlines() if "Unsupported" in line or "GLOBAL" in line), "")
        raise damaged(f"{what} needs unpickling beyond tensors, which is never done ({first or error!s:.150})") from error
    except Exception as error:
        raise damaged(f"{what} is damaged ({type(error).__name__}: {error!s:.100})") from error


def read_safetensors(source: Path, path: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a safetensors file.

    Raises:
        RejectedError: if it cannot be read or is damaged.
    """
    from safetensors.torch import load

    data = read_file(f"{source}/{path}", source).data
    try:
        tensors = load(data)
        length = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + length]).get("__metadata__") or {}
    except Exception as error:
        raise damaged(f"{path} is damaged ({error!s:.100})") from error
    return tensors, metadata


def read_metadata(source: Path, path: str) -> dict[str, str]:
    """Return only the metadata of a safetensors file.

    Raises:
        RejectedError: if it cannot be read or is damaged.
    """
    with open_file(f"{source}/{path}", source) as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            metadata = json.loads(file.read(min(length, MAX_UNPACKED_BYTES)))["__metadata__"]
            return {str(name): str(value) for name, value in metadata.items()}
        except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
            raise damaged(f"{path} is damaged, or has no metadata ({error!s:.100})") from error


def read_part(source: Path, path: str, offset: int, length: int) -> bytes:
    """Return a part of a larger file.

    Raises:
        RejectedError: if it cannot be read or ends before the part does.
    """
    with open_of_any_size(source, path) as descriptor:
        try:
            data = os.pread(descriptor.fileno(), length, offset)
        except OSError as error:
            raise RejectedError(Reason.UNREADABLE, error.strerror or str(error)) from error
    if len(data) < length:
        raise damaged(f"{path} ends at {offset + len(data)}, before the sample's last byte at {offset + length}")
    return data


def as_tensor(values: Mapping[str, Any], name: str) -> Tensor:
    """Return a value of a file as a tensor.

    Raises:
        RejectedError: if it is not there, or not an array of numbers.
    """
    value = values.get(name)
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiub" and value.dtype.isnative:
        return torch.from_numpy(value)
    raise damaged(f"it has no array {name!r}, only {', '.join(sorted(map(str, values)))[:200] or 'nothing'}")


def open_of_any_size(source: Path, path: str) -> io.BufferedReader:
    """Open a shard, which may be larger than a sample's file may be."""
    try:
        return os.fdopen(_opened(f"{source}/{path}", source), "rb")
    except OSError as error:
        raise RejectedError(Reason.UNREADABLE, error.strerror or str(error)) from error
