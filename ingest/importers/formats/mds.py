"""MDS datasets of mosaicml/diffusion and its kin: `index.json` and shards, one sample after another.

An index lists its shards with their columns; that of `merge_index` lists those of the folders below it, as FOLDER/NAME, next
to the folders' own. A shard may be there only compressed, as `zip_data`; it is then unpacked in memory. It has the number of
samples as U32, their offsets, and a JSON description of its columns; a sample the lengths of its columns of variable length,
then all columns. Latents are F16 or F32 bytes, or arrays of floats, in the columns `latents_256` and `latents_512`, times the
scaling factor, empty where the image is smaller than that. `store export --format mds` writes others as
`latents_HEIGHTxWIDTH`, those of the mirrored images with `/flipped` after the name, masks with `mask_shape`, and latents of
control images as `control/NAME`. The token embeddings are those of Stable Diffusion 2's CLIP, in `caption_latents`. Columns of
pickles are refused. Source: `streaming/base/format/mds/reader.py` and `encodings.py`, `streaming/base/compression.py`,
mosaicml/diffusion's `precompute_latents.py`.
"""

from __future__ import annotations

import bz2
import json
import math
import re
import struct
import threading
import zlib
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bucketline.errors import SourceError
from bucketline.ingest.images.rejects import RejectedError
from bucketline.ingest.importers import cache
from bucketline.ingest.importers.reading import read_part, read_whole
from bucketline.ingest.sources.local_files import file_stamp
from bucketline.store.format.columns import FLIPPED_SUFFIX, ROLE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    Columns = Mapping[str, tuple[str, int | None]]  # encoding and length by name; None if it varies

_INDEX = "index.json"
_MAX_SAMPLES = 1 << 28  # of a shard, whose offsets are U32
_MAX_SHARD_BYTES = 1 << 33
_MAX_UNPACKED_BYTES = 1 << 30  # of a compressed shard; Streaming's own limit is 64 MiB unless its user sets another
_BY_ARROW = {"zstd": "zstd", "br": "brotli", "snappy": "snappy"}
_COMPRESSIONS = (*_BY_ARROW, "gz", "bz2")
_LATENTS = re.compile(r"latents_(?P<height>\d{1,6})(x(?P<width>\d{1,6}))?")
_SIZES = {"int": 8, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8}
_FLOATS = {"float16": "<f2", "float32": "<f4", "float64": "<f8"}
_DTYPES = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32"}
_DTYPES |= {64: "uint64", 65: "int64", 66: "float64"}
_EXPECTED = "expected bytes of F16 or F32, or an ndarray of float16, float32 or float64"
_KEYS = ("key", "id", "hash", "image_path")  # columns that may name a sample
_NUM_TOKENS = 77  # of a caption, where no column says how many
_TOKENS = "caption_latents"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shard:
    """A shard that an index lists."""

    name: str  # path of the uncompressed shard, from the source's folder
    path: str  # of the file that is there
    compression: str  # of that file; empty if there is none
    num_bytes: int  # uncompressed
    samples: int
    columns: dict[str, tuple[str, int | None]]


def _is_mds(path: Path) -> bool:
    found = cache.read_json(path)
    shards = found.get("shards") if isinstance(found, dict) else None
    return isinstance(shards, list) and any(isinstance(one, dict) and one.get("format") == "mds" for one in shards)


def _is_here(source: Path) -> bool:
    return any(_is_mds(source / folder / _INDEX) for folder, names in cache.files_below(source) if _INDEX in names)


def _shards(source: Path) -> Iterator[_Shard]:
    """Yield the shards that the index files of a source list, each once."""
    known: dict[str, _Shard] = {}
    for folder, names in cache.files_below(source):
        if _INDEX not in names or not _is_mds(path := source / folder / _INDEX):
            continue
        for described in cache.read_json(path)["shards"]:
            try:
                shard = _shard(source, folder, described)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise SourceError(f"{path} describes a shard without {error!s:.80}; write the dataset again") from error
            if (other := known.setdefault(shard.name, shard)) != shard:
                raise SourceError(
                    f"{path} describes {shard.name} with {shard.samples} samples, another index in {source} with "
                    f"{other.samples}; remove the index that is not current"
                )
            if other is shard:
                yield shard


def _shard(source: Path, folder: str, described: Any) -> _Shard:  # noqa: ANN401 - JSON
    names, encodings, sizes = (described[key] for key in ("column_names", "column_encodings", "column_sizes"))
    raw, packed, number = described["raw_data"], described.get("zip_data"), described["samples"]
    if not all(isinstance(one, list) for one in (names, encodings, sizes)) or not all(
        isinstance(name, str) for name in names + encodings
    ):
        raise TypeError("its columns")
    if not all(size is None or (type(size) is int and 0 <= size <= _MAX_UNPACKED_BYTES) for size in sizes):
        raise TypeError("its columns' sizes")
    name, num_bytes = _below(folder, raw["basename"]), raw["bytes"]
    packed_name = None if packed is None else _below(folder, packed["basename"])
    if type(number) is not int or type(num_bytes) is not int or not 0 <= number <= _MAX_SAMPLES:
        raise TypeError("its samples")
    if not 0 <= num_bytes < _MAX_SHARD_BYTES:
        raise TypeError("its bytes")
    columns = {own: (kind, size) for own, kind, size in zip(names, encodings, sizes, strict=True)}
    if described.get("format") != "mds":
        raise SourceError(f"{source / name} is not a shard of MDS")
    if pickled := next((own for own, (kind, _) in columns.items() if kind in ("pkl", "pickle")), None):
        raise SourceError(f"{source / name}: column {pickled!r:.80} holds pickles, which are never read; write it as bytes")
    is_there = (source / name).is_file()
    if not is_there and (packed_name is None or not (source / packed_name).is_file()):
        raise SourceError(f"{source / name} is missing; the list would not be complete")
    compression = "" if is_there else str(described.get("compression")).partition(":")[0]
    if compression and compression not in _COMPRESSIONS:
        known = ", ".join(_COMPRESSIONS)
        raise SourceError(
            f"{source}/{packed_name} is compressed by {compression!r:.40}, expected one of {known}; decompress it"
        )
    if compression and num_bytes > _MAX_UNPACKED_BYTES:
        what = f"has {num_bytes} bytes uncompressed, at most {_MAX_UNPACKED_BYTES} are unpacked in memory"
        raise SourceError(f"{source}/{packed_name} {what}; decompress it")
    path = packed_name if compression and packed_name is not None else name
    return _Shard(name=name, path=path, compression=compression, num_bytes=num_bytes, samples=number, columns=columns)


def _below(folder: str, name: object) -> str:
    """Return the path of a shard below its index, from the source's folder."""
    if not isinstance(name, str) or not name.isprintable() or not name or "\\" in name:
        raise TypeError("a usable basename")
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or str(path) != name:
        raise TypeError("a usable basename")
    return folder + name


def _places(source: Path, shard: _Shard) -> list[tuple[int, int]]:
    """Return offset and length of each sample of a shard."""
    number = shard.samples
    try:
        if 4 * (number + 2) > shard.num_bytes:
            raise cache.damaged(f"{shard.num_bytes} bytes are too few for them")
        head = _part(source, shard.path, (shard.compression, shard.num_bytes), 0, 4 * (number + 2))
        found, *offsets = struct.unpack(f"<{number + 2}I", head)
        if found != number or offsets != sorted(offsets) or offsets[0] < len(head):
            raise cache.damaged(f"it begins with {found} samples")
    except RejectedError as error:
        what = f"{source / shard.path} is not the shard of {number} samples that its index lists"
        raise SourceError(f"{what}: {error.detail}") from error
    return [(begin, end - begin) for begin, end in pairwise(offsets)]


def _part(source: Path, path: str, packed: tuple[str, int], offset: int, length: int) -> bytes:
    """Return a part of a shard by its place in the uncompressed one; `packed`: the compression, and the bytes without it."""
    if not packed[0]:
        return read_part(source, path, offset, length)
    with _unpacking:
        data = _unpacked(str(source), path, packed, file_stamp(f"{source}/{path}", source))
    if offset + length > len(data):
        raise cache.damaged(f"{path} ends at {len(data)}, before the sample's last byte at {offset + length}")
    return data[offset : offset + length]


_unpacking = threading.Lock()  # entries are read in turn by several threads: one unpacks a shard, the others wait for it


@lru_cache(2)
def _unpacked(source: str, path: str, packed: tuple[str, int], _stamp: object) -> bytes:
    (compression, num_bytes), data = packed, read_whole(Path(source), path)
    with cache.odd_files_rejected(f"{path}, compressed by {compression},"):
        if compression == "gz":
            found = zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(data, num_bytes + 1)
        elif compression == "bz2":
            found = bz2.BZ2Decompressor().decompress(data, num_bytes + 1)
        else:
            import pyarrow as pa

            found = pa.decompress(data, decompressed_size=num_bytes, codec=_BY_ARROW[compression], asbytes=True)
    if len(found) != num_bytes:
        raise cache.damaged(f"{path} has {len(found)} bytes uncompressed, its index says {num_bytes}")
    return found


def _found(request: cache.ListRequest) -> cache.FoundEntries:
    source, entries = request.source, list[cache.CacheEntry]()
    shards = [(shard, [name for name in shard.columns if _LATENTS.fullmatch(name)]) for shard in _shards(source)]
    # `store export` writes one column for each size, in folders of their own
    is_one = request.variant is None and all(len(names) == 1 for _, names in shards)
    variants = {name for _, names in shards for name in names}
    for shard, names in shards:
        latents = [name for name in names if request.variant in (None, name)]
        for name in latents:
            _refuse_other_numbers(source / shard.path, name, shard.columns)
        packed, of = (shard.compression, shard.num_bytes), json.dumps(shard.columns)
        mtime_ns = (source / shard.path).stat().st_mtime_ns
        for number, place in enumerate(_places(source, shard) if latents else ()):
            own = f"{shard.name}/{number}"
            sample_id = _named(source, shard.path, packed, place, shard.columns) or own
            entries += [
                cache.CacheEntry(
                    id=sample_id,
                    again=f" ({own})",
                    path=shard.path,
                    variant="" if is_one else name,
                    at=(*place, name, of, *packed),
                    text_path=shard.path if _TOKENS in shard.columns else None,
                    stamp=(place[1], mtime_ns),
                )
                for name in latents
            ]
    return cache.FoundEntries(entries=entries, variants=() if is_one else variants)


def _refuse_other_numbers(path: Path, latents: str, columns: Columns) -> None:
    """Check that the columns that are read hold floats."""
    for name, (kind, _) in columns.items():
        is_read = name in (latents, latents + FLIPPED_SUFFIX, _TOKENS) or name.startswith("control/")
        if is_read and (why := _why_no_floats(name, kind)):
            raise SourceError(f"{path}: {why}; write the dataset again")


def _named(source: Path, path: str, packed: tuple[str, int], place: tuple[int, int], columns: Columns) -> str | None:
    """Return what names a sample, if a column does; reads only the lengths and that column."""
    name = next((key for key in _KEYS if columns.get(key, ("",))[0] == "str"), None)
    if name is None:
        return None
    try:
        begin, size = _column_places(source, path, packed, place, columns)[name]
        return _part(source, path, packed, begin, size).decode("utf-8") or None
    except (RejectedError, UnicodeDecodeError):
        return None  # reading the sample completely says what is wrong


def _column_places(
    source: Path, path: str, packed: tuple[str, int], place: tuple[int, int], columns: Columns
) -> dict[str, tuple[int, int]]:
    """Return the offset in the shard, and the length, of each column of a sample."""
    offset, length = place
    free = [name for name, (_, size) in columns.items() if size is None]
    lengths = iter(struct.unpack(f"<{len(free)}I", _part(source, path, packed, offset, 4 * len(free))))
    at, places = offset + 4 * len(free), {}
    for name, (_, size) in columns.items():
        own = next(lengths) if size is None else int(size)
        places[name] = at, own
        at += own
    if at != offset + length:
        raise cache.damaged(f"its columns take {at - offset} bytes, the shard has {length} for it")
    return places


def _read(source: Path, entry: cache.CacheEntry, _variant: str) -> cache.Cached:
    at = entry.at
    place, packed = (int(at[0]), int(at[1])), (str(at[4]), int(at[5]))
    name, columns = str(at[2]), json.loads(str(at[3]))
    data = _part(source, entry.path, packed, *place)
    values = {
        own: data[begin - place[0] : begin - place[0] + size]
        for own, (begin, size) in _column_places(source, entry.path, packed, place, columns).items()
    }
    caption = _text(values, "caption")
    texts: tuple[cache.Text, ...] = ()
    if caption and len(tokens := values.get(_TOKENS, b"")):
        number = _number(values, columns, "caption_tokens") or _NUM_TOKENS
        texts = (cache.Text(caption=caption, tokens=_floats(_TOKENS, columns[_TOKENS][0], tokens, (number, -1))),)
    height, width = (_number(values, columns, f"original_{side}") for side in ("height", "width"))
    flipped = name + FLIPPED_SUFFIX  # which `store export` writes next to the latent
    if not values[name]:
        raise cache.damaged(f"its {name} is empty: the image was smaller")
    latent = _floats(name, columns[name][0], values[name], _shape(name, _text(values, "latents_shape")))
    if latent.ndim != 3:
        raise cache.damaged(f"its {name} has the shape {list(latent.shape)}, expected [C, h, w]")
    return cache.Cached(
        latent=latent,
        flipped=_floats(flipped, columns[flipped][0], values[flipped], tuple(latent.shape)) if values.get(flipped) else None,
        geometry=cache.Geometry(original=(int(height), int(width)) if height and width else None),
        captions=(caption,) if caption else (),
        texts=texts,
        columns=_side(values, columns, tuple(latent.shape)),
        leaves_out="the image's JPEG" if values.get("jpg") else None,
    )


def _side(values: dict[str, bytes], columns: Columns, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Return the columns that `store export` writes next to the latents, of a sample that has them."""
    found = {
        name: _floats(name, columns[name][0], data, shape)
        for name, data in values.items()
        if name.startswith("control/") and ROLE.fullmatch(name) and data
    }
    told, mask = _text(values, "mask_shape"), values.get("mask", b"")
    if told:
        size = re.fullmatch(r"(\d{1,6})x(\d{1,6})", told)
        if size is None or len(mask) != int(size[1]) * int(size[2]):
            raise cache.damaged(f"its mask has {len(mask)} bytes, expected U8 of its mask_shape, {told!r:.80}")
        found["mask"] = torch.frombuffer(bytearray(mask), dtype=torch.uint8).reshape(int(size[1]), int(size[2]))
    return found


def _shape(name: str, told: str) -> tuple[int, int, int]:
    """Return the shape [C, h, w] of a column's latents: as the column `latents_shape` says, else 4 channels at an eighth.

    >>> _shape("latents_256", ""), _shape("latents_64x128", "16x8x16")
    ((4, 32, 32), (16, 8, 16))
    """
    match = _LATENTS.fullmatch(name)
    assert match is not None
    if not told:
        return 4, int(match["height"]) // 8, int(match["width"] or match["height"]) // 8
    if not (found := re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5})x([1-9]\d{0,5})", told)):
        raise cache.damaged(f"its latents_shape is {told!r:.80}, expected CxHxW")
    return int(found[1]), int(found[2]), int(found[3])


def _text(values: dict[str, bytes], name: str) -> str:
    try:
        return values.get(name, b"").decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise cache.damaged(f"its {name} is not UTF-8 (byte {error.start})") from error


def _number(values: dict[str, bytes], columns: Columns, name: str) -> int | None:
    if name not in values or _SIZES.get(columns[name][0]) != len(values[name]):
        return None
    return int.from_bytes(values[name], "little", signed=True)


def _why_no_floats(name: str, kind: str) -> str | None:
    """Return why a column of this encoding does not hold floats; None if it does, or if each sample says."""
    family, _, rest = kind.partition(":")
    if kind in ("bytes", "ndarray") or (family == "ndarray" and rest.partition(":")[0] in _FLOATS):
        return None
    bits = ", perhaps the bits of BF16, which nothing says" if "int16" in rest.partition(":")[0] else ""
    return f"its column {name} is {kind[:40]}{bits}; {_EXPECTED}"


def _floats(name: str, kind: str, data: bytes, shape: Sequence[int]) -> Tensor:
    """Return the values of a column. `shape` is that of raw bytes, of which F16 and F32 are told apart by their number.

    A side of -1 in `shape` is as long as it takes; the values are F16 then.
    """
    if kind == "bytes":
        size = math.prod(shape)
        dtype = "<f4" if size > 0 and len(data) == 4 * size else "<f2"
        if len(data) != np.dtype(dtype).itemsize * size if size > 0 else len(data) % (2 * abs(size)):
            raise cache.damaged(f"its {name} has {len(data)} bytes, expected F16 or F32 of the shape {list(shape)}")
        return torch.from_numpy(np.frombuffer(data, dtype=dtype).reshape(tuple(shape)).astype(np.float32))
    if why := _why_no_floats(name, kind):
        raise cache.damaged(why)
    _, dtype, sides = (*kind.split(":"), "", "")[:3]  # what the column does not say is written before the values
    try:
        if not dtype:
            dtype, data = _DTYPES[data[0]], data[1:]
        if dtype not in _FLOATS:
            raise cache.damaged(f"its {name} is an ndarray of {dtype}; {_EXPECTED}")
        if sides:
            shape = tuple(int(side) for side in sides.split(","))
        else:
            num_sides, width = data[0] >> 2, 1 << (data[0] & 3)
            shape, data = np.frombuffer(data[1 : 1 + num_sides * width], f"<u{width}").tolist(), data[1 + num_sides * width :]
        values = np.frombuffer(data, dtype=_FLOATS[dtype])
        if values.size != math.prod(shape):
            raise ValueError(f"{values.size} values for the shape {list(shape)}")
        return torch.from_numpy(values.reshape(tuple(shape)).astype(np.float32))
    except (KeyError, IndexError, ValueError) as error:
        raise cache.damaged(f"its {name} is not an array as its column says, {kind[:40]} ({error!s:.80})") from error


IMPORTER = cache.Importer(
    kind="mds",
    is_here=_is_here,
    found=_found,
    read=_read,
    variants={},
    other=cache.Variant(family="sd"),
    captions_in="the column caption",
)
