"""Read the files of a cache without ever running what they hold: torch files by `weights_only`, safetensors files, parts."""

from __future__ import annotations

import io
import json
import os
import pickle
import sys
import threading
import zipfile
import zlib
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, BinaryIO, Generic, TypeVar

import numpy as np
import torch

from bucketline.ingest.images.rejects import Reason, RejectedError
from bucketline.ingest.importers.cache import damaged, odd_files_rejected, squeezed
from bucketline.ingest.importers.reading.zip_members import stored_members
from bucketline.ingest.sources.local_files import file_stamp, open_file, read_file

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor

MAX_UNPACKED_BYTES = 256 << 20  # of a compressed file, or a compressed member of one
_GZIP, _ZIP = b"\x1f\x8b", b"PK"
T = TypeVar("T")


def read_whole(source: Path, path: str) -> bytes:
    """Return a file's bytes.

    Raises:
        RejectedError: if it cannot be read or is too large.
    """
    return read_file(f"{source}/{path}", source).data


def read_torch(source: Path, path: str) -> Any:  # noqa: ANN401 - tensors in whatever containers the trainer used
    """Return the content of a file written by `torch.save`, gzipped or not, as `torch.load(weights_only=True)` reads it.

    Raises:
        RejectedError: if it cannot be read, is damaged, or needs more than tensors and plain containers.
    """
    return loaded(read_whole(source, path), path)


def loaded_dict(data: bytes, what: str) -> dict[str, Any]:
    """Return the dictionary that `torch.save` wrote into `data`; as `read_torch`."""
    found = loaded(data, what)
    if not isinstance(found, dict):
        raise damaged(f"{what} holds a {type(found).__name__}, expected a dictionary")
    return found


def loaded(data: bytes, what: str) -> Any:  # noqa: ANN401 - as above
    """Return what `torch.save` wrote into `data`; as `read_torch`. Its tensors have values of their own, in memory."""
    with odd_files_rejected(what):
        if data.startswith(_GZIP):
            unpacking = zlib.decompressobj(zlib.MAX_WBITS | 16)
            data = unpacking.decompress(data, MAX_UNPACKED_BYTES)
            if not unpacking.eof:
                raise ValueError(f"truncated gzip, or more than {MAX_UNPACKED_BYTES} bytes uncompressed")
        if data.startswith(_ZIP):
            _refuse_packed(data, what)
        try:
            found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            first = next((line for line in str(error).splitlines() if "Unsupported" in line or "GLOBAL" in line), "")
            raise damaged(f"{what} needs unpickling beyond tensors, which is never done ({first or error!s:.150})") from error
    if isinstance(found, dict):
        return {
            name: _plain(value, f"{what}, {name!s:.80}", len(data)) if isinstance(value, torch.Tensor) else value
            for name, value in found.items()
        }
    return _plain(found, what, len(data)) if isinstance(found, torch.Tensor) else found


def _refuse_packed(data: bytes, what: str) -> None:
    """Check that a zip's members together have no more bytes than the file, as `torch.save` stores them.

    Raises:
        RejectedError: if they have.
        ValueError, BadZipFile: if it is damaged.
    """
    if (places := stored_members(data)) is not None:
        total = sum(length for _, length, _ in places.values())
    else:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            total = sum(info.file_size for info in archive.infolist())
    if total > len(data):
        raise damaged(f"{what} has more bytes unpacked, {total}, than it has itself, {len(data)}; save it by torch.save")


def _plain(value: Tensor, what: str, num_bytes: int) -> Tensor:
    """Return a tensor whose values a file of `num_bytes` holds.

    Raises:
        RejectedError: if it is of another kind (sparse, quantised, without values), or repeats values by its strides.
    """
    value = value.detach()  # of a parameter, a plain tensor
    is_plain = type(value) is torch.Tensor and not value.is_nested and not value.is_quantized
    if not is_plain or value.layout is not torch.strided or value.device.type != "cpu":
        kind = f"{value.device.type} {'nested' if value.is_nested else value.layout} {value.dtype}".replace("torch.", "")
        raise damaged(f"{what} is a tensor of another kind ({kind}), expected one with all its values")
    if value.numel() * value.itemsize > num_bytes:
        raise damaged(
            f"{what} has the shape {list(value.shape)}, {value.numel() * value.itemsize} bytes, and its file {num_bytes}; "
            "save it by tensor.contiguous()"
        )
    return value


def read_safetensors(source: Path, path: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a safetensors file.

    Raises:
        RejectedError: if it cannot be read or is damaged.
    """
    from safetensors.torch import load

    data = read_whole(source, path)
    with odd_files_rejected(path):
        length = int.from_bytes(data[:8], "little")
        return load(data), json.loads(data[8 : 8 + length]).get("__metadata__") or {}


def read_metadata(source: Path, path: str) -> dict[str, str]:
    """Return only the metadata of a safetensors file.

    Raises:
        RejectedError: if it cannot be read or is damaged.
    """
    with open_file(f"{source}/{path}", source) as file, odd_files_rejected(path):
        length = int.from_bytes(file.read(8), "little")
        metadata = json.loads(file.read(min(length, os.fstat(file.fileno()).st_size)))["__metadata__"]
        return {str(name): str(value) for name, value in metadata.items()}


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
    if isinstance(value, np.ndarray):
        try:
            return torch.from_numpy(value)
        except (TypeError, ValueError):  # text, other byte orders, long doubles
            raise damaged(f"its {name} is {value.dtype} {list(value.shape)}, expected an array of numbers") from None
    raise damaged(f"it has no array {name!r}, only {', '.join(sorted(map(str, values)))[:200] or 'nothing'}")


def values_by_role(found: Mapping[str, Any], roles: Mapping[str, str]) -> dict[str, Tensor]:
    """Return what a file has next to the latent by role; `roles` are those of the file's names.

    Raises:
        RejectedError: if one is not a mask, and not like a latent.
    """
    return {
        role: found[name] if role == "mask" else squeezed(found[name], role)
        for name, role in roles.items()
        if isinstance(found.get(name), torch.Tensor)
    }


def open_of_any_size(source: Path, path: str) -> BinaryIO:
    """Open a shard, which may be larger than a sample's file may be."""
    return open_file(f"{source}/{path}", source, sys.maxsize)


class LastRead(Generic[T]):
    """Parts of large files that were read last, in memory: entries are read in turn, by several threads."""

    def __init__(self, at_most: int, size_of: Callable[[T], int]) -> None:
        """Keep parts of `at_most` together, as `size_of` counts them, but at least one."""
        self._at_most, self._size_of = at_most, size_of
        self._kept: OrderedDict[tuple[Any, ...], T] = OrderedDict()
        self._lock = threading.Lock()

    def part(self, source: Path, path: str, number: int, read: Callable[[], T]) -> T:
        """Return a part of a file as it is now; one thread reads it, the others wait for it.

        Raises:
            RejectedError: if the file cannot be read.
        """
        key = (f"{source}/{path}", number, file_stamp(f"{source}/{path}", source))
        with self._lock:
            if key not in self._kept:
                self._kept[key] = read()
            self._kept.move_to_end(key)
            while len(self._kept) > 1 and sum(map(self._size_of, self._kept.values())) > self._at_most:
                self._kept.popitem(last=False)
            return self._kept[key]
