"""Read the files of a cache without ever running what they hold, and put text encoders' outputs into the layout of a store.

Letters: T tokens, D width.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import sys
import zipfile
import zlib
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch

from bucketline.ingest.images.rejects import Reason, RejectedError
from bucketline.ingest.importers.cache import Text, damaged, odd_files_rejected
from bucketline.ingest.sources.local_files import open_file, read_file
from bucketline.store.format.columns import POOLED

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

_MAX_UNPACKED_BYTES = 256 << 20  # of a compressed file, or of the members of one
_GZIP, _ZIP = b"\x1f\x8b", b"PK"


def read_whole(source: Path, path: str) -> bytes:
    """Return a file's bytes."""
    return read_file(f"{source}/{path}", source).data


def read_npz(source: Path, path: str) -> Mapping[str, Any]:
    """Return the arrays of an npz file, each decoded when it is used."""
    data = read_whole(source, path)
    if not data.startswith(_ZIP):
        raise damaged(f"{path} is not an npz file")
    with odd_files_rejected(path):
        if (total := _unpacked_bytes(data)) > max(_MAX_UNPACKED_BYTES, len(data)):
            raise ValueError(f"{total} bytes unpacked, expected at most {_MAX_UNPACKED_BYTES}")
        arrays: Mapping[str, Any] = np.load(io.BytesIO(data), allow_pickle=False)
        return arrays


def read_torch(source: Path, path: str) -> Any:  # noqa: ANN401 - tensors in whatever containers the trainer used
    """Return the content of a file written by `torch.save`, gzipped or not, as `torch.load(weights_only=True)` reads it."""
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
            data = unpacking.decompress(data, _MAX_UNPACKED_BYTES)
            if not unpacking.eof:
                raise ValueError(f"truncated gzip, or more than {_MAX_UNPACKED_BYTES} bytes uncompressed")
        if data.startswith(_ZIP) and (total := _unpacked_bytes(data)) > len(data):  # `torch.save` compresses nothing
            raise damaged(f"{what} has more bytes unpacked, {total}, than it has itself, {len(data)}; save it by torch.save")
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


def _unpacked_bytes(data: bytes) -> int:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return sum(info.file_size for info in archive.infolist())


def _plain(value: Tensor, what: str, num_bytes: int) -> Tensor:
    """Return a tensor whose values a file of `num_bytes` holds."""
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
    """Return the tensors and the metadata of a safetensors file."""
    from safetensors.torch import load

    data = read_whole(source, path)
    with odd_files_rejected(path):
        length = int.from_bytes(data[:8], "little")
        return load(data), json.loads(data[8 : 8 + length]).get("__metadata__") or {}


def read_metadata(source: Path, path: str) -> dict[str, str]:
    """Return only the metadata of a safetensors file."""
    with open_file(f"{source}/{path}", source) as file, odd_files_rejected(path):
        length = int.from_bytes(file.read(8), "little")
        metadata = json.loads(file.read(min(length, os.fstat(file.fileno()).st_size)))["__metadata__"]
        return {str(name): str(value) for name, value in metadata.items()}


def read_part(source: Path, path: str, offset: int, length: int) -> bytes:
    """Return a part of a larger file."""
    with open_of_any_size(source, path) as descriptor:
        try:
            data = os.pread(descriptor.fileno(), length, offset)
        except OSError as error:
            raise RejectedError(Reason.UNREADABLE, error.strerror or str(error)) from error
    if len(data) < length:
        raise damaged(f"{path} ends at {offset + len(data)}, before the sample's last byte at {offset + length}")
    return data


def open_of_any_size(source: Path, path: str) -> BinaryIO:
    """Open a shard, which may be larger than a sample's file may be."""
    return open_file(f"{source}/{path}", source, sys.maxsize)


def as_tensor(values: Mapping[str, Any], name: str) -> Tensor:
    """Return a value of a file as a tensor."""
    value = values.get(name)
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.ndarray):
        try:
            return torch.from_numpy(value)
        except (TypeError, ValueError):  # text, other byte orders, long doubles
            raise damaged(f"its {name} is {value.dtype} {list(value.shape)}, expected an array of numbers") from None
    raise damaged(f"it has no array {name!r}, only {', '.join(sorted(map(str, values)))[:200] or 'nothing'}")


def names_in(found: Mapping[str, Any], *names: str) -> tuple[str, ...]:
    """Return those of some names under which a file has a value."""
    return tuple(name for name in names if found.get(name) is not None)


def text_of(caption: str, tokens: Tensor, pooled: Tensor | None = None) -> Text:
    """Return a caption's embedding: its tokens [T, D], without a batch dimension of 1, and what is pooled of it."""
    if tokens.ndim == 3 and tokens.shape[0] == 1:
        tokens = tokens[0]
    if tokens.ndim != 2:
        raise damaged(f"the tokens of its caption are {list(tokens.shape)}, expected [T, D]")
    fixed = {} if pooled is None else {POOLED: pooled.float().reshape(-1)}
    return Text(caption=caption, tokens=tokens.float(), fixed=fixed)
