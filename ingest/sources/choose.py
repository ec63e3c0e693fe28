"""Choosing the kind of a source by what SOURCE is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from bucketline.errors import SourceError, UsageError
from bucketline.ingest.sources.dataset import DatasetSource, is_saved_dataset
from bucketline.ingest.sources.folder import FolderSource
from bucketline.ingest.sources.source import IMAGE_SUFFIXES
from bucketline.ingest.sources.table import TableSource
from bucketline.ingest.sources.table_rows import TABLE_SUFFIXES
from bucketline.ingest.sources.tar import expand, is_url, local_path
from bucketline.near_names import why_not_there

if TYPE_CHECKING:
    from bucketline.ingest.sources.source import Source

_EXPECTED = (
    "a folder of images, a table (.jsonl, .csv, .parquet), WebDataset tars (a file, a pattern or a URL) "
    "or a dataset saved on disk"
)
_TAR = re.compile(r"\.(tar(\.\w+)?|tgz)$")


def open_source(text: str) -> Source:
    """Take `text` for a folder, a saved dataset, a table or tars. What is there decides; no image is read or listed yet.

    Raises:
        SourceError: where it is none of these.
        UsageError: where it is empty.
    """
    if not text:  # a variable of the shell that is not set: the folder one happens to stand in is not what was meant
        raise UsageError(f"the source is an empty text; expected {_EXPECTED}")
    path = local_path(text)
    if path is not None and path.is_dir():
        return DatasetSource(path=path) if is_saved_dataset(path) else FolderSource(path=path)
    if path is not None and path.suffix.lower() in TABLE_SUFFIXES and not is_pattern(text):
        if not path.is_file():
            raise SourceError(f"{text} is not there: {why_not_there(path)}; expected a table with file_name and text")
        return TableSource(path=path)
    if is_url(text) or is_pattern(text) or _TAR.search(text):
        return expand(text)
    path = Path(text)
    if not path.exists():
        raise SourceError(f"{text} is not there: {why_not_there(path)}; expected {_EXPECTED}")
    if path.suffix.lower() in IMAGE_SUFFIXES:
        raise SourceError(
            f"{text} is one picture; expected the folder that it lies in, or a table (.jsonl) that names it alone"
        )
    raise SourceError(f"{text} is a file that is none of the known sources; expected {_EXPECTED}")


def is_pattern(text: str) -> bool:
    """Say whether a text is a pattern of several files."""
    return any(letter in text for letter in "{*?[") or "::" in text
