"""The index and the shards of an MDS dataset, compressed or not, also under one merged index.

An index lists its shards with their columns. That of `merge_index` lists those of the folders below it, as FOLDER/NAME, next
to the folders' own. A shard may be there only compressed, as `zip_data`; it is then unpacked in memory, a few at a time.
Source: `streaming/base/format/mds/reader.py`, `streaming/base/compression.py`, `streaming/base/util.py`.
"""

from __future__ import annotations

import bz2
import struct
import zlib
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from bucketline.errors import SourceError
from bucketline.ingest.images.rejects import RejectedError
from bucketline.ingest.importers import cache
from bucketline.ingest.importers.reading.read_files import LastRead, read_part, read_whole

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MDS_INDEX = "index.json"
MAX_SAMPLES = 1 << 28  # of a shard, whose offsets are U32
_MAX_SHARD_BYTES = 1 << 33
_MAX_UNPACKED_BYTES = 1 << 30  # of a compressed shard; Streaming's own limit is 64 MiB unless its user sets another
_KEPT_BYTES = 256 << 20  # of unpacked shards, besides the newest
_COLUMNS = ("column_names", "column_encodings", "column_sizes")
_PICKLES = ("pkl", "pickle")
_BY_ARROW = {"zstd": "zstd", "br": "brotli", "snappy": "snappy"}
_STANDARD = ("gz", "bz2")


_unpacked: LastRead[bytes] = LastRead(_KEPT_BYTES, len)


@dataclass(frozen=True, slots=True, kw_only=True)
class MdsShard:
    """A shard that an index lists."""

    name: str  # path of the uncompressed shard, from the source's folder
    path: str  # of the file that is there
    compression: str  # of that file; empty if there is none
    num_bytes: int  # uncompressed
    samples: int
    columns: dict[str, tuple[str, int | None]]  # encoding and length by name; None if it varies


def is_mds(path: Path) -> bool:
    """Return True if a file is the index of an MDS dataset."""
    found = cache.read_json(path)
    shards = found.get("shards") if isinstance(found, dict) else None
    return isinstance(shards, list) and any(isinstance(one, dict) and one.get("format") == "mds" for one in shards)


def listed_shards(source: Path) -> Iterator[MdsShard]:
    """Yield the shards that the index files of a source list, each once.

    Raises:
        SourceError: if one is missing or compressed in an unknown way, has a column of pickles, or is not described.
    """
    known: dict[str, MdsShard] = {}
    for folder, names in cache.files_below(source):
        if MDS_INDEX not in names or not is_mds(path := source / folder / MDS_INDEX):
            continue
        for described in cache.read_json(path)["shards"]:
            shard = _shard(source, folder, path, described)
            if (other := known.setdefault(shard.name, shard)) != shard:
                raise SourceError(
                    f"{path} describes {shard.name} with {shard.samples} samples, another index in {source} with "
                    f"{other.samples}; remove the index that is not current"
                )
            if other is shard:
                yield shard


def _shard(source: Path, folder: str, path: Path, described: Any) -> MdsShard:  # noqa: ANN401 - JSON
    try:
        lists = [described[key] for key in _COLUMNS]
        if not all(isinstance(one, list) for one in lists) or len({*map(len, lists)}) != 1:
            raise TypeError("its columns")
        if not all(isinstance(name, str) for name in lists[0] + lists[1]):
            raise TypeError("its columns")
        if not all(size is None or (type(size) is int and 0 <= size <= _MAX_UNPACKED_BYTES) for size in lists[2]):
            raise TypeError("its columns' sizes")
        raw, number = described["raw_data"], described["samples"]
        name, num_bytes = _relative(raw["basename"]), raw["bytes"]
        if not all(type(one) is int for one in (number, num_bytes)) or not 0 <= number <= MAX_SAMPLES:
            raise TypeError("its samples")
        if not 0 <= num_bytes < _MAX_SHARD_BYTES:
            raise TypeError("its bytes")
        packed = described.get("zip_data")
        packed_name = None if packed is None else _relative(packed["basename"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SourceError(f"{path} describes a shard without {error!s:.80}; write the dataset again") from error
    columns = {own: (kind, size) for own, kind, size in zip(*lists, strict=True)}
    if described.get("format") != "mds":
        raise SourceError(f"{path} lists {name!r:.80}, which is not a shard of MDS")
    if pickled := next((own for own, (kind, _) in columns.items() if kind in _PICKLES), None):
        raise SourceError(f"{path}: column {pickled!r:.80} holds pickles, which are never read; write it as bytes")
    is_there = (source / folder / name).is_file()
    if not is_there and (packed_name is None or not (source / folder / packed_name).is_file()):
        raise SourceError(f"{source / folder / name} is missing; the list would not be complete")
    compression = "" if is_there else str(described.get("compression")).partition(":")[0]
    if compression and compression not in {*_BY_ARROW, *_STANDARD}:
        raise SourceError(
            f"{source / folder / str(packed_name)} is compressed by {compression!r:.40}, expected one of "
            f"{', '.join((*_BY_ARROW, *_STANDARD))}; decompress it"
        )
    if compression and num_bytes > _MAX_UNPACKED_BYTES:
        raise SourceError(
            f"{source / folder / str(packed_name)} has {num_bytes} bytes uncompressed, at most {_MAX_UNPACKED_BYTES} are "
            "unpacked in memory; decompress it"
        )
    return MdsShard(
        name=f"{folder}{name}",
        path=f"{folder}{packed_name if compression else name}",
        compression=compression,
        num_bytes=num_bytes,
        samples=number,
        columns=columns,
    )


def _relative(name: object) -> str:
    """Return the path of a shard below its index.

    Raises:
        TypeError: if it is not one.
    """
    if not isinstance(name, str) or not name.isprintable() or not name or "\\" in name:
        raise TypeError("a usable basename")
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or str(path) != name:
        raise TypeError("a usable basename")
    return name


def sample_places(source: Path, shard: MdsShard) -> list[tuple[int, int]]:
    """Return offset and length of each sample of a shard.

    Raises:
        SourceError: if the shard does not begin as its index says.
    """
    number = shard.samples
    try:
        if 4 * (number + 2) > shard.num_bytes:
            raise cache.damaged(f"{shard.num_bytes} bytes are too few for them")
        head = mds_part_of(source, shard.path, shard.compression, shard.num_bytes, 0, 4 * (number + 2))
        found, *offsets = struct.unpack(f"<{number + 2}I", head)
        if found != number or offsets != sorted(offsets) or offsets[0] < len(head):
            raise cache.damaged(f"it begins with {found} samples")
    except RejectedError as error:
        raise SourceError(
            f"{source / shard.path} is not the shard of {number} samples that its index lists: {error.detail}"
        ) from error
    return [(begin, end - begin) for begin, end in pairwise(offsets)]


def mds_part_of(source: Path, path: str, compression: str, num_bytes: int, offset: int, length: int) -> bytes:
    """Return a part of a shard, by its place in the uncompressed one, which has `num_bytes`.

    Raises:
        RejectedError: if it cannot be read or unpacked, or ends before the part does.
    """
    if not compression:
        return read_part(source, path, offset, length)
    data = _unpacked.part(source, path, 0, lambda: _unpack(read_whole(source, path), path, compression, num_bytes))
    if offset + length > len(data):
        raise cache.damaged(f"{path} ends at {len(data)}, before the sample's last byte at {offset + length}")
    return data[offset : offset + length]


def _unpack(data: bytes, path: str, compression: str, num_bytes: int) -> bytes:
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
