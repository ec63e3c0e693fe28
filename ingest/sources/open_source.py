"""Choose the kind of source by what SOURCE is; and sources as JSON, for ranks that do not choose again."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bucketline.errors import SourceError, UsageError
from bucketline.files.paths import IMAGE_SUFFIXES, why_not_there
from bucketline.files.redact import redacted
from bucketline.ingest.sources.captions.metadata_table import TABLE_SUFFIXES
from bucketline.ingest.sources.folder import FolderSource
from bucketline.ingest.sources.hf_dataset import DatasetSource, is_saved_dataset
from bucketline.ingest.sources.objects.place import is_object_url
from bucketline.ingest.sources.objects.source import ObjectFolderSource, ObjectTableSource
from bucketline.ingest.sources.options import SourceOptions
from bucketline.ingest.sources.parquet_images import ParquetSource, has_images
from bucketline.ingest.sources.table import TableSource
from bucketline.ingest.sources.tar.tar_source import TAR, Shard, TarSource, expand, has_scheme, local_path
from bucketline.store.remote.urls import parse_url, refuse_misspelt
from bucketline.typed_json import decode, encode

if TYPE_CHECKING:
    from bucketline.ingest.sources.source import Source
    from bucketline.typed_json import Json

_EXPECTED = (
    "a folder of images, of tars or of Parquet files with images, a table (.jsonl, .csv, .parquet), WebDataset tars (a file, "
    "a pattern or a URL), the URL of a folder, table or tars in object storage, or a dataset saved on disk"
)
_PARQUET = ".parquet"
_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (FolderSource, TableSource, DatasetSource, ParquetSource, TarSource, ObjectFolderSource, ObjectTableSource)
}


def open_source(text: str, options: SourceOptions | None = None) -> Source:
    """Open a folder, saved dataset, table or tars, depending on what `text` names. Does not list or read images yet."""
    options = (options or SourceOptions()).alone()
    if not text:  # such as an unset shell variable: the current folder is not what was meant
        raise UsageError(f"the source is empty; expected {_EXPECTED}")
    if re.match(r"(s3|gs|az):/(?!/)", text):
        refuse_misspelt(text)
    if is_object_url(text):
        return _in_objects(text, options)
    path = local_path(text)
    if path is not None and path.is_dir():
        if is_saved_dataset(path):
            return DatasetSource(path=path, options=options)
        return _without_images(path, options) or FolderSource(path=path, options=options)
    if path is not None and path.suffix.lower() in TABLE_SUFFIXES and not is_pattern(text):
        if not path.is_file():
            raise SourceError(f"{text} does not exist: {why_not_there(path)}; expected a table with file_name and text")
        if path.suffix.lower() == _PARQUET and has_images(path):
            return ParquetSource(root=path.parent, files=(path,), options=options)
        return TableSource(path=path, options=options)
    if has_scheme(text) or is_pattern(text) or TAR.search(text):
        return expand(text, options)
    path = Path(text)
    if not path.exists():
        raise SourceError(f"{redacted(text)} does not exist: {redacted(why_not_there(path))}; expected {_EXPECTED}")
    if path.suffix.lower() in IMAGE_SUFFIXES:
        raise SourceError(f"{text} is an image; expected its folder, or a table (.jsonl) that lists only this image")
    raise SourceError(f"{text} is not a known kind of source; expected {_EXPECTED}")


def _without_images(folder: Path, options: SourceOptions) -> Source | None:
    """Open the tars, or the Parquet files with images, of a folder that has no image files; None if it has neither."""
    tars, parquet = list[Path](), list[Path]()
    for at, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        names = sorted(name for name in files if not name.startswith("."))
        if any(os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES for name in names):  # noqa: PTH122 - as in a listing
            return None
        tars += [Path(at, name) for name in names if TAR.search(name)]
        parquet += [Path(at, name) for name in names if name.lower().endswith(_PARQUET)]
    parquet = [path for path in parquet if has_images(path)]
    if tars and parquet:
        raise SourceError(
            f"{folder} has no image files, but tars ({tars[0].relative_to(folder)}) and Parquet files with images "
            f"({parquet[0].relative_to(folder)}); pack the tars by '{folder}/**/*.tar', and move the Parquet files to "
            "a folder of their own"
        )
    if parquet:
        return ParquetSource(root=folder, files=tuple(parquet), options=options)
    shards = tuple(Shard(url=str(path), path=path) for path in tars)
    return TarSource(root=str(folder), shards=shards, options=options) if tars else None


def _in_objects(url: str, options: SourceOptions) -> Source:
    """Open a source in object storage. What is a folder there shows when it is listed."""
    suffix = f".{url.rpartition('.')[2].lower()}"
    if "?" in url or not is_pattern(url):
        parse_url(url)
    if is_pattern(url) or TAR.search(url):
        return expand(url, options)
    if suffix in TABLE_SUFFIXES:
        return ObjectTableSource(url=url, options=options)
    if suffix in IMAGE_SUFFIXES:
        raise SourceError(f"{url} is an image; expected its folder, or a table (.jsonl) that lists only this image")
    return ObjectFolderSource(url=url.rstrip("/"), options=options)


def is_pattern(text: str) -> bool:
    """Return True if a text is a pattern for several files."""
    return any(letter in text for letter in "{*?[") or "::" in text


def source_as_json(source: Source) -> Json:
    """Return a source's kind, path or tars, and options."""
    return {"kind": type(source).__name__, "source": encode(source)}


def source_from_json(value: Json) -> Source:
    """Parse the output of `source_as_json`."""
    match value:
        case {"kind": str(kind), "source": fields} if kind in _KINDS:
            source: Source = decode(_KINDS[kind], fields)
            return source
    raise ValueError(f"not a source: {value!r:.200}")
