"""Serialise a source as JSON for the other ranks, which read what rank 0 has found instead of listing it again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bucketline.ingest.sources.folder import FolderSource
from bucketline.ingest.sources.hf_dataset import DatasetSource
from bucketline.ingest.sources.objects.source import ObjectFolderSource, ObjectTableSource
from bucketline.ingest.sources.parquet_images import ParquetSource
from bucketline.ingest.sources.table import TableSource
from bucketline.ingest.sources.tar.tar_source import TarSource
from bucketline.typed_json import decode, encode

if TYPE_CHECKING:
    from bucketline.ingest.sources.source import Source
    from bucketline.typed_json import Json

_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (FolderSource, TableSource, DatasetSource, ParquetSource, TarSource, ObjectFolderSource, ObjectTableSource)
}


def source_as_json(source: Source) -> Json:
    """Return a source's kind, path or tars, and options."""
    return {"kind": type(source).__name__, "source": encode(source)}


def source_from_json(value: Json) -> Source:
    """Parse the output of `source_as_json`.

    Raises:
        ValueError: if the value is anything else.
    """
    match value:
        case {"kind": str(kind), "source": fields} if kind in _KINDS:
            source: Source = decode(_KINDS[kind], fields)
            return source
    raise ValueError(f"not a source: {value!r:.200}")
