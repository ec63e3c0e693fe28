"""Choosing the kind of a source by what SOURCE is."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from bucketline.errors import SourceError
from bucketline.ingest.sources.dataset import DatasetSource, is_saved_dataset
from bucketline.ingest.sources.folder import FolderSource
from bucketline.ingest.sources.table import TableSource
from bucketline.ingest.sources.table_rows import TABLE_SUFFIXES
from bucketline.ingest.sources.tar import expand, is_url, local_path

if TYPE_CHECKING:
    from bucketline.ingest.sources.source import Source

_TAR = re.compile(r"\.(tar(\.\w+)?|tgz)$")


def open_source(text: str) -> Source:
    """Take `text` for a folder, a saved dataset, a table or tars. What is there decides; no image is read or listed yet.

    Raises:
        SourceError: where it is none of these.
    """
    path = local_path(text)
    if path is not None and path.is_dir():
        return DatasetSource(path=path) if is_saved_dataset(path) else FolderSource(path=path)
    if path is not None and path.suffix.lower() in TABLE_SUFFIXES and not is_pattern(text):
        if not path.is_file():
            raise SourceError(f"{text} is no file; expected a table with file_name and text")
        return TableSource(path=path)
    if is_url(text) or is_pattern(text) or _TAR.search(text):
        return expand(text)
    raise SourceError(
        f"{text} is not a folder; expected a folder of images, a table (.jsonl, .csv, .parquet), "
        "WebDataset tars (a file, a pattern or a URL) or a dataset saved on disk"
    )


def is_pattern(text: str) -> bool:
    """Say whether a text is a pattern of several files."""
    return any(letter in text for letter in "{*?[") or "::" in text
