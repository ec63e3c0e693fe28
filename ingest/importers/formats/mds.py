"""MDS datasets of mosaicml/diffusion and its kin: `index.json` and shards, one sample after another.

Shards may be compressed, and listed by one merged index. A shard has the number of samples as U32, their offsets, and a JSON
description of its columns; a sample the lengths of its columns of variable length, then all columns. Latents are F16 or F32
bytes, or arrays of floats, in the columns `latents_256` and `latents_512`, times the scaling factor, empty where the image is
smaller than that. `store export --format mds` writes others as `latents_HEIGHTxWIDTH`, those of the mirrored images with
`/flipped` after the name, masks with `mask_shape`, and latents of control images as `control/NAME`. The token embeddings are
those of Stable Diffusion 2's CLIP, in `caption_latents`. Columns of pickles are refused.
Source: `streaming/base/format/mds/reader.py`, mosaicml/diffusion's `precompute_latents.py`.
"""

from __future__ import annotations

import json
import re
import struct
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from bucketline.errors import SourceError
from bucketline.ingest.images.rejects import RejectedError
from bucketline.ingest.importers import cache
from bucketline.ingest.importers.reading.caption_folder import CaptionFolder
from bucketline.ingest.importers.reading.mds_shards import MDS_INDEX, is_mds, listed_shards, mds_part_of, sample_places
from bucketline.ingest.importers.reading.mds_values import floats, why_no_floats
from bucketline.store.format.columns import FLIPPED_SUFFIX, ROLE

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    Columns = Mapping[str, tuple[str, int | None]]  # encoding and length by name, as of `MdsShard`

_LATENTS = re.compile(r"latents_(?P<height>\d{1,6})(x(?P<width>\d{1,6}))?")
_SIZES = {"int": 8, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8}
_SIZES |= {"float16": 2, "float32": 4, "float64": 8}
_KEYS = ("key", "id", "hash", "image_path")  # columns that may name a sample
_NUM_TOKENS = 77  # of a caption, where no column says how many
_TOKENS = "caption_latents"


def _is_here(source: Path) -> bool:
    return any(is_mds(source / folder / MDS_INDEX) for folder, names in cache.files_below(source) if MDS_INDEX in names)


def _listed(request: cache.ListRequest) -> cache.CacheListing:
    captions = CaptionFolder(request, "the column caption")
    shards = list(listed_shards(request.source))
    columns = Counter[str]()
    for shard in shards:
        columns.update({name: shard.samples for name in shard.columns if _LATENTS.fullmatch(name)})
    has_one = all(sum(bool(_LATENTS.fullmatch(name)) for name in shard.columns) == 1 for shard in shards)
    # `store export` writes one column for each size, in folders of their own
    variant = (
        ""
        if request.variant is None and shards and has_one
        else cache.chosen_variant(columns, request, "mds", variants="columns")
    )
    entries: list[cache.CacheEntry] = []
    seen: Counter[str] = Counter()
    has_text = False
    for shard in shards:
        of = shard.columns
        latents = variant or next((name for name in of if _LATENTS.fullmatch(name)), "")
        if latents not in of:
            continue
        _refuse_other_numbers(request.source / shard.path, latents, of)
        has_text |= _TOKENS in of
        packed = (shard.compression, shard.num_bytes)
        for number, (offset, length) in enumerate(sample_places(request.source, shard)):
            name = f"{shard.name}/{number}"
            sample_id = _named(request.source, shard.path, packed, (offset, length), of) or name
            seen[sample_id] += 1
            sample_id = sample_id if seen[sample_id] == 1 else f"{sample_id} ({name})"
            own, problem = captions.of(sample_id)
            entries.append(
                cache.CacheEntry(
                    id=sample_id,
                    path=shard.path,
                    at=(offset, length, latents, json.dumps(of), *packed),
                    captions=own,
                    caption_problem=problem,
                    stamp=(length, (request.source / shard.path).stat().st_mtime_ns),
                )
            )
    return cache.CacheListing(
        entries=entries,
        variant=variant,
        scaling=cache.Scaling.AS_FED,
        family="sd" if has_text else None,
        captions_from=captions.told,
    )


def _refuse_other_numbers(path: Path, latents: str, columns: Columns) -> None:
    """Check that the columns that are read hold floats.

    Raises:
        SourceError: if one does not.
    """
    for name, (kind, _) in columns.items():
        is_read = name in (latents, latents + FLIPPED_SUFFIX, _TOKENS) or name.startswith("control/")
        if is_read and (why := why_no_floats(name, kind)):
            raise SourceError(f"{path}: {why}; write the dataset again")


def _named(source: Path, path: str, packed: tuple[str, int], place: tuple[int, int], columns: Columns) -> str | None:
    """Return what names a sample, if a column does; reads only the lengths and that column."""
    name = next((key for key in _KEYS if columns.get(key, ("",))[0] == "str"), None)
    if name is None:
        return None
    try:
        begin, size = _column_places(source, path, packed, place, columns)[name]
        return mds_part_of(source, path, *packed, begin, size).decode("utf-8") or None
    except (RejectedError, UnicodeDecodeError):
        return None  # reading the sample completely says what is wrong


def _column_places(
    source: Path, path: str, packed: tuple[str, int], place: tuple[int, int], columns: Columns
) -> dict[str, tuple[int, int]]:
    """Return the offset in the shard, and the length, of each column of a sample.

    Raises:
        RejectedError: if they do not add up to the sample's length.
    """
    offset, length = place
    free = [name for name, (_, size) in columns.items() if size is None]
    lengths = iter(struct.unpack(f"<{len(free)}I", mds_part_of(source, path, *packed, offset, 4 * len(free))))
    at, places = offset + 4 * len(free), {}
    for name, (_, size) in columns.items():
        own = next(lengths) if size is None else int(size)
        places[name] = at, own
        at += own
    if at != offset + length:
        raise cache.damaged(f"its columns take {at - offset} bytes, the shard has {length} for it")
    return places


def _read(source: Path, entry: cache.CacheEntry, _variant: str) -> cache.Cached:
    offset, length = int(entry.at[0]), int(entry.at[1])
    name, columns = str(entry.at[2]), json.loads(str(entry.at[3]))
    packed = str(entry.at[4]), int(entry.at[5])
    data = mds_part_of(source, entry.path, *packed, offset, length)
    values = {
        own: data[begin - offset : begin - offset + size]
        for own, (begin, size) in _column_places(source, entry.path, packed, (offset, length), columns).items()
    }
    caption = _text(values, "caption")
    texts: tuple[cache.Text, ...] = ()
    if caption and len(tokens := values.get(_TOKENS, b"")):
        number = _number(values, columns, "caption_tokens") or _NUM_TOKENS
        texts = (cache.Text(caption=caption, tokens=floats(_TOKENS, columns[_TOKENS][0], tokens, (number, -1))),)
    height, width = (_number(values, columns, f"original_{side}") for side in ("height", "width"))
    flipped = name + FLIPPED_SUFFIX  # which `store export` writes next to the latent
    if not values[name]:
        raise cache.damaged(f"its {name} is empty: the image was smaller")
    latent = floats(name, columns[name][0], values[name], _shape(name, _text(values, "latents_shape")))
    if latent.ndim != 3:
        raise cache.damaged(f"its {name} has the shape {list(latent.shape)}, expected [C, h, w]")
    return cache.Cached(
        latent=latent,
        flipped=floats(flipped, columns[flipped][0], values[flipped], tuple(latent.shape)) if values.get(flipped) else None,
        geometry=cache.Geometry(original=(int(height), int(width)) if height and width else None),
        captions=(caption,) if caption else (),
        texts=texts,
        columns=_side(values, columns, tuple(latent.shape)),
        leaves_out="the image's JPEG" if values.get("jpg") else None,
    )


def _side(values: dict[str, bytes], columns: Columns, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Return the columns that `store export` writes next to the latents, of a sample that has them."""
    found = {
        name: floats(name, columns[name][0], data, shape)
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


def _number(values: dict[str, bytes], columns: dict[str, Any], name: str) -> int | None:
    if name not in values or _SIZES.get(columns[name][0]) != len(values[name]) or "float" in columns[name][0]:
        return None
    return int.from_bytes(values[name], "little", signed=True)


IMPORTER = cache.Importer(kind="mds", is_here=_is_here, listed=_listed, read=_read)
