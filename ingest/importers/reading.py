"""Read the values of a cache's samples, by the tables of formats, without ever running what a file holds.

Letters: C latent channels, h and w the latent's height and width.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import sys
import threading
import zipfile
import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from bucketline.errors import BucketlineError, SourceError
from bucketline.ingest.images.crop import Reason, RejectedError
from bucketline.ingest.sources.source import LEADS_OUT, LinkedOutError, open_file, read_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from bucketline.ingest.importers.cache import CacheEntry, Importer

_MAX_UNPACKED_BYTES = 256 << 20  # of a compressed file, or of the members of one
_GZIP, _ZIP = b"\x1f\x8b", b"PK"
_ONE_HEADER = threading.Lock()
"""numpy parses an array's header by `ast`, in which two threads at once can raise a SystemError (python/cpython#106905)."""


def files_below(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield each folder's path from `folder` ('' for itself, others end in a slash) and its files' names, sorted."""

    def fail(error: OSError) -> None:
        raise SourceError(f"{error.filename} cannot be read: {error.strerror}; the list would not be complete") from error

    for path, folders, names in os.walk(folder, onerror=fail):
        folders.sort()
        inside = os.path.relpath(path, folder)
        yield ("" if inside == "." else f"{inside}/"), sorted(names)


def damaged(what: str) -> RejectedError:
    """Return the error for an entry whose file does not hold what it should."""
    return RejectedError(Reason.CACHE, what)


@contextmanager
def rejects_named(path: str) -> Iterator[None]:
    """Make any failure that a file causes a reject that names it: the one place for what no trainer writes."""
    try:
        yield
    except BucketlineError:
        raise
    except RejectedError as error:
        if isinstance(error, LinkedOutError):
            error.detail = f"{LEADS_OUT}, which an import never follows; put the file itself there"
        if path not in error.detail:
            raise RejectedError(error.reason, f"{path}: {error.detail}") from error
        raise
    except Exception as error:
        what = "is damaged, or not as the trainer writes it"
        raise damaged(f"{path} {what} ({type(error).__name__}: {error!s:.150}); cache it again") from error


def read_json(path: Path) -> Any:  # noqa: ANN401 - any JSON
    """Return a JSON file that describes a cache."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(f"{path} cannot be read as JSON ({error!s:.100}); make the cache again, or restore it") from error


def read_values(source: Path, path: str, at: tuple[int, int] | None = None) -> dict[str, Any]:
    """Return the tensors of a safetensors file, or what `read_torch` finds, by name; a single tensor is called `latent`."""
    if path.endswith(".safetensors"):
        from safetensors.torch import load

        return dict(load(read_file(f"{source}/{path}", source)[0]))
    found = read_torch(source, path, at)
    if not isinstance(found, dict | torch.Tensor):
        raise damaged(f"it holds a {type(found).__name__}, expected a dictionary or a tensor")
    return {str(name): value for name, value in found.items()} if isinstance(found, dict) else {"latent": found}


def read_torch(source: Path, path: str, at: tuple[int, int] | None = None) -> Any:  # noqa: ANN401 - tensors in any container
    """Return what `torch.save` wrote into a file, gzipped or not, or into a part of it, by `torch.load(weights_only=True)`.

    `at`: offset and length of the part.
    """
    data = read_file(f"{source}/{path}", source)[0] if at is None else read_part(source, path, *at)
    if data.startswith(_GZIP):
        unpacking = zlib.decompressobj(zlib.MAX_WBITS | 16)
        data = unpacking.decompress(data, _MAX_UNPACKED_BYTES)
        if not unpacking.eof:
            raise damaged(f"{path}: truncated gzip, or more than {_MAX_UNPACKED_BYTES} bytes uncompressed")
    is_zip = data.startswith(_ZIP)
    if is_zip and (total := _unpacked_bytes(zipfile.ZipFile(io.BytesIO(data)))) > len(data):  # `torch.save` compresses nothing
        raise damaged(f"{path} has more bytes unpacked, {total}, than it has itself, {len(data)}; save it by torch.save")
    try:
        found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        first = next((line for line in str(error).splitlines() if "Unsupported" in line or "GLOBAL" in line), "")
        raise damaged(f"{path} needs unpickling beyond tensors, which is never done ({first or error!s:.150})") from error
    for value in found.values() if isinstance(found, dict) else (found,):
        if isinstance(value, torch.Tensor):
            _refuse_odd_tensor(value, path, len(data))
    return found


def _unpacked_bytes(archive: zipfile.ZipFile) -> int:
    return sum(info.file_size for info in archive.infolist())


def _refuse_odd_tensor(value: torch.Tensor, path: str, num_bytes: int) -> None:
    """Check that a file of `num_bytes` holds a tensor's values."""
    is_plain = type(value) in (torch.Tensor, torch.nn.Parameter) and not value.is_nested and not value.is_quantized
    is_plain = is_plain and value.layout is torch.strided and value.device.type == "cpu"
    if not is_plain or value.numel() * value.itemsize > num_bytes:
        kind = f"{value.device.type} {'nested' if value.is_nested else value.layout} {value.dtype}".replace("torch.", "")
        shape = "" if value.is_nested else f" of the shape {list(value.shape)}"
        raise damaged(f"{path} has a tensor ({kind}){shape}, whose values {num_bytes} bytes do not hold; save it contiguous")


def read_npz(source: Path, path: str, is_wanted: Callable[[str], bool]) -> dict[str, Any]:
    """Return arrays of an npz file by name; of those that are not wanted, None."""
    data = read_file(f"{source}/{path}", source)[0]
    if not data.startswith(_ZIP):
        raise damaged(f"{path} is not an npz file")
    arrays = np.load(io.BytesIO(data), allow_pickle=False)  # reads no array yet
    if (total := _unpacked_bytes(arrays.zip)) > max(_MAX_UNPACKED_BYTES, len(data)):
        raise damaged(f"{path} has {total} bytes unpacked, expected at most {_MAX_UNPACKED_BYTES}")
    with _ONE_HEADER:
        return {name: arrays[name] if is_wanted(name) else None for name in arrays.files}


def read_metadata(source: Path, path: str) -> dict[str, str]:
    """Return the metadata of a safetensors file, without its tensors."""
    with open_file(f"{source}/{path}", source) as file, rejects_named(path):
        length = int.from_bytes(file.read(8), "little")
        head: Mapping[str, Any] = json.loads(file.read(min(length, os.fstat(file.fileno()).st_size)))
        return {str(name): str(value) for name, value in (head.get("__metadata__") or {}).items()}


def read_part(source: Path, path: str, offset: int, length: int) -> bytes:
    """Return a part of a shard, which may be larger than a sample's file may be."""
    with open_file(f"{source}/{path}", source, sys.maxsize) as file:
        data = os.pread(file.fileno(), length, offset)
    if len(data) < length:
        raise damaged(f"{path} ends at {offset + len(data)}, before the sample's last byte at {offset + length}")
    return data


class Cached(NamedTuple):
    """The values of an entry, as the cache has them; sizes in px, height first, None if the cache does not say."""

    latent: torch.Tensor  # [C, h, w]
    flipped: torch.Tensor | None  # [C, h, w], of the mirrored image
    original: tuple[int, int] | None  # upright
    resized: tuple[int, int] | None
    crop: tuple[int, int] | None  # top and left in the resized image
    left_out: tuple[str, ...]


def read_entry(importer: Importer, source: Path, entry: CacheEntry) -> Cached:
    """Read an entry's values by the format's table. Raises a RejectedError that names its file."""
    with rejects_named(entry.path):
        if entry.problem is not None:
            raise damaged(entry.problem)
        read = importer.read or (lambda source, entry: read_values(source, entry.path, entry.at))
        values = {**entry.facts, **read(source, entry)}
        latent, flipped, original, resized, crop = (importer.names.get(name, name) for name in Cached._fields[:-1])
        return Cached(
            latent=_latent(values, latent),
            flipped=_latent(values, flipped) if flipped in values else None,
            original=_pair(values, original),
            resized=_pair(values, resized),
            crop=_pair(values, crop),
            left_out=tuple(name for name in importer.left_out if values.get(name) is not None),
        )


def _latent(values: Mapping[str, Any], name: str) -> torch.Tensor:
    """Return a latent without axes of length 1 before its channels or after them, `[C, h, w]`."""
    if name not in values:
        raise damaged(f"it has no {name}, only {', '.join(sorted(map(str, values)))[:200] or 'nothing'}")
    latent = torch.as_tensor(values[name]).detach()
    shape = list(latent.shape)
    if latent.ndim == 5 and shape[0] == 1:
        latent = latent[0]
    if latent.ndim == 4 and 1 in latent.shape[:2]:
        latent = latent[:, 0] if latent.shape[1] == 1 else latent[0]
    if latent.ndim != 3 or 0 in shape or not latent.is_floating_point():
        kind = "of a video, " if latent.ndim == 4 else ""
        raise damaged(f"{name} is {kind}{str(latent.dtype).removeprefix('torch.')} {shape}, expected floats [C, h, w]")
    return latent


def _pair(values: Mapping[str, Any], name: str) -> tuple[int, int] | None:
    """Return two whole numbers, 0 or more; None if there are none."""
    if (value := values.get(name)) is None:
        return None
    try:
        first, second = (int(number) for number in value)
        if not (0 <= first < 1 << 31 and 0 <= second < 1 << 31):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise damaged(f"{name} is {value!r:.80}, expected two numbers, 0 or more") from None
    return first, second
