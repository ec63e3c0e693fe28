"""MDS datasets of mosaicml/diffusion and its kin: `index.json` and shards, one sample after another.

An index lists its shards with their columns; that of `merge_index` lists those of the folders below it, as FOLDER/NAME, next
to the folders' own. A shard has the number of samples as U32, their offsets, and a JSON description of its columns; a sample
the lengths of its columns of variable length, then all columns. Latents are F16 or F32 bytes, or arrays of a dtype and shape
that the index has, in the columns `latents_256` and `latents_512`, times the scaling factor, empty where the image is smaller
than that. `store export --format mds` writes others as `latents_HEIGHTxWIDTH`, and those of the mirrored images with `/flipped`
after the name. The token embeddings are those of Stable Diffusion 2's CLIP, in `caption_latents`.
Source: `streaming/base/format/mds/reader.py` and `encodings.py`, mosaicml/diffusion's `precompute_latents.py`.
"""

from __future__ import annotations

import math
import re
import struct
from itertools import pairwise
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from bucketline.errors import SourceError
from bucketline.ingest.images.crop import RejectedError
from bucketline.ingest.importers import cache
from bucketline.ingest.importers.reading import read_part
from bucketline.store.format.block import FLIPPED_SUFFIX

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from torch import Tensor

_INDEX = "index.json"
_LATENTS = re.compile(r"latents_(?P<height>\d{1,6})(x(?P<width>\d{1,6}))?")
_INTS = ("int", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))
_ARRAY = re.compile(r"ndarray:(float16|float32|float64):(\d+(?:,\d+)*)")
_KEYS = ("key", "id", "hash", "image_path")  # columns that may name a sample
_NUM_TOKENS = 77  # of a caption, where no column says how many
_TOKENS = "caption_latents"


class _Shard(NamedTuple):
    """A shard that an index lists."""

    path: str  # from the source's folder
    num_bytes: int
    samples: int
    columns: tuple[tuple[str, str, int | None], ...]  # name, encoding, and length; None if it varies

    def samples_at(self, source: Path) -> list[tuple[int, int]]:
        what = f"{source / self.path} is not the shard of {self.samples} samples that its index lists"
        head_bytes = 4 * (self.samples + 2)
        try:
            head = read_part(source, self.path, 0, head_bytes) if 0 < head_bytes <= self.num_bytes else b""
        except RejectedError as error:
            raise SourceError(f"{what}: {error.detail}") from error
        found, *offsets = struct.unpack(f"<{len(head) // 4}I", head) or (0,)
        if found != self.samples or offsets != sorted(offsets) or offsets[0] < head_bytes:
            raise SourceError(f"{what}: it begins with {found} samples")
        return [(begin, end - begin) for begin, end in pairwise(offsets)]

    def places(self, source: Path, offset: int, length: int) -> dict[str, tuple[int, int]]:
        """Return the offset in the shard, and the length, of each column of a sample."""
        free = sum(size is None for _, _, size in self.columns)
        lengths = iter(struct.unpack(f"<{free}I", read_part(source, self.path, offset, 4 * free)))
        at, places = offset + 4 * free, {}
        for name, _, size in self.columns:
            own = next(lengths) if size is None else size
            places[name] = at, own
            at += own
        if at != offset + length:
            raise cache.damaged(f"its columns take {at - offset} bytes, the shard has {length} for it")
        return places

    def name_of(self, source: Path, offset: int, length: int) -> str | None:
        """Return what names a sample, if a column does; reads only the lengths and that column."""
        name = next((key for key in _KEYS if (key, "str", None) in self.columns), None)
        try:
            places = {} if name is None else self.places(source, offset, length)
            key = None if name is None else read_part(source, self.path, *places[name]).decode("utf-8")
        except (RejectedError, UnicodeDecodeError):
            return None  # reading the sample completely says what is wrong
        return key or None


def _indexed(index: Path) -> list[dict[str, Any]]:
    found = cache.read_json(index)
    shards = found.get("shards") if isinstance(found, dict) else None
    return [one for one in shards if isinstance(one, dict) and one.get("format") == "mds"] if isinstance(shards, list) else []


def _shards(source: Path) -> Iterator[_Shard]:
    known = set[str]()
    for folder, names in cache.files_below(source):
        for described in _indexed(source / folder / _INDEX) if _INDEX in names else ():
            shard = _shard(source, folder, described)
            if shard.path not in known:
                known.add(shard.path)
                yield shard


def _shard(source: Path, folder: str, described: dict[str, Any]) -> _Shard:
    columns = zip(*(described[f"column_{what}"] for what in ("names", "encodings", "sizes")), strict=True)
    path = _below(folder, described["raw_data"]["basename"])
    if not (source / path).is_file():
        steps = "decompress it, as Streaming does when it reads it" if described.get("compression") else "restore it"
        raise SourceError(f"{source / path} is missing, and the list would not be complete; {steps}")
    own = tuple((str(name), str(kind), None if size is None else int(size)) for name, kind, size in columns)
    return _Shard(path, described["raw_data"]["bytes"], described["samples"], own)


def _below(folder: str, name: str) -> str:
    """Return the path of a shard below its index, from the source's folder."""
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or not name.isprintable():
        raise ValueError(f"a shard called {name!r:.80}")
    return f"{folder}{name}"


def _found(request: cache.ListRequest) -> cache.FoundEntries:
    source, entries = request.source, list[cache.CacheEntry]()
    shards = [(shard, [name for name, _, _ in shard.columns if _LATENTS.fullmatch(name)]) for shard in _shards(source)]
    # `store export` writes one column for each size, in folders of their own
    is_one = request.variant is None and all(len(names) == 1 for _, names in shards)
    for shard, names in shards:
        latents = [name for name in names if request.variant in (None, name)]
        mtime_ns, has_text = (source / shard.path).stat().st_mtime_ns, any(name == _TOKENS for name, _, _ in shard.columns)
        for number, place in enumerate(shard.samples_at(source) if latents else ()):
            own = f"{shard.path}/{number}"
            sample_id = shard.name_of(source, *place) or own
            entries += [
                cache.CacheEntry(
                    id=sample_id,
                    again=f" ({own})",
                    path=shard.path,
                    variant="" if is_one else name,
                    at=(shard, *place, name),
                    text_path=shard.path if has_text else None,
                    stamp=(place[1], mtime_ns),
                )
                for name in latents
            ]
    return cache.FoundEntries(entries=entries, variants=() if is_one else {name for _, names in shards for name in names})


def _read(source: Path, entry: cache.CacheEntry, _variant: str) -> cache.Cached:
    shard, offset, length, name = entry.at
    data, kinds = read_part(source, shard.path, offset, length), {name: kind for name, kind, _ in shard.columns}
    values = {own: data[at - offset : at - offset + size] for own, (at, size) in shard.places(source, offset, length).items()}

    def text(column: str) -> str:
        try:
            return str(values.get(column, b""), "utf-8").strip()
        except UnicodeDecodeError as error:
            raise cache.damaged(f"its {column} is not UTF-8 (byte {error.start})") from error

    def number(column: str) -> int:
        kind = kinds.get(column, "")
        return int.from_bytes(values[column], "little", signed=not kind.startswith("u")) if kind in _INTS else 0

    def floats(column: str, shape: Sequence[int]) -> Tensor:
        return _floats(column, kinds[column], values[column], shape)

    if not values[name]:
        raise cache.damaged(f"its {name} is empty: the image was smaller")
    latent = floats(name, _shape(name, text("latents_shape")))
    if latent.ndim != 3:
        raise cache.damaged(f"its {name} has the shape {list(latent.shape)}, expected [C, h, w]")
    caption, texts, flipped = text("caption"), tuple[cache.Text, ...](), name + FLIPPED_SUFFIX
    if caption and values.get(_TOKENS):
        texts = (cache.Text(caption=caption, tokens=floats(_TOKENS, (number("caption_tokens") or _NUM_TOKENS, -1))),)
    height, width = number("original_height"), number("original_width")
    return cache.Cached(
        latent=latent,
        flipped=floats(flipped, latent.shape) if values.get(flipped) else None,
        geometry=cache.Geometry(original=cache.pair((height, width), "original size") if height and width else None),
        captions=(caption,) if caption else (),
        texts=texts,
        left_out=tuple(own for own, data in values.items() if data and (own in ("jpg", "mask") or own.startswith("control/"))),
    )


def _shape(name: str, told: str) -> tuple[int, ...]:
    """Return the shape [C, h, w] of a column's latents: as the column `latents_shape` says, else 4 channels at an eighth.

    >>> _shape("latents_256", ""), _shape("latents_64x128", "16x8x16")
    ((4, 32, 32), (16, 8, 16))
    """
    if told:
        return tuple(int(side) for side in told.split("x"))
    match = _LATENTS.fullmatch(name)
    assert match is not None
    return 4, int(match["height"]) // 8, int(match["width"] or match["height"]) // 8


def _floats(name: str, kind: str, data: bytes, shape: Sequence[int]) -> Tensor:
    """Return the values of a column as float32. `shape` is that of raw bytes, whose number tells F16 from F32.

    A side of -1 in `shape` is as long as it takes; the values are F16 then.
    """
    if match := _ARRAY.fullmatch(kind):
        dtype, shape = match[1], [int(side) for side in match[2].split(",")]
    elif kind == "bytes":
        dtype = "float32" if len(data) == 4 * math.prod(shape) else "float16"
    else:
        what = f"its column {name} is {kind[:40]}"
        raise cache.damaged(f"{what}, expected bytes of F16 or F32, or ndarray:DTYPE:SHAPE of float16, float32 or float64")
    try:
        values = np.frombuffer(data, np.dtype(dtype).newbyteorder("<")).reshape(tuple(shape))
    except ValueError as error:
        raise cache.damaged(f"its {name} has {len(data)} bytes, expected F16 or F32 of the shape {list(shape)}") from error
    return torch.from_numpy(values.astype(np.float32))


IMPORTER = cache.Importer(
    kind="mds",
    found=_found,
    read=_read,
    variants={},
    other=cache.Variant(family="sd"),
    captions_in="the column caption",
)
