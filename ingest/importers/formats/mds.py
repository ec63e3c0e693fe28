"""MDS datasets of mosaicml/diffusion and its kin: `index.json` and shards, one sample after another.

An index lists its shards with their columns; that of `merge_index` lists those of the folders below it, as FOLDER/NAME, next
to the folders' own. A shard has the number of samples as U32, their offsets, and a JSON description of its columns; a sample
the lengths of its columns of variable length, then all columns. Latents are F16 or F32 bytes, or arrays of a dtype and shape
that the index has, in the columns `latents_256` and `latents_512`, times the scaling factor, empty where the image is smaller
than that; embeddings in `caption_latents` are not imported.
Source: `streaming/base/format/mds/reader.py` and `encodings.py`, mosaicml/diffusion's `precompute_latents.py`.
"""

from __future__ import annotations

import re
import struct
from itertools import pairwise
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from bucketline.errors import SourceError
from bucketline.ingest.images.crop import RejectedError
from bucketline.ingest.importers.cache import CacheEntry, Importer, Variant
from bucketline.ingest.importers.reading import damaged, files_below, read_json, read_part

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

_LATENTS = re.compile(r"latents_(\d{1,6})")
_INT = re.compile(r"u?int(8|16|32|64)?")
_ARRAY = re.compile(r"ndarray:(float16|float32|float64):(\d+(?:,\d+)*)")
_KEYS = ("key", "id", "hash", "image_path")  # columns that may name a sample
_SIZE = ("original_height", "original_width")
_CHANNELS, _DOWNSCALE = 4, 8  # of latents that are bytes

_Column: TypeAlias = "tuple[str, str, int | None]"  # name, encoding, and length; None if it varies


def _found(source: Path) -> Iterator[CacheEntry]:
    known = set[str]()
    for folder, names in files_below(source):
        index = read_json(source / folder / "index.json") if "index.json" in names else None
        for shard in (index.get("shards") or ()) if isinstance(index, dict) else ():
            path = folder + shard["raw_data"]["basename"]
            if shard.get("format") != "mds" or path in known:
                continue
            known.add(path)
            columns = [*zip(*(shard[f"column_{what}"] for what in ("names", "encodings", "sizes")), strict=True)]
            latents = [name for name, _, _ in columns if _LATENTS.fullmatch(name)]
            for number, at in enumerate(_samples(source, path, shard)):
                key, captions, problem = _texts(source, path, at, columns)
                for name in latents:
                    yield CacheEntry(
                        id=key or f"{path}/{number}",
                        path=path,
                        variant=name,
                        at=at,
                        facts={"columns": columns, "name": name},
                        captions=captions,
                        problem=problem,
                    )


def _samples(source: Path, path: str, shard: dict[str, Any]) -> list[tuple[int, int]]:
    """Return the offset and the length of each sample of a shard."""
    if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts or not path.isprintable():
        raise ValueError(f"a shard called {path!r:.80}")
    if not (source / path).is_file():
        steps = "decompress it, as Streaming does when it reads it" if shard.get("compression") else "restore it"
        raise SourceError(f"{source / path} is missing, and the list would not be complete; {steps}")
    count, num_bytes = shard["samples"], 4 * (shard["samples"] + 2)
    what = f"{source / path} is not the shard of {count} samples that its index lists"
    try:
        head = read_part(source, path, 0, num_bytes) if 0 < num_bytes <= shard["raw_data"]["bytes"] else bytes(4)
    except RejectedError as error:
        raise SourceError(f"{what}: {error.detail}") from error
    found, *offsets = struct.unpack(f"<{len(head) // 4}I", head)
    if found != count or offsets != sorted(offsets) or offsets[0] < num_bytes:
        raise SourceError(f"{what}: it begins with {found} samples")
    return [(begin, end - begin) for begin, end in pairwise(offsets)]


def _places(source: Path, path: str, at: tuple[int, int], columns: list[_Column]) -> dict[str, tuple[int, int]]:
    """Return the offset in the shard, and the length, of each column of a sample."""
    free = sum(size is None for _, _, size in columns)
    lengths = iter(struct.unpack(f"<{free}I", read_part(source, path, at[0], 4 * free)))
    begin, places = at[0] + 4 * free, {}
    for name, _, size in columns:
        places[name] = begin, next(lengths) if size is None else size
        begin += places[name][1]
    if begin != sum(at):
        raise damaged(f"its columns take {begin - at[0]} bytes, the shard has {at[1]} for it")
    return places


def _texts(source: Path, path: str, at: tuple[int, int], columns: list[_Column]) -> tuple[str, tuple[str, ...], str | None]:
    """Return what names a sample, if a column does, its captions, and what is wrong; reads only these columns."""
    key = next((key for key in _KEYS if (key, "str", None) in columns), "")
    try:
        places = _places(source, path, at, columns)
        name, caption = (read_part(source, path, *places[own]).decode() if own in places else "" for own in (key, "caption"))
    except (RejectedError, UnicodeDecodeError) as error:
        return "", (), error.detail if isinstance(error, RejectedError) else f"its {key} or caption is not UTF-8"
    return name, (caption.strip(),) if caption.strip() else (), None


def _read(source: Path, entry: CacheEntry) -> dict[str, Any]:
    assert entry.at is not None
    columns, name = entry.facts["columns"], entry.facts["name"]
    data, kinds = read_part(source, entry.path, *entry.at), {name: kind for name, kind, _ in columns}
    places = _places(source, entry.path, entry.at, columns)
    values: dict[str, Any] = {own: data[begin - entry.at[0] :][:length] or None for own, (begin, length) in places.items()}
    if values[name] is None:
        raise damaged(f"its {name} is empty: the image was smaller")
    original = [int.from_bytes(values[one], "little") for one in _SIZE if _INT.fullmatch(kinds.get(one, ""))]
    latent = _floats(name, kinds[name], values[name])
    return {**values, "latent": latent, "original": original if len(original) == 2 and all(original) else None}


def _floats(name: str, kind: str, data: bytes) -> NDArray[np.float32]:
    """Return the latent in a column, `[C, h, w]`. Of raw bytes, their number tells F16 from F32."""
    side = int(name.removeprefix("latents_")) // _DOWNSCALE
    dtype, shape = "float32" if len(data) == 4 * _CHANNELS * side**2 else "float16", [_CHANNELS, side, side]
    if match := _ARRAY.fullmatch(kind):
        dtype, shape = match[1], [int(length) for length in match[2].split(",")]
    elif kind != "bytes":
        what = f"its column {name} is {kind[:40]}"
        raise damaged(f"{what}, expected bytes of F16 or F32, or ndarray:DTYPE:SHAPE of float16, float32 or float64")
    try:
        return np.frombuffer(data, np.dtype(dtype).newbyteorder("<")).reshape(shape).astype(np.float32)
    except ValueError as error:
        raise damaged(f"its {name} has {len(data)} bytes, expected F16 or F32 of the shape {shape}") from error


IMPORTER = Importer(
    kind="mds",
    found=_found,
    read=_read,
    left_out=("jpg", "mask"),
    variants={},
    other=Variant(),
    captions_in="the column caption",
)
