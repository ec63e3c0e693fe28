"""MDS datasets of mosaicml/diffusion and its kin: `index.json` and shards, one sample after another.

A shard has the number of samples as U32, their offsets, and a JSON description of its columns; a sample the lengths of its
columns of variable length, then all columns. Latents are F16 bytes in the columns `latents_256` and `latents_512`, times the
scaling factor, empty where the image is smaller than that. `store export --format mds` writes others as `latents_HEIGHTxWIDTH`,
masks with `mask_shape`, and latents of control images as `control/NAME`. The token embeddings are those of Stable Diffusion 2's
CLIP, in `caption_latents`. Columns of pickles are refused. Source: `streaming/base/format/mds/reader.py`, mosaicml/diffusion's
`precompute_latents.py`.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bucketline.errors import SourceError
from bucketline.ingest.images.rejects import RejectedError
from bucketline.ingest.importers import cache
from bucketline.ingest.importers.reading.caption_folder import CaptionFolder
from bucketline.ingest.importers.reading.read_files import read_part
from bucketline.store.format.columns import ROLE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


_INDEX = "index.json"
_LATENTS = re.compile(r"latents_(?P<height>\d+)(x(?P<width>\d+))?")
_SIZES = {"int": 8, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8}
_SIZES |= {"float16": 2, "float32": 4, "float64": 8}
_KEYS = ("key", "id", "hash", "image_path")  # columns that may name a sample
_PICKLES = ("pkl", "pickle")
_NUM_TOKENS = 77  # of a caption, where no column says how many
_TOKENS = "caption_latents"


def _is_here(source: Path) -> bool:
    return any(_is_mds(source / folder / _INDEX) for folder, names in cache.files_below(source) if _INDEX in names)


def _is_mds(path: Path) -> bool:
    found = cache.read_json(path)
    shards = found.get("shards") if isinstance(found, dict) else None
    return isinstance(shards, list) and any(isinstance(one, dict) and one.get("format") == "mds" for one in shards)


def _listed(request: cache.ListRequest) -> cache.Listing:
    captions = None if request.captions is None else CaptionFolder(request)
    shards = list(_shards(request.source))
    columns = Counter[str]()
    for shard in shards:
        columns.update({name: shard["samples"] for name in shard["column_names"] if _LATENTS.fullmatch(name)})
    has_one = all(sum(bool(_LATENTS.fullmatch(name)) for name in shard["column_names"]) == 1 for shard in shards)
    # `store export` writes one column for each size, in folders of their own
    variant = (
        ""
        if request.variant is None and shards and has_one
        else cache.chosen_variant(columns, request, "mds", variants="columns")
    )
    entries: list[cache.Entry] = []
    seen: Counter[str] = Counter()
    has_text = False
    for shard in shards:
        of = {name: (kind, size) for name, kind, size in zip(*(shard[key] for key in _COLUMNS), strict=True)}
        latents = variant or next((name for name in of if _LATENTS.fullmatch(name)), "")
        if latents not in of:
            continue
        has_text |= _TOKENS in of
        path = f"{shard['folder']}{shard['basename']}"
        for number, (offset, length) in enumerate(_places(request.source, path, shard["samples"])):
            name = f"{path}/{number}"
            sample_id = _named(request.source, path, offset, length, of) or name
            seen[sample_id] += 1
            sample_id = sample_id if seen[sample_id] == 1 else f"{sample_id} ({name})"
            own, problem = (None, None) if captions is None else captions.of(sample_id)
            entries.append(
                cache.Entry(
                    id=sample_id,
                    path=path,
                    at=(offset, length, latents, json.dumps(of)),
                    captions=own,
                    caption_problem=problem,
                    stamp=(length, (request.source / path).stat().st_mtime_ns),
                )
            )
    return cache.Listing(
        entries=entries,
        variant=variant,
        scaling=cache.Scaling.AS_FED,
        family="sd" if has_text else None,
        captions_from="the column caption" if captions is None else captions.told,
    )


_COLUMNS = ("column_names", "column_encodings", "column_sizes")


def _shards(source: Path) -> Iterator[dict[str, Any]]:
    """Yield the shards that the index files list, with their folder.

    Raises:
        SourceError: if one is compressed, has a column of pickles, or is not described.
    """
    for folder, names in cache.files_below(source):
        if _INDEX not in names or not _is_mds(path := source / folder / _INDEX):
            continue
        for shard in cache.read_json(path)["shards"]:
            try:
                lists = [shard[key] for key in _COLUMNS]
                if len({*map(len, lists)}) != 1 or not all(isinstance(name, str) for name in lists[0] + lists[1]):
                    raise TypeError("its columns")
                pickled = [name for name, kind in zip(lists[0], lists[1], strict=True) if kind in _PICKLES]
                basename, number = str(shard["raw_data"]["basename"]), int(shard["samples"])
            except (KeyError, TypeError, ValueError) as error:
                raise SourceError(f"{path} describes a shard without {error!s:.80}; write the dataset again") from error
            if shard.get("format") != "mds" or "/" in basename or number < 0:
                raise SourceError(f"{path} lists {basename!r:.80}, which is not a shard of MDS")
            if pickled:
                raise SourceError(f"{path}: column {pickled[0]!r:.80} holds pickles, which are never read; write it as bytes")
            if not (source / folder / basename).is_file():
                packed = f" (only {shard['zip_data']['basename']}: decompress it)" if shard.get("zip_data") else ""
                raise SourceError(f"{source / folder / basename} is missing{packed}; the list would not be complete")
            yield {**shard, "folder": folder, "basename": basename, "samples": number}


def _places(source: Path, path: str, number: int) -> list[tuple[int, int]]:
    """Return offset and length of each sample of a shard.

    Raises:
        SourceError: if the shard does not begin as its index says.
    """
    try:
        head = read_part(source, path, 0, 4 * (number + 2))
        found, *offsets = struct.unpack(f"<{number + 2}I", head)
        if found != number or offsets != sorted(offsets) or offsets[0] < len(head):
            raise cache.damaged(f"it begins with {found} samples")
    except RejectedError as error:
        raise SourceError(
            f"{source / path} is not the shard of {number} samples that its index lists: {error.detail}"
        ) from error
    return [(begin, end - begin) for begin, end in pairwise(offsets)]


def _named(source: Path, path: str, offset: int, length: int, columns: dict[str, Any]) -> str | None:
    """Return what names a sample, if a column does; reads only the lengths and that column."""
    name = next((key for key in _KEYS if columns.get(key, ("",))[0] == "str"), None)
    if name is None:
        return None
    try:
        places = _column_places(source, path, offset, length, columns)
        begin, size = places[name]
        return read_part(source, path, begin, size).decode("utf-8") or None
    except (RejectedError, UnicodeDecodeError):
        return None  # reading the sample completely says what is wrong


def _column_places(source: Path, path: str, offset: int, length: int, columns: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the offset in the shard, and the length, of each column of a sample.

    Raises:
        RejectedError: if they do not add up to the sample's length.
    """
    free = [name for name, (_, size) in columns.items() if size is None]
    lengths = iter(struct.unpack(f"<{len(free)}I", read_part(source, path, offset, 4 * len(free))))
    at, places = offset + 4 * len(free), {}
    for name, (_, size) in columns.items():
        own = next(lengths) if size is None else int(size)
        places[name] = at, own
        at += own
    if at != offset + length:
        raise cache.damaged(f"its columns take {at - offset} bytes, the shard has {length} for it")
    return places


def _read(source: Path, entry: cache.Entry, _variant: str) -> cache.Cached:
    offset, length = int(entry.at[0]), int(entry.at[1])
    name, columns = str(entry.at[2]), json.loads(str(entry.at[3]))
    data = read_part(source, entry.path, offset, length)
    values = {
        own: data[begin - offset : begin - offset + size]
        for own, (begin, size) in _column_places(source, entry.path, offset, length, columns).items()
    }
    caption = _text(values, "caption")
    texts: tuple[cache.Text, ...] = ()
    if caption and len(tokens := values.get(_TOKENS, b"")):
        number = _number(values, columns, "caption_tokens") or _NUM_TOKENS
        texts = (cache.Text(caption=caption, tokens=_half(tokens, (number, -1), _TOKENS)),)
    height, width = (_number(values, columns, f"original_{side}") for side in ("height", "width"))
    shape = _shape(name, len(values[name]), _text(values, "latents_shape"))
    return cache.Cached(
        latent=_half(values[name], shape, name),
        geometry=cache.Geometry(original=(int(height), int(width)) if height and width else None),
        captions=(caption,) if caption else (),
        texts=texts,
        columns=_side(values, shape),
        leaves_out="the image's JPEG" if values.get("jpg") else None,
    )


def _side(values: dict[str, bytes], shape: tuple[int, int, int]) -> dict[str, torch.Tensor]:
    """Return the columns that `store export` writes next to the latents, of a sample that has them."""
    found = {
        name: _half(data, shape, name)
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


def _shape(name: str, num_bytes: int, told: str) -> tuple[int, int, int]:
    """Return the shape [C, h, w] of a column's latents: as the column `latents_shape` says, else 4 channels at an eighth.

    >>> _shape("latents_256", 8192, ""), _shape("latents_64x128", 4096, "16x8x16")
    ((4, 32, 32), (16, 8, 16))
    """
    match = _LATENTS.fullmatch(name)
    assert match is not None
    if num_bytes == 0:
        raise cache.damaged(f"its {name} is empty: the image was smaller")
    height, width = int(match["height"]), int(match["width"] or match["height"])
    shape = 4, height // 8, width // 8
    if told:
        if not (found := re.fullmatch(r"(\d{1,6})x(\d{1,6})x(\d{1,6})", told)):
            raise cache.damaged(f"its latents_shape is {told!r:.80}, expected CxHxW")
        shape = int(found[1]), int(found[2]), int(found[3])
    if num_bytes != 2 * math.prod(shape):
        raise cache.damaged(f"its {name} has {num_bytes} bytes, expected F16 of the shape {list(shape)}")
    return shape


def _half(data: bytes, shape: tuple[int, ...], name: str) -> torch.Tensor:
    if len(data) % (2 * abs(math.prod(shape))):
        raise cache.damaged(f"its {name} has {len(data)} bytes, expected F16 of the shape {list(shape)}")
    return torch.from_numpy(np.frombuffer(data, dtype="<f2").reshape(shape).copy()).float()


def _text(values: dict[str, bytes], name: str) -> str:
    try:
        return values.get(name, b"").decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise cache.damaged(f"its {name} is not UTF-8 (byte {error.start})") from error


def _number(values: dict[str, bytes], columns: dict[str, Any], name: str) -> int | None:
    if name not in values or _SIZES.get(columns[name][0]) != len(values[name]) or "float" in columns[name][0]:
        return None
    return int.from_bytes(values[name], "little", signed=True)


IMPORTER = cache.Importer(kind="mds", is_here=_is_here, listed=_listed, read=_read)
