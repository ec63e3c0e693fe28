"""Serialise a source as JSON for the other ranks, which read what rank 0 has found instead of listing it again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bucketline.ingest.sources.folder import FolderSource
from bucketline.ingest.sources.hf_dataset import DatasetSource
from bucketline.ingest.sources.objects.source import ObjectFolderSource, ObjectTableSource
from bucketline.ingest.sources.options import SourceOptions
from bucketline.ingest.sources.table import TableSource
from bucketline.ingest.sources.tar.tar_source import Shard, TarSource
from bucketline.typed_json import decode, encode

if TYPE_CHECKING:
    from bucketline.ingest.sources.source import Source
    from bucketline.typed_json import Json

_OF_ONE_URL: dict[str, type[ObjectFolderSource | ObjectTableSource]] = {
    "objects": ObjectFolderSource,
    "table of objects": ObjectTableSource,
}
_OF_ONE_PATH: dict[str, type[FolderSource | TableSource | DatasetSource]] = {
    "folder": FolderSource,
    "table": TableSource,
    "dataset": DatasetSource,
}


def source_as_json(source: Source) -> Json:
    """Return a source's kind, path or tars, and options."""
    if isinstance(source, TarSource):
        paths = [None if shard.path is None else str(shard.path) for shard in source.shards]
        tars: list[Json] = [{"url": s.url, "path": path} for s, path in zip(source.shards, paths, strict=True)]
        return {"kind": "tars", "tars": tars, "options": encode(source.options)}
    for kind, cls in _OF_ONE_PATH.items():
        if isinstance(source, cls):
            return {"kind": kind, "path": str(source.path), "options": encode(source.options)}
    for kind, of_url in _OF_ONE_URL.items():
        if isinstance(source, of_url):
            return {"kind": kind, "url": source.url, "options": encode(source.options)}
    raise TypeError(f"{type(source).__name__} has no JSON form")


def source_from_json(value: Json) -> Source:
    """Parse the output of `source_as_json`.

    Raises:
        ValueError: if the value is anything else.
    """
    match value:
        case {"kind": "tars", "tars": list(tars), "options": options}:
            return TarSource(shards=tuple(map(_shard, tars)), options=decode(SourceOptions, options))
        case {"kind": str(kind), "path": str(path), "options": options} if kind in _OF_ONE_PATH:
            return _OF_ONE_PATH[kind](path=Path(path), options=decode(SourceOptions, options))
        case {"kind": str(kind), "url": str(url), "options": options} if kind in _OF_ONE_URL:
            return _OF_ONE_URL[kind](url=url, options=decode(SourceOptions, options))
    raise ValueError(f"not a source: {value!r:.200}")


def _shard(value: Json) -> Shard:
    match value:
        case {"url": str(url), "path": None}:
            return Shard(url=url, path=None)
        case {"url": str(url), "path": str(path)}:
            return Shard(url=url, path=Path(path))
    raise ValueError(f"not a tar: {value!r:.200}")
